//! Stores the rows that cross the network to the ranks of their experts: the half of
//! [`ep_dispatch_hybrid`](super::ep_dispatch_hybrid) within an LSA team.

use core::hint;

use super::counters::Words;
use super::ep_dispatch_hybrid::Dispatch;
use super::parts::Parts;
use super::rail::{Batch, position};
use super::rows::{Payload, Rows};
use super::shape::Shape;
use crate::prelude::*;

impl<T: Rows, B: GinBackend> Dispatch<'_, T, B> {
    /// Stores to this team a batch from the rank of `team` on this rail. Returns how many tokens
    /// that rank has. All threads of the block call this together, and the message has arrived.
    pub(super) unsafe fn pass_on<const VECTORS: usize>(
        &self,
        team: i32,
        batch: Batch,
        message: *mut u32,
    ) -> u32 {
        // SAFETY: the message has arrived, and its first word is the number of tokens.
        let tokens = unsafe { mem::load(message) };
        let (first, len) = (batch.first(), batch.len(tokens));
        let source = (team * self.team.n_ranks + self.team.rank) as usize;
        let of_source = source * self.shape.tokens as usize;
        // SAFETY: the kernel's caller guarantees the memory; a warp's lanes take the same turns.
        unsafe {
            if first == 0 {
                let [.., counts, _] = self.offsets();
                for peer in Coop::cta().strided(self.team.n_ranks as u32) {
                    let to = self.received.lsa(peer as i32).as_ptr();
                    mem::store(to.wrapping_add(counts + source), tokens);
                }
            }
            let relayed =
                self.relayed.ranks.wrapping_add((team as u32 * self.shape.tokens) as usize);
            for token in Self::tokens_of_warp(len) {
                let place = of_source + (first + token) as usize;
                let bits = self.tell_team(self.entry(message, token), place);
                if warp::lane_id() == 0 {
                    self.routes.store(token, bits);
                    Words(relayed).store(first + token, bits);
                }
            }
            thread::sync_threads();
            let routes = self.route_of_lane(len);
            let routed = warp::ballot(routes != 0);
            for part in Parts::<VECTORS>::new(self.shape.vectors).of_block(first, len) {
                let token = part.row - first;
                let bits = warp::shuffle_idx(routes, token);
                if bits == 0 {
                    continue;
                }
                let [rows, scales] = self.rows(message, len, routed);
                let (from, to) = (position(routed, token), of_source + part.row as usize);
                let mut payload = Payload { row: part.load(rows, from), ..Payload::ZERO };
                if let (true, Some(at)) = (T::HAS_SCALES, part.scales_of(from)) {
                    payload.scales = mem::load_vec(scales.wrapping_add(4 * at).cast_const());
                }
                for peer in self.team.all_from_self() {
                    if bits >> peer & 1 == 1 {
                        let rows = self.received.lsa(peer).as_ptr();
                        let [_, scales, ..] = self.offsets();
                        part.store_payload::<T>(rows, rows.wrapping_add(scales), to, &payload);
                    }
                }
            }
            // After this, all threads have read the routes.
            thread::sync_threads();
        }
        tokens
    }

    /// Tells each rank of the team which of its experts a token has, and returns a bit for each
    /// rank with such an expert. All lanes of a warp call this together.
    unsafe fn tell_team(&self, entry: Words, place: usize) -> u32 {
        let (lane, Shape { top_k, experts, .. }) = (warp::lane_id(), self.shape);
        let [_, _, of_experts, of_weights, ..] = self.offsets();
        // SAFETY: the launch requires experts. (Otherwise divisions would be checked.)
        unsafe { hint::assert_unchecked(experts > 0) };
        let (mut word, mut weight, mut bits) = (0, 0, 0);
        // SAFETY: all lanes are here, and only this warp stores what the token's ranks are told.
        unsafe {
            if lane < top_k {
                (word, weight) = (entry.load(0), entry.load(1));
            }
            let number = word.wrapping_sub(1); // Not used if the word is 0.
            for peer in self.team.all_from_self() {
                let is_there = word != 0 && number / experts == peer as u32;
                bits |= u32::from(warp::any(is_there)) << peer;
                if lane < top_k {
                    let at = place * top_k as usize + lane as usize;
                    let to = self.received.lsa(peer).as_ptr();
                    let expert = if is_there { number % experts + 1 } else { 0 };
                    mem::store(to.wrapping_add(of_experts + at), expert);
                    mem::store(to.wrapping_add(of_weights + at), weight);
                }
            }
        }
        bits
    }
}
