//! Sends the rows of tokens to the ranks of their experts, within the LSA team. This file
//! has the order in which a launch sends and receives; `dispatch_parts.rs` sends and receives one
//! part of a row.

mod dispatch_parts;

use super::prelude::*;

/// Vectors of 16 bytes that each lane has of a part of a row, which a warp sends at a time. With
/// more ranks there are fewer, as their addresses take registers, and with scales half as many, as
/// each vector of 8-bit floats is made from two.
const fn lane_vectors(ranks: usize, has_scales: bool) -> usize {
    match ranks {
        2 if has_scales => 2,
        2 => 4,
        4 if !has_scales => 2,
        _ => 1,
    }
}

/// Vectors of the part of a row that a warp sends at a time.
#[must_use]
pub const fn part_vectors(ranks: usize, has_scales: bool) -> u32 {
    warp::WARP_SIZE * lane_vectors(ranks, has_scales) as u32
}

/// The slot of the message (a [numbered](super::numbered) one, which many threads may read) that
/// tells how many tokens a rank has. The other slots are for each token and expert.
const COUNT: u32 = 0;

/// The bit of a numbered message that says that the token's row is sent, too.
const HAS_ROW: u32 = 1 << 31;

/// Returns the number of slots for numbered messages from each rank.
#[must_use]
pub const fn numbered_slots(shape: Shape) -> u32 {
    1 + shape.tokens * shape.top_k
}

/// Sends the rows of this rank's `tokens` to the ranks of the LSA team that have one of their
/// experts, and receives the rows of all ranks that have experts here. The team has up to
/// [`RANKS`]. An id of -1 means no expert; another id that is no expert's is treated so, and
/// recorded in `faults`. A -0 may arrive as +0. `steps` is a sum of [`Steps`].
///
/// Rows of [`F8E4M3`] are converted before they are sent, with a scale for each 128 elements, and
/// not converted back: an element of the input is about the received element times its scale. The
/// scale is the least power of two, at least `2^-126`, such that none of the 128 elements is more
/// than 448 times the scale. So an element divided by the scale is exact, and rounded once: to
/// nearest, ties to even. Infinities become 448 times the scale, and finite numbers above
/// `1.75 * 2^127` that number; NaN stays, and does not count for the scale. `shape.vectors` is the
/// size of a row in transit, in vectors of 16 elements.
///
/// `messages` has [`Shape::slots`] slots from each rank, or [`Shape::scaled_slots`] with scales,
/// and [`numbered_slots`].
///
/// Grid: any, of blocks that are resident together; ranks may have different ones. Block: a
/// multiple of 32 threads up to 512, one-dimensional. Dependent launch: allowed.
///
/// # Safety
///
/// `tokens` has the rows, ids and weights of its tokens, `received` has room for `shape.tokens`
/// tokens of each rank, with scales also for [`Shape::scale_vectors`] vectors of each row, and
/// `faults` has [`Faults::WORDS`] words; rows are aligned to 16 bytes. Nothing else accesses these
/// until the kernel has ended. `messages` is as [`Messages`] says.
#[kernel(
    T = [bf16, F8E4M3],
    max_threads = 512,
    requires(tokens.count <= shape.tokens, shape.top_k <= 16)
)]
pub unsafe fn ep_dispatch<T: Rows>(
    comm: DevComm,
    messages: Messages,
    shape: Shape,
    tokens: Tokens,
    received: Received,
    faults: *mut u32,
    steps: u32,
) {
    let rows = PhantomData::<T>;
    let launch = Launch { comm: &comm, shape, tokens, received, faults, steps, rows };
    // SAFETY: the kernel's caller guarantees the elements, the received memory and the slots.
    unsafe {
        match T::HAS_SCALES {
            true => with_ranks!(comm, launch.run(messages), lane_vectors(true)),
            false => with_ranks!(comm, launch.run(messages), lane_vectors(false)),
        }
    }
}

/// A launch's arguments.
struct Launch<'a, R> {
    comm: &'a DevComm,
    shape: Shape,
    tokens: Tokens,
    received: Received,
    faults: *mut u32,
    steps: u32,
    rows: PhantomData<R>,
}

