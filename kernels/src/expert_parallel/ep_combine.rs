//! Returns the experts' results to the ranks of the tokens, within the LSA team, and adds them up.

use super::combine_receive::is_leader;
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

/// Results that are loaded together.
pub(super) const TOGETHER: usize = 4;
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
/// stored. `steps` is a sum of [`Steps`]. A launch that only sends is followed by one that only
/// receives, in this rank, before any other launch with the same memory.
///
/// With many tokens, reading memory takes the time: each rank reads its experts' rows, once. A warp
/// sends and receives in turns, and loads entries and, in a launch of few rounds, rows ahead. With
/// few tokens, one latency comes after another. If each small part for each rank has a warp, each
/// warp sends one and receives one, in one round: entries are loaded together with the number of
/// the launch, then the rows of all experts, and nothing else before the peers' rows are polled.
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
    let combine = Combine { comm: &comm, shape, results, returns, received, steps };
    // SAFETY: the kernel's caller guarantees the rows, the words and the memory of the slots.
    unsafe { with_ranks!(comm, lane_vectors, combine.run(messages)) }
}

/// A launch's arguments.
pub(super) struct Combine<'a> {
    pub(super) comm: &'a DevComm,
    pub(super) shape: Shape,
    pub(super) results: Results,
    pub(super) returns: *const u32,
    pub(super) received: Received,
    pub(super) steps: u32,
}

