//! Returns the experts' results to the ranks of the tokens, within the LSA team, and adds them up.
//! This file has the order in which a launch sends and receives; `combine_parts.rs` sends and
//! receives one part of a row.

mod combine_parts;

use super::prelude::*;

/// Vectors of a part that each lane has: with more ranks fewer, as their addresses take registers.
const fn lane_vectors(ranks: usize) -> usize {
    if ranks == 2 { 2 } else { 1 }
}

/// Vectors of the part of a row that a warp sends at a time.
#[must_use]
pub const fn part_vectors(ranks: usize) -> u32 {
    warp::WARP_SIZE * lane_vectors(ranks) as u32
}

/// Results that are loaded together in a launch of one round, whose parts have a vector in each
/// lane: most tokens have no more experts in a rank.
const TOGETHER_IN_ONE_ROUND: usize = 8;

/// The most rounds of a launch in which rows are brought into the L2 cache ahead. In more rounds
/// the memory is busy anyway, and loads ahead delay the loads for which warps wait.
const ROUNDS: u32 = 4;

/// The slots for numbered messages from each rank: one says that the rank has begun the launch.
pub const NUMBERED_SLOTS: u32 = 1;

/// Returns results and adds them up: row `t` of the output becomes that of the residual plus the
/// sum over the experts of token `t` of the expert's row times its weight. Without a residual, or
/// without an expert, that part of the sum is 0.
///
/// Each rank sums the rows of its experts in f32, in the order of the token's experts, and rounds
/// the sum, which returns to the token's rank. The token's rank adds the sums in the order of the
/// ranks and then the residual, in f32, and rounds once. So the result is deterministic.
///
/// `returns` is what `ep_layout` has stored in
/// [`Grouped::returns`](super::ep_layout::Grouped::returns), and `received` what `ep_dispatch` has
/// stored. `steps` is a sum of [`Steps`].
///
/// A warp sends and receives in turns, and loads entries and, if there are few rounds, rows ahead.
/// If each small part for each rank has a warp, each warp sends one and receives one, in one round:
/// entries are loaded together with the number of the launch, then the rows of all experts.
///
/// `messages` has [`Shape::slots`] slots from each rank, and [`NUMBERED_SLOTS`]. It is other memory
/// than that of `ep_dispatch`.
///
/// Grid and block: as those of `ep_dispatch`.
///
/// # Safety
///
/// `results` has the rows of `ep_layout` and those of the tokens, aligned to 16 bytes. Nothing else
/// accesses these, `returns` and `received` until the kernel has ended. `messages` is as
/// [`Messages`] says.
#[kernel(max_threads = 512)]
pub unsafe fn ep_combine(
    comm: DevComm,
    messages: Messages,
    shape: Shape,
    results: Results,
    returns: *const u32,
    received: Received,
    steps: u32,
) {
    let launch = Launch { comm: &comm, shape, results, returns, received, steps };
    // SAFETY: the kernel's caller guarantees the rows, the words and the memory of the slots.
    unsafe { with_ranks!(comm, launch.run(messages), lane_vectors()) }
}

/// A launch's arguments.
pub(super) struct Launch<'a> {
    pub(super) comm: &'a DevComm,
    pub(super) shape: Shape,
    pub(super) results: Results,
    pub(super) returns: *const u32,
    pub(super) received: Received,
    pub(super) steps: u32,
}

/// A launch with messages, of `N` ranks, that loads `TOGETHER` results together. Whole warps call
/// the methods, with parts of their own.
struct Combine<'a, const N: usize, const V: usize, const TOGETHER: usize> {
    launch: &'a Launch<'a>,
    session: &'a Session<'a, N>,
    parts: Parts<V>,
}

