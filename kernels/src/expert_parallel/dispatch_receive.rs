//! Receives the rows of tokens that [`ep_dispatch`](super::ep_dispatch) sends.

use super::ep_dispatch::{COUNT, Dispatch, HAS_ROW};
use super::prelude::*;

impl<R: Rows> Dispatch<'_, R> {
    /// Receives this warp's share of the parts of a round, which begins with part `round`. Returns
    /// the end of the parts of its ranks. A whole warp calls this. There are slots for the warp's
    /// first part of the round.
    pub(super) unsafe fn receive_round<const N: usize, const V: usize>(
        &self,
        session: &Session<'_, N>,
        parts: Parts<V>,
        share: Share,
        round: u32,
    ) -> u32 {
        let mut most = 0;
        for distance in Strided::new(share.distance, rolled::<N>(self.comm), share.distance_step) {
            let mut at = round + share.part;
            loop {
                let part = parts.at(at);
                // SAFETY: only this warp has the part, and all of its lanes are here.
                let tokens = unsafe { self.receive(session, distance, part) };
                let end = parts.count(tokens);
                most = most.max(end);
                at += share.part_step;
                // A warp of one peer has one part of a round, so there is no loop.
                if share.distance_step == 1 || at >= end.min(round + share.round_len) {
                    break;
                }
            }
        }
        most
    }

    /// Receives a part of a row of the rank from which this one is at `distance`, if there is such
    /// a row and the rank sends it. Returns how many tokens that rank has. A whole warp calls this.
    unsafe fn receive<const N: usize, const V: usize>(
        &self,
        session: &Session<'_, N>,
        distance: usize,
        part: Part<V>,
    ) -> u32 {
        let (team, top_k) = (self.comm.lsa_team(), self.shape.top_k);
        let source = team.rotated((ranks::<N>(self.comm) - distance) as i32) as usize;
        // Every lane has a message that says whether the row is sent.
        let slot = COUNT + 1 + part.row * top_k + warp::lane_id() % top_k;
        let (mut payload, mut message) = (Payload::ZERO, [0; 2]);
        let (mut tokens, nothing) = (0, Vec16::from_bits([0; 4]));
        // SAFETY: the kernel's caller guarantees the memory, with slots for the most tokens.
        unsafe {
            // All messages that may have arrived are polled at once. No branch is around a load, so
            // that all are in flight together; slot 0 stands for a vector that no rank sends. With
            // scales there are no registers for that.
            self.comm.wait_until(Coop::thread(), || {
                if session.absent.contains(source) {
                    return true;
                }
                let count = session.numbered.peek(source, COUNT);
                let told = session.numbered.peek(source, slot);
                let mut all = true;
                for i in 0..V {
                    let at = part.vector_of(part.row as usize, i);
                    if R::HAS_SCALES && at.is_none() {
                        continue;
                    }
                    let vector = session.rows.peek(source, at.unwrap_or(0) as u32);
                    all &= vector.is_some() || at.is_none();
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
                    if let Some(at) = part.vector_of(part.row as usize, i) {
                        session.rows.empty(source, at as u32);
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
                    mem::store(self.received.counts.wrapping_add(source), tokens);
                }
            }
        }
        tokens
    }

    /// Stores a part of a row of a rank in `received`. Only this warp has the part.
    pub(super) unsafe fn store_row<const V: usize>(
        &self,
        source: usize,
        part: Part<V>,
        payload: &Payload<V>,
    ) {
        let Received { rows, scales, .. } = self.received;
        let place = source * self.shape.tokens as usize + part.row as usize;
        // SAFETY: `received` has room for the row, and only this warp has the part.
        unsafe { part.store_payload::<R>(rows, scales.cast(), place, payload) };
    }

    /// Stores what this rank is told of this lane's expert. Only this warp has the token.
    pub(super) unsafe fn store_expert(&self, source: usize, row: u32, message: [u32; 2]) {
        let (lane, Shape { tokens, top_k, .. }) = (warp::lane_id(), self.shape);
        if lane < top_k {
            let [word, weight] = message;
            let token = source * tokens as usize + row as usize;
            let at = token * top_k as usize + lane as usize;
            // SAFETY: `received` has room for the token's experts; only this warp has the token.
            unsafe {
                mem::store(self.received.experts.wrapping_add(at), word & !HAS_ROW);
                mem::store(self.received.weights.wrapping_add(at), f32::from_bits(weight));
            }
        }
    }
}
