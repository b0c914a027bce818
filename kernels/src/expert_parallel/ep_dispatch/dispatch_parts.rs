//! Sends a part of a row to the ranks of the token's experts, and receives one from another rank.

use super::*;

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
    pub(super) unsafe fn send(&self, outgoing: &Outgoing<V>) {
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

    /// Receives a part of a row of the rank from which this one is at `distance`, if there is such
    /// a row and the rank sends it. Returns how many tokens that rank has.
    pub(super) unsafe fn receive(&self, distance: usize, part: Part<V>) -> u32 {
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