impl Launch<'_> {
    unsafe fn run<const N: usize, const V: usize>(&self, messages: Messages) {
        let vectors = self.shape.vectors;
        // SAFETY: the memory has a slot for each vector, as the kernel's caller guarantees.
        let begin = unsafe { messages.slots::<N>(self.comm, self.shape.slots(), NUMBERED_SLOTS) };
        let (first, parts) = (warp_index(), Parts::<1>::new(vectors));
        let others = (ranks::<N>(self.comm) as u32 - 1).max(1); // 1 for a single rank.
        grid::launch_next();
        grid::wait_for_previous();
        // SAFETY: the kernel's caller guarantees the memory; one whole warp has each part.
        unsafe {
            let absent = Ranks(mem::load(self.received.absent));
            let (sends, mut most) = (self.steps & Steps::SEND != 0, 0);
            for distance in 1..if sends { ranks::<N>(self.comm) } else { 0 } {
                most = most.max(self.tokens_of(absent, distance));
            }
            // In a launch of one round, successive warps send to different ranks.
            let (to, part) = (1 + (first % others) as usize, parts.at(first / others));
            let outgoing = self.outgoing(absent, to, part.row);
            let incoming = self.incoming(absent, parts.at(first).row);
            let session = &begin(absent);
            if sends && is_leader() {
                // Tells all peers that this rank has begun the launch.
                session.tell(0, |_| [0; 2]);
            }
            let own = if self.receives() { self.results.tokens } else { 0 };
            let tokens = [most, own];
            let (sent, own) = (parts.count(most) * others, parts.count(own));
            if sent.max(own) > warps() {
                let parts = Parts::new(vectors);
                return Combine::<N, V, TOGETHER> { launch: self, session, parts }.rounds(tokens);
            }
            let combine = Combine::<N, 1, TOGETHER_IN_ONE_ROUND> { launch: self, session, parts };
            if first < sent {
                combine.send(to, part, outgoing);
            }
            if self.receives() {
                combine.end();
            }
            if first < own {
                combine.receive(parts.at(first), incoming);
            }
        }
    }

    fn receives(&self) -> bool {
        self.steps & Steps::RECEIVE != 0
    }

    fn rank(&self, distance: usize) -> usize {
        self.comm.lsa_team().rotated(distance as i32) as usize
    }

    /// Returns how many tokens the rank at a distance has.
    unsafe fn tokens_of(&self, absent: Ranks, distance: usize) -> u32 {
        let rank = self.rank(distance);
        // SAFETY: the kernel's caller guarantees the memory.
        let tokens = unsafe { self.received.tokens_of(rank) };
        if absent.contains(rank) { 0 } else { tokens }
    }

    /// Loads the entries of a token of the rank at a distance.
    unsafe fn outgoing(&self, absent: Ranks, to: usize, row: u32) -> Entries {
        // SAFETY: `returns` has the words of the most tokens of each rank.
        unsafe { self.entries(self.rank(to), row, self.tokens_of(absent, to)) }
    }

    /// Loads the entries of a token of this rank, and the ranks that have experts of it.
    unsafe fn incoming(&self, absent: Ranks, row: u32) -> (Entries, Ranks) {
        let (me, tokens) = (self.comm.lsa_team().rank as usize, self.results.tokens);
        let mut targets = Ranks(0);
        // SAFETY: `received` and `returns` have words for the most tokens of this rank.
        unsafe {
            if row < tokens {
                let of_row = self.received.targets.wrapping_add(row as usize);
                targets = Ranks(mem::load(of_row) & !absent.0);
            }
            (self.entries(me, row, tokens), targets)
        }
    }

    /// Loads the entries of a token of a rank that has `tokens` tokens.
    pub(super) unsafe fn entries(&self, rank: usize, row: u32, tokens: u32) -> Entries {
        let mut entries = NONE;
        if row < self.shape.tokens {
            let token = rank * self.shape.tokens as usize + row as usize;
            let from = token * RETURN_WORDS + warp::lane_id() as usize;
            // SAFETY: the kernel's caller guarantees words for the most tokens.
            entries = unsafe { mem::load(self.returns.wrapping_add(from)) };
        }
        // This is not a condition of the load, which would then wait for `tokens`.
        if row < tokens { entries } else { NONE }
    }
}

impl<const N: usize, const V: usize, const TOGETHER: usize> Combine<'_, N, V, TOGETHER> {
    /// Sends results of `sent` tokens of each rank and receives those of `own` tokens, in rounds.
    /// The first one only sends; in each later one a part is received.
    unsafe fn rounds(&self, [sent, own]: [u32; 2]) {
        let Self { launch, parts, session: Session { absent, .. } } = self;
        let (first, step) = (warp_index(), warps());
        let (sent, own) = (parts.count(sent), parts.count(own));
        // SAFETY: the kernel's caller guarantees the memory; one whole warp has each part.
        unsafe {
            let prefetch = |entries, part| {
                if sent.max(own) <= ROUNDS * step {
                    prefetch(launch.results.rows, entries, part);
                }
            };
            let mut outgoing = launch.outgoing(*absent, 1, parts.at(first).row);
            let mut incoming = launch.incoming(*absent, parts.at(first).row);
            let (mut index, mut ahead) = (first, first);
            while index < sent.max(own) || ahead == first {
                let mut next = NONE;
                if ahead + step < sent {
                    next = launch.outgoing(*absent, 1, parts.at(ahead + step).row);
                }
                if ahead < sent {
                    let part = parts.at(ahead);
                    // Not unrolled for many ranks, as the code of the sum is long.
                    for distance in 1..rolled::<N>(launch.comm) {
                        if distance > 1 {
                            outgoing = launch.outgoing(*absent, distance, part.row);
                        }
                        self.send(distance, part, outgoing);
                    }
                }
                outgoing = next;
                ahead += step;
                prefetch(outgoing, parts.at(ahead));
                if ahead == first + step {
                    if launch.receives() {
                        prefetch(incoming.0, parts.at(first));
                        self.end();
                    }
                    continue;
                }
                if index < own {
                    let next = launch.incoming(*absent, parts.at(index + step).row);
                    self.receive(parts.at(index), incoming);
                    incoming = next;
                    prefetch(incoming.0, parts.at(index + step));
                }
                index += step;
            }
        }
    }

    /// Ends the session while rows are in transit, and waits until all ranks have begun this
    /// launch, also those that return no rows. The whole block, which has the number of the launch,
    /// calls this once.
    unsafe fn end(&self) {
        let Self { launch, session, .. } = self;
        thread::sync_threads();
        if is_in_last_warp() {
            // SAFETY: all threads of the block have the number of the launch.
            unsafe { session.rows.end(Coop::warp()) };
        }
        if is_leader() {
            launch.comm.wait_until(Coop::thread(), || {
                let mut all = true;
                for distance in 1..ranks::<N>(launch.comm) {
                    let source = launch.rank(distance);
                    // SAFETY: the kernel's caller guarantees the memory. (No branch is around the
                    // loads, so that all are in flight together.)
                    let begun = unsafe { session.told(source, 0) }.is_some();
                    all &= begun || session.absent.contains(source);
                }
                all
            });
        }
    }
}

/// Returns whether this thread is in the last warp of its block, which has the least to send.
fn is_in_last_warp() -> bool {
    thread::thread_idx_x() + warp::WARP_SIZE >= thread::block_dim_x()
}

/// Returns whether this thread sends and receives the numbers of the launch.
fn is_leader() -> bool {
    is_in_last_warp() && thread::block_idx_x() == 0 && warp::lane_id() == 0
}
