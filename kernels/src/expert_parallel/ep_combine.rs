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

/// What `ep_layout` has left of a token, a word in each lane: position and weight of each expert in
/// this rank. All are [`NONE`] without a token.
pub(super) type Entries = u32;

const _: () = assert!(RETURN_WORDS == warp::WARP_SIZE as usize);

/// What a warp loads ahead for a part of a row that it receives.
#[derive(Clone, Copy)]
struct Incoming {
    entries: Entries,
    /// A bit for each rank that sends.
    targets: u32,
}

/// A lane's vectors of a part of a row.
pub(super) type Row<const VECTORS: usize> = [Vec16<bf16>; VECTORS];

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
/// Of many tokens the time is that of the memory: each rank reads the rows of its experts, once. So
/// a warp, which sends and receives in turns, must not wait for one load after another. While it
/// does one step it loads the entries of the step after next, one word in each lane, and brings the
/// rows of the next step into the L2 cache, which takes no registers. Of few tokens the time is one
/// latency after another: the entries of the first steps are loaded together with the number of the
/// launch, before anything is known of the peers' tokens, and what ends the session is done by a
/// warp that has nothing to send then.
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

pub(super) struct Combine<'a> {
    pub(super) comm: &'a DevComm,
    pub(super) shape: Shape,
    pub(super) rows: *const bf16,
    pub(super) returns: *const u32,
    pub(super) received: Received,
    pub(super) tokens: u32,
    pub(super) output: *mut bf16,
    pub(super) residual: *const bf16,
    pub(super) steps: u32,
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
        let is_last_warp = thread::thread_idx_x() + warp::WARP_SIZE >= thread::block_dim_x();
        let speaks = is_last_warp && thread::block_idx_x() == 0 && warp::lane_id() == 0;
        grid::launch_next();
        grid::wait_for_previous();
        // SAFETY: the caller's contract. Each slot is used by one thread; all lanes of a warp call
        // these together.
        unsafe {
            // The peers' tokens, by the distance to the peer, whose rows this rank returns.
            let (mut counts, mut all) = ([0; N], 0);
            let mut distance = 1;
            while distance < N && sends {
                let to = self.comm.lsa_team().rotated(distance as i32) as usize;
                counts[distance] = mem::load(self.received.counts.wrapping_add(to));
                all = all.max(counts[distance]);
                distance += 1;
            }
            let mut outgoing = self.outgoing(&counts, 1, parts.at(first));
            let mut incoming = self.incoming(parts.at(first));
            let session = slots.begin(state, self.shape.slots());
            let numbered = numbered.of(session.launch());
            if sends && speaks {
                let mut distance = 1;
                while distance < N {
                    numbered.send(distance, 0, [0; 2]);
                    distance += 1;
                }
            }
            let (sent, own) =
                (parts.count(all), if receives { parts.count(self.tokens) } else { 0 });
            // The first round only sends; in each later one a part is received.
            let (mut index, mut ahead) = (first, first);
            while index < sent.max(own) || ahead == first {
                let next = self.outgoing(&counts, 1, parts.at(ahead + step));
                if ahead < sent {
                    self.send(&session, &counts, parts.at(ahead), outgoing);
                }
                outgoing = next;
                ahead += step;
                self.prefetch(outgoing, parts.at(ahead));
                if ahead == first + step {
                    if receives {
                        // While the rows are on their way; all threads have the launch's number.
                        self.prefetch(incoming.entries, parts.at(first));
                        thread::sync_threads();
                        if is_last_warp {
                            session.end(Coop::warp());
                        }
                        if speaks {
                            self.wait_for_peers(&numbered);
                        }
                    }
                    continue;
                }
                if index < own {
                    let next = self.incoming(parts.at(index + step));
                    self.receive(&session, parts.at(index), incoming);
                    incoming = next;
                    self.prefetch(incoming.entries, parts.at(index + step));
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

    /// Returns a part of a row to each rank that has such a token, with an expert here. The entries
    /// for the next rank have been loaded.
    ///
    /// # Safety
    ///
    /// The kernel's contract. All lanes of a warp call this together.
    #[inline(always)]
    unsafe fn send<const N: usize, const VECTORS: usize>(
        &self,
        session: &Lamport<'_, N>,
        counts: &[u32; N],
        part: Part<VECTORS>,
        mut entries: Entries,
    ) {
        // Not unrolled for many ranks: the sum is long.
        let ranks = if N > 2 { hint::opaque_usize(N) } else { N };
        let mut distance = 1;
        while distance < ranks {
            // SAFETY: the caller's contract.
            unsafe {
                if distance > 1 {
                    entries = self.outgoing(counts, distance, part);
                }
                if let Some(row) = self.sum(entries, part) {
                    let mut peer = 1;
                    while peer < N {
                        if peer == distance {
                            send(session, peer, part, &row);
                        }
                        peer += 1;
                    }
                }
            }
            distance += 1;
        }
    }

    /// Loads the entries of a token of the rank at a distance.
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn outgoing<const N: usize, const VECTORS: usize>(
        &self,
        counts: &[u32; N],
        distance: usize,
        part: Part<VECTORS>,
    ) -> Entries {
        let to = self.comm.lsa_team().rotated(distance as i32) as usize;
        // SAFETY: the caller's contract.
        unsafe { self.entries(to, part, at(counts, distance)) }
    }

    /// Loads what says which ranks have experts of a token of this rank.
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn incoming<const VECTORS: usize>(&self, part: Part<VECTORS>) -> Incoming {
        let (me, mut targets) = (self.comm.lsa_team().rank as usize, 0);
        // SAFETY: the caller's contract.
        unsafe {
            if part.row < self.tokens {
                targets = mem::load(self.received.targets.wrapping_add(part.row as usize));
            }
            Incoming { entries: self.entries(me, part, self.tokens), targets }
        }
    }

    /// Loads the entries of a token of a rank that has `tokens`.
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    #[inline(always)]
    pub(super) unsafe fn entries<const VECTORS: usize>(
        &self,
        rank: usize,
        part: Part<VECTORS>,
        tokens: u32,
    ) -> Entries {
        let mut entries = NONE;
        if part.row < self.shape.tokens {
            let token = rank * self.shape.tokens as usize + part.row as usize;
            let from = token * RETURN_WORDS + warp::lane_id() as usize;
            // SAFETY: the caller's contract; there are words for the most tokens.
            entries = unsafe { mem::load(self.returns.wrapping_add(from)) };
        }
        // No condition of the load, which then would wait for this number.
        if part.row < tokens { entries } else { NONE }
    }

    /// Begins to bring the rows of a token's experts into the L2 cache.
    ///
    /// # Safety
    ///
    /// The kernel's contract. All lanes of a warp call this together.
    #[inline(always)]
    unsafe fn prefetch<const VECTORS: usize>(&self, entries: Entries, part: Part<VECTORS>) {
        // SAFETY: the caller's contract; positions are those of rows.
        unsafe {
            let (mut k, len) = (0, len(entries));
            while k < len {
                let row = warp::shuffle_idx(entries, 2 * k);
                let mut i = 0;
                while i < VECTORS && row < DROPPED {
                    if let Some(at) = part.vector_of(row as usize, i) {
                        mem::prefetch(self.rows.wrapping_add(8 * at));
                    }
                    i += 1;
                }
                k += 1;
            }
        }
    }

    /// The sum of this rank's experts for a token; `None` if it has none here.
    ///
    /// # Safety
    ///
    /// The kernel's contract. All lanes of a warp call this together.
    #[inline(always)]
    pub(super) unsafe fn sum<const VECTORS: usize>(
        &self,
        entries: Entries,
        part: Part<VECTORS>,
    ) -> Option<Row<VECTORS>> {
        // SAFETY: the caller's contract.
        let (mut k, len) = (0, unsafe { len(entries) });
        if len == 0 {
            return None;
        }
        let mut sums = [[0.0; 8]; VECTORS];
        while k < len {
            let mut at = [NONE; TOGETHER];
            let mut rows = [[Vec16::from_bits([0; 4]); VECTORS]; TOGETHER];
            let mut entry = 0;
            while entry < TOGETHER {
                // SAFETY: the caller's contract.
                unsafe {
                    at[entry] = warp::shuffle_idx(entries, 2 * (k + entry as u32));
                    if at[entry] < DROPPED {
                        rows[entry] = part.load(self.rows, at[entry] as usize);
                    }
                }
                entry += 1;
            }
            let mut entry = 0;
            while entry < TOGETHER {
                // SAFETY: the caller's contract.
                let weight = unsafe { warp::shuffle_idx(entries, 2 * (k + entry as u32) + 1) };
                if at[entry] < DROPPED {
                    add(&mut sums, &rows[entry], f32::from_bits(weight));
                }
                entry += 1;
            }
            k += TOGETHER as u32;
        }
        Some(sums.map(bf16::narrow))
    }

    /// Receives a part of a row of this rank from all ranks that have an expert of the token.
    ///
    /// # Safety
    ///
    /// The kernel's contract. All lanes of a warp call this together.
    #[inline(always)]
    unsafe fn receive<const N: usize, const VECTORS: usize>(
        &self,
        session: &Lamport<'_, N>,
        part: Part<VECTORS>,
        Incoming { entries, targets }: Incoming,
    ) {
        let (me, token) = (self.comm.lsa_team().rank as usize, part.row as usize);
        let mut sums = [[0.0; 8]; VECTORS];
        // SAFETY: the caller's contract.
        unsafe {
            // What there is here is loaded while the others' rows are on their way.
            let mine = self.sum(entries, part);
            let residual = self.residual(part);
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
            part.store(self.output, token, &sums.map(bf16::narrow));
        }
    }

    /// Loads the residual of a token.
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    #[inline(always)]
    pub(super) unsafe fn residual<const VECTORS: usize>(
        &self,
        part: Part<VECTORS>,
    ) -> Row<VECTORS> {
        if self.residual.is_null() {
            return [Vec16::from_bits([0; 4]); VECTORS];
        }
        // SAFETY: the caller's contract.
        unsafe { part.load(self.residual, part.row as usize) }
    }
}

/// How many experts a token has in this rank.
///
/// # Safety
///
/// All lanes of a warp call this together.
#[inline(always)]
#[track_caller]
unsafe fn len(entries: Entries) -> u32 {
    // SAFETY: the caller's contract. Words of even lanes are positions.
    unsafe { warp::ballot(warp::lane_id().is_multiple_of(2) && entries != NONE) }.count_ones()
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

/// Adds a row times a weight.
#[inline(always)]
pub(super) fn add<const VECTORS: usize>(
    sums: &mut [[f32; 8]; VECTORS],
    row: &Row<VECTORS>,
    weight: f32,
) {
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
