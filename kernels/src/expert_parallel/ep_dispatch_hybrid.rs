//! Sends the rows of tokens to the ranks of their experts, over several LSA teams.

use core::hint;

use super::counters::Words;
use super::parts::{Parts, block_warps};
use super::rail::{BATCH, Batch, Mail, Rail, Relayed, position};
use super::rows::{self, Payload, Rows};
use super::shape::{Faults, Received, Shape, Steps, Tokens};
use crate::prelude::*;

/// Vectors of a part of a row that each lane has.
const VECTORS: usize = 4;
/// The same for 8-bit floats, of which a vector is made from two.
const F8_VECTORS: usize = VECTORS / 2;

/// Vectors of a message's header: a word with the number of the rank's tokens, and padding.
const HEADER: usize = 1;

/// Returns the number of vectors of a message with a whole batch.
#[must_use]
pub const fn message_vectors(shape: Shape, batch: u32, has_scales: bool) -> usize {
    let row = shape.vectors + shape.scale_vectors_if(has_scales);
    rows_at(shape, batch) + (batch * row) as usize
}

/// Returns where the rows begin in a message, in vectors: after two words for each token and
/// expert. The first word is 1 plus the expert's index in the team, or 0 if it is elsewhere; the
/// second is its weight. Scales of 8-bit floats follow the rows.
const fn rows_at(shape: Shape, tokens: u32) -> usize {
    HEADER + (tokens * shape.top_k).div_ceil(2) as usize
}

/// Does what [`ep_dispatch`](fn@super::ep_dispatch::ep_dispatch) does, among the ranks of all LSA
/// teams: up to [`GROUP`](super::rail::GROUP) teams of the same size. A token's row goes once to
/// each team with one of its experts, to the rank there on this rank's rail, which stores it to the
/// ranks of its team. Rows of [`F8E4M3`] are converted in the same way, with scales.
///
/// `received` has in each rank the memory of [`Received`], at [`Received::offsets`] for all ranks,
/// in the order of the world. `mail` has room for messages of [`message_vectors`].
///
/// A launch that only sends also stores this rank's rows to its own team.
///
/// Grid: any, up to the LSA barriers and the batches of `shape.tokens`, the same in every rank.
/// Block: a multiple of 32 threads up to 512, one-dimensional. Dependent launch: allowed.
/// Connections: RAIL or FULL.
///
/// # Safety
///
/// The same as for [`ep_dispatch`](fn@super::ep_dispatch::ep_dispatch), with `received` in place of
/// the pointers; `relayed` has words for `shape.tokens` tokens of each rank of the rail, and of
/// this rank. All ranks launch this with the same sizes, and `mail` is as [`Mail`] says, its epoch
/// 0 before the first launch.
#[kernel(
    B = gin,
    T = [bf16, F8E4M3],
    max_threads = 512,
    min_blocks = 1,
    requires(
        tokens.count <= shape.tokens,
        shape.top_k <= 16,
        shape.experts > 0,
        mail.batch > 0,
        mail.batch <= BATCH,
        Received::offsets(shape, comm.n_ranks() as usize, T::HAS_SCALES)[5] <= received.len(),
        Mail::words(
            shape,
            comm.rail_team().n_ranks as usize,
            mail.batch,
            message_vectors(shape, mail.batch, T::HAS_SCALES)
        ) <= mail.window.len()
    )
)]
pub unsafe fn ep_dispatch_hybrid<T: Rows, B: GinBackend>(
    comm: DevComm,
    mail: Mail,
    received: Window<u32>,
    shape: Shape,
    tokens: Tokens,
    relayed: Relayed,
    faults: *mut u32,
    steps: u32,
) {
    grid::launch_next();
    grid::wait_for_previous();
    let vectors = message_vectors(shape, mail.batch, T::HAS_SCALES);
    // SAFETY: the kernel's caller guarantees the elements, the received memory and that of the
    // messages.
    unsafe {
        let dispatch = Dispatch::<T, B> {
            rail: &Rail::new(&comm, mail, shape, vectors),
            team: comm.lsa_team(),
            shape,
            received,
            ranks: comm.n_ranks() as usize,
            tokens,
            relayed,
            faults,
            routes: Words(shared_array![u32; BATCH as usize]),
            row: PhantomData,
        };
        match T::HAS_SCALES {
            true => dispatch.run::<F8_VECTORS>(&comm, steps),
            false => dispatch.run::<VECTORS>(&comm, steps),
        }
    }
}

pub(super) struct Dispatch<'a, T, B> {
    pub(super) rail: &'a Rail<'a, B>,
    pub(super) team: Team,
    pub(super) shape: Shape,
    pub(super) received: Window<u32>,
    pub(super) ranks: usize,
    tokens: Tokens,
    pub(super) relayed: Relayed,
    faults: *mut u32,
    /// Words in shared memory: for each token of a batch a bit for each team, or each rank of this
    /// team.
    pub(super) routes: Words,
    row: PhantomData<T>,
}

