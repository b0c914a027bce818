//! Returns the experts' results to the ranks of the tokens, within the LSA team, and adds them up.

use cuda_std::prelude::*;
use cuda_std::{grid, hint, math, mem};
use half::bf16;
use nccl_device::{Coop, DevComm, Lamport, LamportSlots, Window};

use super::ep_layout::{DROPPED, NONE, RETURN_WORDS};
use super::numbered::{Numbered, NumberedSlots};
use super::parts::{Part, Parts, at, warp_index, warps};
use super::shape::{Received, Shape, Steps};

/// Vectors of a part that each lane has: with more ranks fewer, as their addresses take registers.
const fn lane_vectors(ranks: usize) -> usize {
    if ranks == 2 { 2 } else { 1 }
}

/// Vectors of the part of a row that a warp sends at a time.
#[must_use]
pub const fn part_vectors(ranks: usize) -> u32 {
    warp::WARP_SIZE * lane_vectors(ranks) as u32
}

/// Results that are loaded together.
const TOGETHER: usize = 4;

/// The slots for numbered messages from each rank: one that says that the rank has come so far.
pub const NUMBERED_SLOTS: u32 = 1;

/// Positions and weights of some of a token's experts.
type Entries = [(u32, f32); TOGETHER];

/// A lane's vectors of a part of a row.
type Row<const VECTORS: usize> = [Vec16<bf16>; VECTORS];

/// `output[t]` becomes `residual[t]` plus the sum over the experts of token `t` of the expert's row
/// times its weight, for the `tokens` tokens of this rank. Without a `residual` (null), or without
/// an expert, that part of the sum is 0.
///
/// Each rank sums the rows of its experts in f32, in the order of the token's experts, and rounds
/// the sum, which returns to the token's rank. That one adds the sums in the order of the ranks and
/// then the residual, in f32, and rounds once. So the result is determined.
///
/// `rows` are the results in the order of the experts, `returns` what `ep_layout` has left in
/// [`Grouped::returns`](super::ep_layout::Grouped::returns), and `received` what `ep_dispatch` has.
///
/// `steps` is a sum of [`Steps`]. A launch that only sends is followed by one that only receives,
/// in this rank, before any other launch with the same memory.
///
/// `slots` and `state` are the memory of [`Lamport`] messages, with [`Shape::slots`] from each
/// rank, `numbered` that of numbered ones, with [`NUMBERED_SLOTS`]: other memory than `ep_dispatch`
/// has.
///
/// Grid: any, also another one in each rank, of blocks that are resident together. Block: a
/// multiple of 32 threads up to 512, one-dimensional. May be a dependent launch.
///
/// # Safety
///
/// `rows` has those of `ep_layout`, `output` and the residual `tokens` rows, aligned to 16 bytes.
/// Nothing else accesses these, `returns` and `received` until the kernel has ended. `output` may
/// be the residual. `slots` and `state` are as [`LamportSlots`] needs them, and `numbered` was 0
/// before the first launch.
#[kernel(max_threads = 512)]
pub unsafe fn ep_combine(
    comm: DevComm,
    slots: Window<u32>,
    numbered: Window<u32>,
    state: *mut u32,
    shape: Shape,
    rows: *const bf16,
    returns: *const u32,
    received: Received,
    tokens: u32,
    output: *mut bf16,
    residual: *const bf16,
    steps: u32,
) {
    let combine =
        Combine { comm: &comm, shape, rows, returns, received, tokens, output, residual, steps };
    let capacity = shape.slots();
    // SAFETY: the kernel's contract.
    unsafe {
        macro_rules! run {
            ($ranks:literal) => {{
                let numbered = NumberedSlots::new(&comm, numbered, NUMBERED_SLOTS);
                let slots = LamportSlots::<$ranks>::new(&comm, slots, capacity);
                combine.run::<$ranks, { lane_vectors($ranks) }>(slots, numbered, state);
            }};
        }
        match comm.lsa_team().n_ranks {
            2 => run!(2),
            4 => run!(4),
            8 => run!(8),
            _ => panic!("the LSA team has 2, 4 or 8 ranks"),
        }
    }
}

struct Combine<'a> {
    comm: &'a DevComm,
    shape: Shape,
    rows: *const bf16,
    returns: *const u32,
    received: Received,
    tokens: u32,
    output: *mut bf16,
    residual: *const bf16,
    steps: u32,
}