/// A launch with messages, of `N` ranks. Whole warps call the methods, with parts of their own.
struct Dispatch<'a, R, const N: usize, const V: usize> {
    launch: &'a Launch<'a, R>,
    session: &'a Session<'a, N>,
    parts: Parts<V>,
}

/// A part of a row that is to be sent, with the token's experts: lane `k` has the `k`-th one.
struct Outgoing<const V: usize> {
    part: Part<V>,
    row: [Loaded; V],
    id: i32,
    weight: f32,
}

impl<R: Rows> Launch<'_, R> {
    unsafe fn run<const N: usize, const V: usize>(&self, messages: Messages) {
        let Self { comm, shape, tokens, received, steps, .. } = *self;
        let used = if R::HAS_SCALES { shape.scaled_slots() } else { shape.slots() };
        // SAFETY: the memory has the slots, as the kernel's caller guarantees.
        let begin = unsafe { messages.slots::<N>(comm, used, numbered_slots(shape)) };
        let parts = Parts::<V>::new(shape.vectors);
        let (first, step) = (warp_index(), warps());
        let (sends, receives) = (steps & Steps::SEND != 0, steps & Steps::RECEIVE != 0);
        let own = if sends { parts.count(tokens.count) } else { 0 };
        grid::launch_next();
        grid::wait_for_previous();
        // SAFETY: the kernel's caller guarantees the memory; one whole warp has each part.
        unsafe {
            // `begin` waits for the launch's number, whose load follows those of the first row.
            let absent = Ranks(mem::load(received.absent));
            let load = |at| {
                (at < own).then(|| {
                    let part = parts.at(at);
                    let (id, weight) = tokens.expert(shape, part.row);
                    let row = part.load_input::<R>(tokens.input, part.row);
                    Outgoing { part, row, id, weight }
                })
            };
            let mut outgoing = load(first);
            let session = &begin(absent);
            let dispatch = Dispatch { launch: self, session, parts };
            if sends && thread::index_1d() == 0 {
                session.tell(COUNT, |_| [tokens.count, 0]);
                let to = received.counts.wrapping_add(comm.lsa_team().rank as usize);
                mem::store(to, tokens.count);
            }
            // The first round only sends; each later one also receives what the peers have sent in
            // the round before. What is sent in the next round is loaded before the wait, if there
            // are registers for it. `end` ends the parts that this warp sends and receives, which
            // are those of the most tokens until it knows how many its peers have.
            let share = Share::new(first, step, ranks::<N>(comm));
            let (mut round, mut ahead) = (0, first);
            let mut end = if receives { parts.count(shape.tokens) } else { own };
            while ahead == first || round + share.part < end {
                if let Some(outgoing) = &outgoing {
                    dispatch.send(outgoing);
                }
                ahead += step;
                if N == 2 {
                    outgoing = load(ahead);
                }
                if ahead > first + step {
                    if receives {
                        end = own.max(dispatch.receive_round(share, round));
                    }
                    round += step;
                } else if receives {
                    // The session may end before its last message is sent: all threads have the
                    // launch's number, and no thread waits for this.
                    thread::sync_threads();
                    session.rows.end(Coop::cta());
                }
                if N != 2 {
                    outgoing = load(ahead);
                }
            }
        }
    }
}

impl<R: Rows, const N: usize, const V: usize> Dispatch<'_, R, N, V> {
    /// Receives this warp's share of the parts of a round, which begins with part `round`. Returns
    /// the end of the parts of its ranks. There are slots for the warp's first part of the round.
    unsafe fn receive_round(&self, share: Share, round: u32) -> u32 {
        let (mut most, ranks) = (0, rolled::<N>(self.launch.comm));
        for distance in Strided::new(share.distance, ranks, share.distance_step) {
            let mut at = round + share.part;
            loop {
                // SAFETY: only this warp has the part, and all of its lanes are here.
                let tokens = unsafe { self.receive(distance, self.parts.at(at)) };
                let end = self.parts.count(tokens);
                most = most.max(end);
                at += share.part_step;
                // A warp of one peer has one part of a round, so there is no loop.
                if share.distance_step == 1 || at >= end.min(round + warps()) {
                    break;
                }
            }
        }
        most
    }
}