impl<T: Rows, B: GinBackend> Dispatch<'_, T, B> {
    /// Sends, and then receives. All threads of the block call this together.
    unsafe fn run<const VECTORS: usize>(&self, comm: &DevComm, steps: u32) {
        let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
        // SAFETY: the kernel's caller guarantees the memory. All threads of the block are here, and
        // barriers separate the steps.
        unsafe {
            if steps & Steps::SEND != 0 {
                self.rail.each_batch(|batch| self.pack::<VECTORS>(batch));
                // After this, no rank of the team uses what it received before. The barrier also
                // releases, as the last launch has not told the team that it has read this.
                barrier.sync(MemoryOrder::AcqRel);
                let me = self.rail.teams.rank; // Its message stays where it is packed.
                self.rail.each_batch(|batch| {
                    self.pass_on::<VECTORS>(me, batch, self.rail.outgoing(me, batch))
                });
            }
            if steps & Steps::RECEIVE != 0 {
                for team in self.rail.teams.others() {
                    self.rail.each_batch(|batch| {
                        self.rail.wait(team, batch);
                        self.pass_on::<VECTORS>(team, batch, self.rail.incoming(team, batch))
                    });
                }
                self.rail.end();
                // After this the rows of all teams are in this rank.
                barrier.sync(MemoryOrder::Release);
            }
        }
    }

    /// Returns this warp's tokens of a batch, by their numbers in the batch.
    pub(super) fn tokens_of_warp(len: u32) -> Strided<u32> {
        Strided::new(warp::warp_id(), len, block_warps())
    }

    /// Packs and sends a batch to all teams. Returns how many tokens this rank has. All threads of
    /// the block call this together.
    unsafe fn pack<const VECTORS: usize>(&self, batch: Batch) -> u32 {
        let (first, len, lane) = (batch.first(), batch.len(self.tokens.count), warp::lane_id());
        let (teams, me) = (self.rail.teams.n_ranks, self.rail.teams.rank);
        // SAFETY: the kernel's caller guarantees the memory; a warp's lanes take the same turns.
        unsafe {
            for token in Self::tokens_of_warp(len) {
                self.route(batch, token);
            }
            thread::sync_threads();
            let routes = self.route_of_lane(len);
            for part in Parts::<VECTORS>::new(self.shape.vectors).of_block(first, len) {
                let token = part.row - first;
                let row = rows::load::<T, VECTORS>(self.tokens.input, part, part.row as usize);
                let row = Payload::of::<T>(&row);
                let bits = warp::shuffle_idx(routes, token);
                for team in 0..teams {
                    let routed = warp::ballot(routes >> team & 1 == 1);
                    if bits >> team & 1 == 1 {
                        let to = self.rail.outgoing(team, batch);
                        let [rows, scales] = self.rows(to, len, routed);
                        part.store_payload::<T>(rows, scales, position(routed, token), &row);
                    }
                }
            }
            for team in Coop::cta().strided(teams as u32) {
                let header = Vec16::from_bits([self.tokens.count, 0, 0, 0]);
                mem::store_vec(self.rail.outgoing(team as i32, batch), header);
            }
            thread::sync_threads();
            let sends = warp::warp_id() == 0;
            for team in (0..teams).take_while(|_| sends) {
                let rows = warp::ballot(routes >> team & 1 == 1).count_ones();
                if team != me && lane == 0 {
                    let row = self.shape.vectors + self.shape.scale_vectors_if(T::HAS_SCALES);
                    self.rail.post(team, batch, rows_at(self.shape, len) as u32 + rows * row);
                }
            }
        }
        self.tokens.count
    }

    /// Packs the experts of a token for all teams, and notes which teams get its row. All lanes of
    /// a warp call this together.
    unsafe fn route(&self, batch: Batch, token: u32) {
        let (lane, Shape { top_k, experts, .. }) = (warp::lane_id(), self.shape);
        let (all, of_team) = (experts * self.ranks as u32, experts * self.team.n_ranks as u32);
        let (row, mut bits) = (batch.first() + token, 0);
        // SAFETY: the launch requires experts. (Otherwise divisions would be checked.)
        unsafe { hint::assert_unchecked(of_team > 0) };
        // SAFETY: the input has the token, and only this warp has it.
        unsafe {
            let (id, weight) = self.tokens.expert(self.shape, row);
            let exists = (id as u32) < all;
            if !exists && id != -1 {
                Faults::record_id(self.faults, row * top_k + lane, id);
            }
            for team in 0..self.rail.teams.n_ranks {
                let is_there = exists && id as u32 / of_team == team as u32;
                bits |= u32::from(warp::any(is_there)) << team;
                if lane < top_k {
                    let to = self.entry(self.rail.outgoing(team, batch), token);
                    to.store(0, if is_there { id as u32 % of_team + 1 } else { 0 });
                    to.store(1, weight.to_bits());
                }
            }
            if lane == 0 {
                self.routes.store(token, bits);
                Words(self.relayed.teams).store(row, bits);
            }
        }
    }

    /// Returns the words of this lane's expert of a token in a message.
    pub(super) fn entry(&self, message: *mut u32, token: u32) -> Words {
        let entry = token * self.shape.top_k + warp::lane_id();
        Words(message.wrapping_add(4 * HEADER + 2 * entry as usize))
    }

    /// Returns the rows of a message with `len` tokens, and their scales; `routed` has a bit for
    /// each token that has a row.
    pub(super) fn rows(&self, message: *mut u32, len: u32, routed: u32) -> [*mut u32; 2] {
        let rows = message.wrapping_add(4 * rows_at(self.shape, len));
        [rows, rows.wrapping_add((4 * routed.count_ones() * self.shape.vectors) as usize)]
    }

    /// Loads the route of the batch's token with this lane's number. A barrier of the block has
    /// followed the stores.
    pub(super) unsafe fn route_of_lane(&self, len: u32) -> u32 {
        let lane = warp::lane_id();
        // SAFETY: the word is stored, as the caller guarantees.
        if lane < len { unsafe { self.routes.load(lane) } } else { 0 }
    }

    /// Returns the offsets of the received rows, scales, experts, weights and counts.
    pub(super) fn offsets(&self) -> [usize; 6] {
        Received::offsets(self.shape, self.ranks, T::HAS_SCALES)
    }
}