impl Combine<'_> {
    /// # Safety
    ///
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn run<const N: usize, const VECTORS: usize>(
        &self,
        slots: LamportSlots<'_, N>,
        numbered: NumberedSlots<N>,
        state: *mut u32,
    ) {
        let parts = Parts::<VECTORS>::new(self.shape.vectors);
        let (first, step) = (warp_index(), warps());
        let (sends, receives) = (self.steps & Steps::SEND != 0, self.steps & Steps::RECEIVE != 0);
        grid::launch_next();
        grid::wait_for_previous();
        // SAFETY: the caller's contract. Each slot is used by one thread.
        unsafe {
            let session = slots.begin(state, self.shape.slots());
            let numbered = numbered.of(session.launch());
            // The peers' tokens, by the distance to the peer, whose rows this rank returns.
            let (mut counts, mut all) = ([0; N], 0);
            let mut distance = 1;
            while distance < N && sends {
                let to = self.comm.lsa_team().rotated(distance as i32) as usize;
                counts[distance] = mem::load(self.received.counts.wrapping_add(to));
                all = all.max(counts[distance]);
                distance += 1;
            }
            let (sent, own) =
                (parts.count(all), if receives { parts.count(self.tokens) } else { 0 });
            if sends && thread::index_1d() == 0 {
                let mut distance = 1;
                while distance < N {
                    numbered.send(distance, 0, [0; 2]);
                    distance += 1;
                }
            }
            // Of the first part, the entries are in flight together with the numbers above. There
            // are some for the most tokens.
            let mut early = None;
            if N == 2 && sends && first < parts.count(self.shape.tokens) {
                let peer = self.comm.lsa_team().next() as usize;
                early = Some(self.entries(self.token(peer, parts.at(first)), 0));
            }
            // The first round only sends; in each later one a part is received.
            let (mut index, mut ahead) = (first, first);
            while index < sent.max(own) || ahead == first {
                if ahead < sent {
                    self.send(&session, &counts, parts.at(ahead), early);
                }
                early = None;
                ahead += step;
                if ahead == first + step {
                    if receives {
                        // While the rows are on their way; all threads have the launch's number.
                        thread::sync_threads();
                        session.end(Coop::cta());
                        if thread::index_1d() == 0 {
                            self.wait_for_peers(&numbered);
                        }
                    }
                    continue;
                }
                if index < own {
                    self.receive(&session, parts.at(index));
                }
                index += step;
            }
        }
    }

    /// Waits until all ranks have begun this launch, also those that return no rows.
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn wait_for_peers<const N: usize>(&self, numbered: &Numbered<N>) {
        let mut distance = 1;
        while distance < N {
            let source = self.comm.lsa_team().rotated(distance as i32) as usize;
            // SAFETY: the caller's contract.
            self.comm.wait_until(Coop::thread(), || unsafe { numbered.peek(source, 0) }.is_some());
            distance += 1;
        }
    }

    /// Returns a part of a row to each rank that has such a token, with an expert here.
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn send<const N: usize, const VECTORS: usize>(
        &self,
        session: &Lamport<'_, N>,
        counts: &[u32; N],
        part: Part<VECTORS>,
        early: Option<Entries>,
    ) {
        // Not unrolled for many ranks: the sum is long.
        let ranks = if N > 2 { hint::opaque_usize(N) } else { N };
        let mut distance = 1;
        while distance < ranks {
            let to = self.comm.lsa_team().rotated(distance as i32) as usize;
            if part.row < at(counts, distance) {
                // SAFETY: the caller's contract.
                if let Some(row) = unsafe { self.sum(to, part, early) } {
                    let mut peer = 1;
                    while peer < N {
                        if peer == distance {
                            // SAFETY: the caller's contract.
                            unsafe { send(session, peer, part, &row) };
                        }
                        peer += 1;
                    }
                }
            }
            distance += 1;
        }
    }

    /// The index of a token of a rank among those of all ranks.
    #[inline(always)]
    fn token<const VECTORS: usize>(&self, rank: usize, part: Part<VECTORS>) -> usize {
        rank * self.shape.tokens as usize + part.row as usize
    }

    /// The sum of this rank's experts for a token of a rank; `None` if it has none here. The first
    /// entries may have been loaded.
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn sum<const VECTORS: usize>(
        &self,
        rank: usize,
        part: Part<VECTORS>,
        early: Option<Entries>,
    ) -> Option<Row<VECTORS>> {
        let token = self.token(rank, part);
        let mut sums = [[0.0; 8]; VECTORS];
        let mut k = 0;
        while k < Shape::TOP_K {
            let entries = match early {
                Some(early) if k == 0 => early,
                // SAFETY: the caller's contract.
                _ => unsafe { self.entries(token, k) },
            };
            if entries[0].0 == NONE {
                if k == 0 {
                    return None;
                }
                break;
            }
            let mut rows = [[Vec16::from_bits([0; 4]); VECTORS]; TOGETHER];
            let mut entry = 0;
            while entry < TOGETHER {
                if entries[entry].0 < DROPPED {
                    // SAFETY: the caller's contract.
                    rows[entry] = unsafe { load(self.rows, entries[entry].0 as usize, part) };
                }
                entry += 1;
            }
            let mut entry = 0;
            while entry < TOGETHER {
                if entries[entry].0 < DROPPED {
                    add(&mut sums, &rows[entry], entries[entry].1);
                }
                entry += 1;
            }
            k += TOGETHER;
        }
        Some(sums.map(bf16::narrow))
    }

    /// The positions and weights of some of a token's experts.
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn entries(&self, token: usize, k: usize) -> Entries {
        let from = self.returns.wrapping_add(token * RETURN_WORDS + 2 * k);
        // SAFETY: the caller's contract; a token has whole vectors.
        let [[a, b, c, d], [e, f, g, h]] =
            [0, 4].map(|at| unsafe { mem::load_vec(from.wrapping_add(at)) }.to_bits());
        [(a, b), (c, d), (e, f), (g, h)].map(|(at, weight)| (at, f32::from_bits(weight)))
    }

    /// Receives a part of a row of this rank from all ranks that have an expert of the token.
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn receive<const N: usize, const VECTORS: usize>(
        &self,
        session: &Lamport<'_, N>,
        part: Part<VECTORS>,
    ) {
        let (me, token) = (self.comm.lsa_team().rank as usize, part.row as usize);
        let mut sums = [[0.0; 8]; VECTORS];
        // SAFETY: the caller's contract.
        unsafe {
            let targets = mem::load(self.received.targets.wrapping_add(token));
            // What there is here is loaded while the others' rows are on their way.
            let mine = if targets >> me & 1 == 1 { self.sum(me, part, None) } else { None };
            let mut residual = [Vec16::from_bits([0; 4]); VECTORS];
            if !self.residual.is_null() {
                residual = load(self.residual, token, part);
            }
            let (mut rank, ranks) = (0, if N > 2 { hint::opaque_usize(N) } else { N });
            while rank < ranks {
                if rank == me {
                    if let Some(mine) = mine {
                        add(&mut sums, &mine, 1.0);
                    }
                } else if targets >> rank & 1 == 1 {
                    let slot = |i| part.vector_of(token, i).map(|vector| vector as u32);
                    add(&mut sums, &session.receive_several(rank, slot, 0), 1.0);
                }
                rank += 1;
            }
            add(&mut sums, &residual, 1.0);
            let mut i = 0;
            while i < VECTORS {
                if let Some(at) = part.vector_of(token, i) {
                    mem::store_vec(self.output.wrapping_add(8 * at), bf16::narrow(sums[i]));
                }
                i += 1;
            }
        }
    }
}