impl Combine<'_> {
    unsafe fn run<const N: usize, const V: usize>(&self, messages: Messages) {
        // SAFETY: the memory has a slot for each vector, as the kernel's caller guarantees.
        let begin = unsafe { messages.slots::<N>(self.comm, self.shape.slots(), NUMBERED_SLOTS) };
        let (first, small) = (warp_index(), Parts::<1>::new(self.shape.vectors));
        let others = (ranks::<N>(self.comm) as u32 - 1).max(1); // 1 for a single rank.
        grid::launch_next();
        grid::wait_for_previous();
        // SAFETY: the kernel's caller guarantees the memory; one whole warp has each part.
        unsafe {
            let absent = self.received.absent();
            let most = self.most_tokens::<N>(absent);
            // In a launch of one round, successive warps send to different ranks.
            let (to, small_part) = (1 + (first % others) as usize, small.at(first / others));
            let outgoing = self.outgoing(absent, to, small_part.row);
            let incoming = self.incoming(small.at(first).row, absent);
            let session = begin(absent);
            if self.sends() && is_leader() {
                // Tells all peers that this rank has begun the launch.
                session.tell(self.comm, 0, |_| [0; 2]);
            }
            let (sent, own) = (small.count(most) * others, small.count(self.own_tokens()));
            if sent.max(own) > warps() {
                return self.rounds::<N, V>(&session, most);
            }
            if first < sent {
                self.send_to::<N, 1, TOGETHER_IN_ONE_ROUND>(&session, to, small_part, outgoing);
            }
            if self.receives() {
                self.end(&session);
            }
            if first < own {
                self.receive::<N, 1, TOGETHER_IN_ONE_ROUND>(&session, small.at(first), incoming);
            }
        }
    }

    /// Sends and receives in rounds. The first one only sends; in each later one a part is
    /// received. The whole grid calls this.
    unsafe fn rounds<const N: usize, const V: usize>(&self, session: &Session<'_, N>, most: u32) {
        let parts = Parts::<V>::new(self.shape.vectors);
        let (first, step, absent) = (warp_index(), warps(), session.absent);
        let (sent, own) = (parts.count(most), parts.count(self.own_tokens()));
        // SAFETY: the kernel's caller guarantees the memory; one whole warp has each part.
        unsafe {
            let prefetch = |entries, part| {
                if sent.max(own) <= ROUNDS * step {
                    prefetch(self.results.rows, entries, part);
                }
            };
            let mut outgoing = self.outgoing(absent, 1, parts.at(first).row);
            let mut incoming = self.incoming(parts.at(first).row, absent);
            let (mut index, mut ahead) = (first, first);
            while index < sent.max(own) || ahead == first {
                let mut next = NONE;
                if ahead + step < sent {
                    next = self.outgoing(absent, 1, parts.at(ahead + step).row);
                }
                if ahead < sent {
                    let part = parts.at(ahead);
                    // Not unrolled for many ranks, as the code of the sum is long.
                    for distance in 1..rolled::<N>(self.comm) {
                        if distance > 1 {
                            outgoing = self.outgoing(absent, distance, part.row);
                        }
                        self.send_to::<N, V, TOGETHER>(session, distance, part, outgoing);
                    }
                }
                outgoing = next;
                ahead += step;
                prefetch(outgoing, parts.at(ahead));
                if ahead == first + step {
                    if self.receives() {
                        prefetch(incoming.0, parts.at(first));
                        self.end(session);
                    }
                    continue;
                }
                if index < own {
                    let next = self.incoming(parts.at(index + step).row, absent);
                    self.receive::<N, V, TOGETHER>(session, parts.at(index), incoming);
                    incoming = next;
                    prefetch(incoming.0, parts.at(index + step));
                }
                index += step;
            }
        }
    }

    fn sends(&self) -> bool {
        self.steps & Steps::SEND != 0
    }

    fn receives(&self) -> bool {
        self.steps & Steps::RECEIVE != 0
    }

    /// Returns how many tokens of this rank the launch receives.
    fn own_tokens(&self) -> u32 {
        if self.receives() { self.results.tokens } else { 0 }
    }

    pub(super) fn rank(&self, distance: usize) -> usize {
        self.comm.lsa_team().rotated(distance as i32) as usize
    }

    /// Returns the most tokens of a peer whose rows this launch returns.
    unsafe fn most_tokens<const N: usize>(&self, absent: Ranks) -> u32 {
        let (ranks, mut most) = (if self.sends() { ranks::<N>(self.comm) } else { 0 }, 0);
        for distance in 1..ranks {
            // SAFETY: the kernel's caller guarantees the memory.
            most = most.max(unsafe { self.tokens_of(distance, absent) });
        }
        most
    }

    /// Sends a part of a row back to the rank at a distance, if it has such a token, with an expert
    /// here. A whole warp calls this.
    unsafe fn send_to<const N: usize, const V: usize, const TOGETHER: usize>(
        &self,
        session: &Session<'_, N>,
        distance: usize,
        part: Part<V>,
        entries: Entries,
    ) {
        // SAFETY: the row is below the most tokens, and only this whole warp sends the part.
        unsafe {
            let Some(row) = sum::<V, TOGETHER>(self.results.rows, entries, part) else {
                return;
            };
            let send = |distance| {
                for i in 0..V {
                    if let Some(at) = part.vector_of(part.row as usize, i) {
                        session.rows.send(distance, at as u32, row[i]);
                    }
                }
            };
            // An index that is not a constant would move the peers' addresses to memory.
            if N == ANY_RANKS {
                send(distance);
            }
            for peer in 1..N {
                if peer == distance {
                    send(peer);
                }
            }
        }
    }

    /// Returns how many tokens the rank at a distance has.
    unsafe fn tokens_of(&self, distance: usize, absent: Ranks) -> u32 {
        let rank = self.rank(distance);
        // SAFETY: the kernel's caller guarantees the memory.
        let tokens = unsafe { self.received.tokens_of(rank) };
        if absent.contains(rank) { 0 } else { tokens }
    }

    /// Loads the entries of a token of the rank at a distance.
    unsafe fn outgoing(&self, absent: Ranks, to: usize, row: u32) -> Entries {
        // SAFETY: `returns` has the words of the most tokens of each rank.
        unsafe { self.entries(self.rank(to), row, self.tokens_of(to, absent)) }
    }
}
