//! Sends the rows of tokens to the ranks of their experts, within the LSA team.

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
    /// Returns the slot of this lane's vector of scales. These slots follow those of all rows.
    fn scales_slot(&self, part: Part<V>) -> Option<u32> {
        let at = part.scales_of(part.row as usize).filter(|_| R::HAS_SCALES);
        at.map(|at| self.launch.shape.slots() + at as u32)
    }

    /// Returns the rank of this lane's expert, if that is not absent, and the expert's index there.
    unsafe fn expert(&self, outgoing: &Outgoing<V>) -> Option<(u32, u32)> {
        let (id, Shape { top_k, experts, .. }) = (outgoing.id, self.launch.shape);
        if (id as u32) < experts * ranks::<N>(self.launch.comm) as u32 {
            let rank = id as u32 / experts;
            let is_absent = self.session.absent.contains(rank as usize);
            return (!is_absent).then_some((rank, id as u32 % experts));
        }
        if id != -1 && outgoing.part.is_first {
            let index = outgoing.part.row * top_k + warp::lane_id();
            // SAFETY: `faults` has its words, as the kernel's caller guarantees.
            unsafe { Faults::record_id(self.launch.faults, index, id) };
        }
        None
    }

    /// Sends a part of a row, or stores it if the expert is here.
    unsafe fn send(&self, outgoing: &Outgoing<V>) {
        let Self { launch: Launch { comm, shape, received, .. }, session, .. } = self;
        let (part, team, top_k) = (outgoing.part, comm.lsa_team(), shape.top_k);
        let (lane, me) = (warp::lane_id(), team.rank as u32);
        // SAFETY: only this warp has the part, and all of its lanes are here.
        unsafe {
            let expert = self.expert(outgoing);
            // A bit for each rank that gets the row.
            let mut targets = 0;
            for rank in 0..ranks::<N>(comm) as u32 {
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
                session.tell(COUNT + 1 + part.row * top_k + lane, message);
            }
            let payload = Payload::of::<R>(&outgoing.row);
            for distance in 1..ranks::<N>(comm) {
                let to = team.rotated(distance as i32) as u32;
                if targets >> to & 1 == 1 {
                    for i in 0..V {
                        if let Some(slot) = part.slot(i) {
                            session.rows.send(distance, slot, payload.row[i]);
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
                    mem::store(received.targets.wrapping_add(part.row as usize), targets);
                }
            }
        }
    }

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

    /// Receives a part of a row of the rank from which this one is at `distance`, if there is such
    /// a row and the rank sends it. Returns how many tokens that rank has.
    unsafe fn receive(&self, distance: usize, part: Part<V>) -> u32 {
        let Self { launch: Launch { comm, shape, received, .. }, session, .. } = self;
        let back = ranks::<N>(comm) - distance;
        let source = comm.lsa_team().rotated(back as i32) as usize;
        // Every lane has a message that says whether the row is sent.
        let slot = COUNT + 1 + part.row * shape.top_k + warp::lane_id() % shape.top_k;
        let (mut payload, mut message) = (Payload::ZERO, [0; 2]);
        let (mut tokens, nothing) = (0, Vec16::from_bits([0; 4]));
        // SAFETY: the kernel's caller guarantees the memory, with slots for the most tokens.
        unsafe {
            // All messages that may have arrived are polled at once. No branch is around a load, so
            // that all are in flight together; slot 0 stands for a vector that no rank sends. With
            // scales there are no registers for that.
            comm.wait_until(Coop::thread(), || {
                if session.absent.contains(source) {
                    return true;
                }
                let count = session.told(source, COUNT);
                let told = session.told(source, slot);
                let mut all = true;
                for i in 0..V {
                    let slot = part.slot(i);
                    if R::HAS_SCALES && slot.is_none() {
                        continue;
                    }
                    let vector = session.rows.peek(source, slot.unwrap_or(0));
                    all &= vector.is_some() || slot.is_none();
                    let before = if R::HAS_SCALES { payload.row[i] } else { nothing };
                    payload.row[i] = vector.unwrap_or(before);
                }
                if let Some(slot) = self.scales_slot(part) {
                    let scales = session.rows.peek(source, slot);
                    all &= scales.is_some();
                    payload.scales = scales.unwrap_or(payload.scales);
                }
                let Some([count, _]) = count else { return false };
                tokens = count;
                if part.row >= count {
                    return true;
                }
                message = told.unwrap_or(message);
                told.is_some() && (all || message[0] & HAS_ROW == 0)
            });
            if part.row < tokens && message[0] & HAS_ROW != 0 {
                self.store_row(source, part, &payload);
                for i in 0..V {
                    if let Some(slot) = part.slot(i) {
                        session.rows.empty(source, slot);
                    }
                }
                if let Some(slot) = self.scales_slot(part) {
                    session.rows.empty(source, slot);
                }
            }
            if part.is_first {
                if part.row < tokens {
                    self.store_expert(source, part.row, message);
                }
                if part.row == 0 && warp::lane_id() == 0 {
                    mem::store(received.counts.wrapping_add(source), tokens);
                }
            }
        }
        tokens
    }

    /// Stores a part of a row of a rank in `received`.
    unsafe fn store_row(&self, source: usize, part: Part<V>, payload: &Payload<V>) {
        let Launch { shape, received: Received { rows, scales, .. }, .. } = *self.launch;
        let place = source * shape.tokens as usize + part.row as usize;
        // SAFETY: `received` has room for the row, and only this warp has the part.
        unsafe { part.store_payload::<R>([rows, scales.cast()], place, payload) };
    }

    /// Stores what this rank is told of this lane's expert. Only this warp has the token.
    unsafe fn store_expert(&self, source: usize, row: u32, [word, weight]: [u32; 2]) {
        let Launch { shape: Shape { tokens, top_k, .. }, received, .. } = *self.launch;
        if warp::lane_id() < top_k {
            let token = source * tokens as usize + row as usize;
            let at = token * top_k as usize + warp::lane_id() as usize;
            // SAFETY: `received` has room for the token's experts; only this warp has the token.
            unsafe {
                mem::store(received.experts.wrapping_add(at), word & !HAS_ROW);
                mem::store(received.weights.wrapping_add(at), f32::from_bits(weight));
            }
        }
    }
}