/// Sends a part of a row.
///
/// # Safety
///
/// Only this warp sends the part.
#[inline(always)]
unsafe fn send<const N: usize, const VECTORS: usize>(
    session: &Lamport<'_, N>,
    distance: usize,
    part: Part<VECTORS>,
    row: &Row<VECTORS>,
) {
    let mut i = 0;
    while i < VECTORS {
        if let Some(at) = part.vector_of(part.row as usize, i) {
            // SAFETY: the caller's contract.
            unsafe { session.send(distance, at as u32, row[i]) };
        }
        i += 1;
    }
}

/// Loads a part of a row; what is behind its end is 0.
///
/// # Safety
///
/// The row is allocated, and nothing writes it.
#[inline(always)]
#[track_caller]
unsafe fn load<const VECTORS: usize>(
    rows: *const bf16,
    row: usize,
    part: Part<VECTORS>,
) -> Row<VECTORS> {
    let mut vectors = [Vec16::from_bits([0; 4]); VECTORS];
    let mut i = 0;
    while i < VECTORS {
        if let Some(at) = part.vector_of(row, i) {
            // SAFETY: the caller's contract.
            vectors[i] = unsafe { mem::load_vec(rows.wrapping_add(8 * at)) };
        }
        i += 1;
    }
    vectors
}

/// Adds a row times a weight.
#[inline(always)]
fn add<const VECTORS: usize>(sums: &mut [[f32; 8]; VECTORS], row: &Row<VECTORS>, weight: f32) {
    let mut i = 0;
    while i < VECTORS {
        let wide = bf16::widen(row[i]);
        let mut lane = 0;
        while lane < 8 {
            sums[i][lane] = math::fma(weight, wide[lane], sums[i][lane]);
            lane += 1;
        }
        i += 1;
    }
}
