//! Sends the rows of tokens to the ranks of their experts, within the LSA team.

use super::prelude::*;

/// Vectors of 16 bytes that each lane has of a part of a row, which a warp sends at a time. With
/// more ranks there are fewer, as their addresses take registers.
const fn lane_vectors(ranks: usize) -> usize {
    match ranks {
        2 => 4,
        4 => 2,
        _ => 1,
    }
}

/// Vectors of a part of 8-bit floats that each lane has: each is made from two vectors of the
/// input, so there are half as many.
const fn f8_lane_vectors(ranks: usize) -> usize {
    if ranks == 2 { 2 } else { 1 }
}

/// Vectors of the part of a row that a warp sends at a time.
#[must_use]
pub const fn part_vectors(ranks: usize, has_scales: bool) -> u32 {
    let per_lane = if has_scales { f8_lane_vectors(ranks) } else { lane_vectors(ranks) };
    warp::WARP_SIZE * per_lane as u32
}

/// The slot of the message (a [numbered](super::numbered) one, which many threads may read) that
/// tells how many tokens a rank has. The other slots are for each token and expert.
pub(super) const COUNT: u32 = 0;

/// The bit of a numbered message that says that the token's row is sent, too.
pub(super) const HAS_ROW: u32 = 1 << 31;

/// Returns the number of slots for numbered messages from each rank.
#[must_use]
pub const fn numbered_slots(shape: Shape) -> u32 {
    1 + shape.tokens * shape.top_k
}

/// Sends the rows of this rank's `tokens` to the ranks of the LSA team that have one of their
/// experts, and receives the rows of all ranks that have experts here. The team has up to
/// [`RANKS`]. An id of -1 means no expert; another id that is no expert's is treated so, and
/// recorded in `faults`. A -0 may arrive as +0. The mask in `received` names absent ranks: nothing
/// is sent to them or awaited from them, and their experts are ignored.
///
/// Rows of [`F8E4M3`] are converted before they are sent, with a scale for each 128 elements, and
/// not converted back: an element of the input is about the received element times its scale. The
/// scale is the least power of two, at least `2^-126`, such that none of the 128 elements is more
/// than 448 times the scale. So an element divided by the scale is exact, and rounded once: to
/// nearest, ties to even. Infinities become 448 times the scale, and finite numbers above
/// `1.75 * 2^127` that number; NaN stays, and does not count for the scale. `shape.vectors` is the
/// size of a row in transit, in vectors of 16 elements.
///
/// `steps` is a sum of [`Steps`]. A launch that only sends is followed by one that only receives,
/// in this rank, before any other launch with the same memory.
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
    let dispatch = Dispatch { comm: &comm, shape, tokens, received, faults, steps, rows };
    // SAFETY: the kernel's caller guarantees the elements, the received memory and the slots.
    unsafe {
        match T::HAS_SCALES {
            true => with_ranks!(comm, f8_lane_vectors, dispatch.run(messages)),
            false => with_ranks!(comm, lane_vectors, dispatch.run(messages)),
        }
    }
}

/// A launch's arguments.
pub(super) struct Dispatch<'a, R> {
    pub(super) comm: &'a DevComm,
    pub(super) shape: Shape,
    tokens: Tokens,
    pub(super) received: Received,
    faults: *mut u32,
    steps: u32,
    rows: PhantomData<R>,
}

/// A part of a row that is to be sent, with the token's experts: lane `k` has the `k`-th one.
struct Outgoing<R: Rows, const V: usize> {
    part: Part<V>,
    row: [R::Loaded; V],
    id: i32,
    weight: f32,
}

impl<R: Rows> Dispatch<'_, R> {
    unsafe fn run<const N: usize, const V: usize>(&self, messages: Messages) {
        let used = if R::HAS_SCALES { self.shape.scaled_slots() } else { self.shape.slots() };
        // SAFETY: the memory has the slots, as the kernel's caller guarantees.
        let begin = unsafe { messages.slots::<N>(self.comm, used, numbered_slots(self.shape)) };
        let parts = Parts::new(self.shape.vectors);
        let (first, step) = (warp_index(), warps());
        let (sends, receives) = (self.steps & Steps::SEND != 0, self.steps & Steps::RECEIVE != 0);
        let own = if sends { parts.count(self.tokens.count) } else { 0 };
        grid::launch_next();
        grid::wait_for_previous();
        // SAFETY: the kernel's caller guarantees the memory; one whole warp has each part.
        unsafe {
            // `begin` waits for the launch's number, whose load follows those of the first row.
            let absent = self.received.absent();
            let load = |at| (at < own).then(|| self.load(parts.at(at)));
            let mut outgoing: Option<Outgoing<R, V>> = load(first);
            let session = begin(absent);
            if sends && thread::index_1d() == 0 {
                self.send_count(&session);
            }
            // The first round only sends; each later one also receives what the peers have sent in
            // the round before. What is sent in the next round is loaded before the wait, if there
            // are registers for it. `end` ends the parts that this warp sends and receives, which
            // are those of the most tokens until it knows how many its peers have.
            let share = Share::new(first, step, ranks::<N>(self.comm));
            let (mut round, mut ahead) = (0, first);
            let mut end = if receives { parts.count(self.shape.tokens) } else { own };
            while ahead == first || round + share.part < end {
                if let Some(outgoing) = &outgoing {
                    self.send(&session, outgoing);
                }
                ahead += step;
                if N == 2 {
                    outgoing = load(ahead);
                }
                if ahead > first + step {
                    if receives {
                        end = own.max(self.receive_round(&session, parts, share, round));
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

    /// Sends the number of this rank's tokens to all ranks. One thread of the grid calls this.
    unsafe fn send_count<const N: usize>(&self, session: &Session<'_, N>) {
        let (team, tokens) = (self.comm.lsa_team(), self.tokens.count);
        // SAFETY: only this thread sends to the slots; the caller guarantees a count for each rank.
        unsafe {
            session.tell(self.comm, COUNT, |_| [tokens, 0]);
            mem::store(self.received.counts.wrapping_add(team.rank as usize), tokens);
        }
    }

    /// Loads a part of a row of this rank, and the token's experts.
    unsafe fn load<const V: usize>(&self, part: Part<V>) -> Outgoing<R, V> {
        // SAFETY: the kernel's caller guarantees the row and the experts of the token.
        unsafe {
            let (id, weight) = self.tokens.expert(self.shape, part.row);
            let row = rows::load::<R, V>(self.tokens.input, part, part.row as usize);
            Outgoing { part, row, id, weight }
        }
    }

    /// Returns the slot of this lane's vector of scales. These slots follow those of all rows.
    pub(super) fn scales_slot<const V: usize>(&self, part: Part<V>) -> Option<u32> {
        let at = part.scales_of(part.row as usize).filter(|_| R::HAS_SCALES);
        at.map(|at| self.shape.slots() + at as u32)
    }

    /// Returns the rank of this lane's expert, and the expert's index there; `None` if there is no
    /// such expert, or its rank is absent.
    unsafe fn expert<const N: usize, const V: usize>(
        &self,
        session: &Session<'_, N>,
        outgoing: &Outgoing<R, V>,
    ) -> Option<(u32, u32)> {
        let (id, Shape { top_k, experts, .. }) = (outgoing.id, self.shape);
        if (id as u32) < experts * ranks::<N>(self.comm) as u32 {
            let rank = id as u32 / experts;
            let is_absent = session.absent.contains(rank as usize);
            return (!is_absent).then_some((rank, id as u32 % experts));
        }
        if id != -1 && outgoing.part.is_first {
            let index = outgoing.part.row * top_k + warp::lane_id();
            // SAFETY: `faults` has its words, as the kernel's caller guarantees.
            unsafe { Faults::record_id(self.faults, index, id) };
        }
        None
    }

    /// Sends a part of a row, or stores it if the expert is here. A whole warp calls this.
    unsafe fn send<const N: usize, const V: usize>(
        &self,
        session: &Session<'_, N>,
        outgoing: &Outgoing<R, V>,
    ) {
        let (team, lane, top_k) = (self.comm.lsa_team(), warp::lane_id(), self.shape.top_k);
        let (part, me) = (outgoing.part, team.rank as u32);
        // SAFETY: only this warp has the part, and all of its lanes are here.
        unsafe {
            let expert = self.expert::<N, V>(session, outgoing);
            // A bit for each rank that gets the row.
            let mut targets = 0;
            for rank in 0..ranks::<N>(self.comm) as u32 {
                let is_target = warp::any(expert.is_some_and(|(there, _)| there == rank));
                targets |= u64::from(is_target) << rank;
            }
            // The message to a rank about this lane's expert.
            let message = |to: u32| {
                let has_row = if targets >> to & 1 == 1 { HAS_ROW } else { 0 };
                let expert = match expert {
                    Some((rank, number)) if rank == to => number + 1,
                    _ => 0,
                };
                [has_row | expert, outgoing.weight.to_bits()]
            };
            if part.is_first && lane < top_k {
                session.tell(self.comm, COUNT + 1 + part.row * top_k + lane, message);
            }
            let payload = Payload::of::<R>(&outgoing.row);
            for distance in 1..ranks::<N>(self.comm) {
                let to = team.rotated(distance as i32) as u32;
                if targets >> to & 1 == 1 {
                    for i in 0..V {
                        if let Some(at) = part.vector_of(part.row as usize, i) {
                            session.rows.send(distance, at as u32, payload.row[i]);
                        }
                    }
                    if let Some(slot) = self.scales_slot(part) {
                        session.rows.send(distance, slot, payload.scales);
                    }
                }
            }
            if targets >> me & 1 == 1 {
                self.store_row(me as usize, part, &payload);
            }
            if part.is_first {
                self.store_expert(me as usize, part.row, message(me));
                if lane == 0 {
                    mem::store(self.received.targets.wrapping_add(part.row as usize), targets);
                }
            }
        }
    }
}
