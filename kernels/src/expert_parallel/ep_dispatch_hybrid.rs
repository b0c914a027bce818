//! Sends the rows of tokens to the ranks of their experts, over several LSA teams.

use core::hint;
use core::marker::PhantomData;

use cuda_std::grid;
use cuda_std::prelude::*;
use devcomm_types::F8E4M3;
use half::bf16;
use nccl_device::gin::GinBackend;
use nccl_device::{BarrierIndex, Coop, DevComm, LsaPtr, MemoryOrder, Team, Window};

use super::parts::{Part, Parts};
use super::rail::{BATCH, Batch, Mail, Rail, Relayed, block_warps, position};
use super::rows::{self, Payload, Rows};
use super::shape::{Faults, Received, Shape, Steps};

/// Vectors of a part of a row that each lane has, as they are and of 8-bit floats: one of these is
/// made from two.
const VECTORS: usize = 4;
const F8_VECTORS: usize = VECTORS / 2;

/// Vectors of a message's header: a word with the number of the rank's tokens, and padding.
const HEADER: usize = 1;

/// Returns the vectors of a message with a whole batch.
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
/// teams: up to [`GROUP`](super::rail::GROUP) teams of as many ranks. A token's row goes once to
/// each team with one of its experts, to the rank of this rank's rail, which stores it to the ranks
/// of its team. Rows of [`F8E4M3`] are converted in the same way, with scales.
///
/// `received` has in each rank the memory of [`Received`], at [`Received::offsets`] for all ranks,
/// in the order of the world. `mail` has room for messages of [`message_vectors`].
///
/// `input`, `ids`, `weights`, `tokens`, `faults` and `steps` are those of `ep_dispatch`. A launch
/// that only sends also stores this rank's rows to its own team.
///
/// Grid: any, up to the LSA barriers and the batches of the most tokens, the same in every rank.
/// Block: a multiple of 32 threads up to 512, one-dimensional. May be a dependent launch.
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
        tokens <= shape.tokens,
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
    input: *const bf16,
    ids: *const i32,
    weights: *const f32,
    tokens: u32,
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
        let rail = Rail::<B>::new(&comm, mail, shape, vectors);
        let team = comm.lsa_team();
        let dispatch = Dispatch::<T, B> {
            rail: &rail,
            team,
            shape,
            received,
            ranks: comm.n_ranks() as usize,
            input,
            ids,
            weights,
            tokens,
            relayed,
            faults,
            routes: shared_array![u32; BATCH as usize],
            row: PhantomData,
        };
        match T::HAS_SCALES {
            true => dispatch.run::<F8_VECTORS>(&comm, steps),
            false => dispatch.run::<VECTORS>(&comm, steps),
        }
    }
}

struct Dispatch<'a, T, B> {
    rail: &'a Rail<'a, B>,
    team: Team,
    shape: Shape,
    received: Window<u32>,
    ranks: usize,
    input: *const bf16,
    ids: *const i32,
    weights: *const f32,
    tokens: u32,
    relayed: Relayed,
    faults: *mut u32,
    /// Words in shared memory: for each token of a batch a bit for each team, or each rank of this
    /// team.
    routes: *mut u32,
    row: PhantomData<T>,
}

impl<T: Rows, B: GinBackend> Dispatch<'_, T, B> {
    /// Sends, and then receives. All threads of the block call this together.
    unsafe fn run<const VECTORS: usize>(&self, comm: &DevComm, steps: u32) {
        let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
        // SAFETY: all threads of the block are here, and barriers separate the steps.
        unsafe {
            if steps & Steps::SEND != 0 {
                self.rail.each_batch(self.tokens, |batch| self.pack::<VECTORS>(batch));
                // After this no rank of the team uses what it received before. A dependent launch
                // has released nothing to the team yet: that it has read these.
                barrier.sync(MemoryOrder::AcqRel);
                let me = self.rail.teams.rank;
                self.rail.each_batch(self.tokens, |batch| {
                    self.pass_on::<VECTORS>(me, batch, self.tokens);
                });
            }
            if steps & Steps::RECEIVE != 0 {
                for team in self.rail.teams.others() {
                    self.receive::<VECTORS>(team);
                }
                self.rail.end();
                // After this the rows of all teams are in this rank.
                barrier.sync(MemoryOrder::Release);
            }
        }
    }

    /// Receives the batches of a team, and stores their rows to the ranks of this team. All threads
    /// of the block call this together.
    unsafe fn receive<const VECTORS: usize>(&self, team: i32) {
        let mut next = Some(self.rail.first());
        while let Some(batch) = next {
            self.rail.wait(team, batch);
            // SAFETY: the kernel's caller guarantees the memory; the message has arrived.
            unsafe {
                let tokens = mem::load(self.rail.incoming(team, batch));
                self.pass_on::<VECTORS>(team, batch, tokens);
                next = batch.next(tokens);
            }
        }
    }

    /// Calls `work` with this warp's tokens of a batch, by their numbers in the batch.
    fn each_token(len: u32, work: impl Fn(u32)) {
        let mut token = warp::warp_id();
        while token < len {
            work(token);
            token += block_warps();
        }
    }

    /// Packs and sends a batch to all teams. All threads of the block call this together.
    unsafe fn pack<const VECTORS: usize>(&self, batch: Batch) {
        let (first, len, lane) = (batch.first(), batch.len(self.tokens), warp::lane_id());
        let (teams, me) = (self.rail.teams.n_ranks, self.rail.teams.rank);
        // SAFETY: the kernel's caller guarantees the memory; all lanes of a warp take the same
        // turns.
        unsafe {
            Self::each_token(len, |token| self.route(batch, token));
            thread::sync_threads();
            let routes = self.route_of_lane(len);
            let parts = Parts::<VECTORS>::new(self.shape.vectors);
            let (mut index, end) = Self::turns(parts, first, len);
            while index < end {
                let part = parts.at(index);
                let token = part.row - first;
                let row = self.load(part);
                let bits = warp::shuffle_idx(routes, token);
                for team in 0..teams {
                    let those = warp::ballot(routes >> team & 1 == 1);
                    if bits >> team & 1 == 1 {
                        let [rows, scales] = self.rows(self.rail.outgoing(team, batch), len, those);
                        part.store_payload::<T>(rows, scales, position(those, token), &row);
                    }
                }
                index += block_warps();
            }
            for team in Coop::cta().strided(teams as u32) {
                let header = Vec16::from_bits([self.tokens, 0, 0, 0]);
                mem::store_vec(self.rail.outgoing(team as i32, batch), header);
            }
            thread::sync_threads();
            let mut team = 0;
            while team < teams && warp::warp_id() == 0 {
                let rows = warp::ballot(routes >> team & 1 == 1).count_ones();
                if team != me && lane == 0 {
                    let row = self.shape.vectors + self.shape.scale_vectors_if(T::HAS_SCALES);
                    self.rail.post(team, batch, rows_at(self.shape, len) as u32 + rows * row);
                }
                team += 1;
            }
        }
    }

    /// Packs the experts of a token for all teams, and notes which teams get its row. All lanes of
    /// a warp call this together.
    unsafe fn route(&self, batch: Batch, token: u32) {
        let (lane, Shape { top_k, experts, .. }) = (warp::lane_id(), self.shape);
        let (all, of_team) = (experts * self.ranks as u32, experts * self.team.n_ranks as u32);
        // SAFETY: the launch's conditions. (Otherwise divisions would be checked.)
        unsafe { hint::assert_unchecked(of_team > 0) };
        let (has_expert, row) = (lane < top_k, batch.first() + token);
        let (mut id, mut weight) = (-1, 0.0);
        // SAFETY: the input has the token, and only this warp has it.
        unsafe {
            if has_expert {
                let index = (row * top_k + lane) as usize;
                id = mem::load(self.ids.wrapping_add(index));
                weight = mem::load(self.weights.wrapping_add(index));
            }
            let exists = (id as u32) < all;
            if !exists && id != -1 {
                Faults::record_id(self.faults, row * top_k + lane, id);
            }
            let mut bits = 0;
            for team in 0..self.rail.teams.n_ranks {
                let is_there = exists && id as u32 / of_team == team as u32;
                bits |= u32::from(warp::any(is_there)) << team;
                if has_expert {
                    let word = if is_there { id as u32 % of_team + 1 } else { 0 };
                    let to = self.entry(self.rail.outgoing(team, batch), token);
                    mem::store(to, word);
                    mem::store(to.wrapping_add(1), f32::to_bits(weight));
                }
            }
            if lane == 0 {
                mem::store(self.routes.wrapping_add(token as usize), bits);
                mem::store(self.relayed.teams.wrapping_add(row as usize), bits);
            }
        }
    }

    /// Stores a batch of a team's rank of this rail, which has `tokens` tokens, to this team. All
    /// threads of the block call this together, and the message has arrived.
    unsafe fn pass_on<const VECTORS: usize>(&self, team: i32, batch: Batch, tokens: u32) {
        let (first, len) = (batch.first(), batch.len(tokens));
        let source = (team * self.team.n_ranks + self.team.rank) as usize;
        let message = match team == self.rail.teams.rank {
            true => self.rail.outgoing(team, batch),
            false => self.rail.incoming(team, batch),
        };
        // SAFETY: the kernel's caller guarantees the memory; all lanes of a warp take the same
        // turns.
        unsafe {
            if first == 0 {
                for peer in Coop::cta().strided(self.team.n_ranks as u32) {
                    mem::store(self.counts(peer as i32).wrapping_add(source), tokens);
                }
            }
            let of_source = source * self.shape.tokens as usize;
            let relayed = (team as u32 * self.shape.tokens) as usize;
            Self::each_token(len, |token| {
                let row = (first + token) as usize;
                let bits = self.tell_team(self.entry(message, token), of_source + row);
                if warp::lane_id() == 0 {
                    mem::store(self.routes.wrapping_add(token as usize), bits);
                    mem::store(self.relayed.ranks.wrapping_add(relayed + row), bits);
                }
            });
            thread::sync_threads();
            let routes = self.route_of_lane(len);
            let those = warp::ballot(routes != 0);
            let parts = Parts::<VECTORS>::new(self.shape.vectors);
            let (mut index, end) = Self::turns(parts, first, len);
            while index < end {
                let part = parts.at(index);
                let token = part.row - first;
                let bits = warp::shuffle_idx(routes, token);
                if bits != 0 {
                    let [rows, scales] = self.rows(message, len, those);
                    let (from, to) = (position(those, token), of_source + part.row as usize);
                    let mut payload = Payload { row: part.load(rows, from), ..Payload::ZERO };
                    if let (true, Some(at)) = (T::HAS_SCALES, part.scales_of(from)) {
                        payload.scales = mem::load_vec(scales.wrapping_add(4 * at).cast_const());
                    }
                    for peer in self.team.all_from_self() {
                        if bits >> peer & 1 == 1 {
                            let received = self.part_of(peer).as_ptr();
                            let [_, scales, ..] = self.offsets();
                            let scales = received.wrapping_add(scales);
                            part.store_payload::<T>(received, scales, to, &payload);
                        }
                    }
                }
                index += block_warps();
            }
            // All have read the routes.
            thread::sync_threads();
        }
    }

    /// Tells each rank of the team which of its experts a token has, and returns a bit for each
    /// rank with one. All lanes of a warp call this together.
    unsafe fn tell_team(&self, entry: *mut u32, place: usize) -> u32 {
        let (lane, Shape { top_k, experts, .. }) = (warp::lane_id(), self.shape);
        let [_, _, of_experts, of_weights, ..] = self.offsets();
        // SAFETY: the launch's conditions.
        unsafe { hint::assert_unchecked(experts > 0) };
        let (mut word, mut weight, mut bits) = (0, 0, 0);
        // SAFETY: all lanes are here, and only this warp stores what the token's ranks are told.
        unsafe {
            if lane < top_k {
                (word, weight) = (mem::load(entry), mem::load(entry.wrapping_add(1)));
            }
            let number = word.wrapping_sub(1);
            for peer in self.team.all_from_self() {
                let is_there = word != 0 && number / experts == peer as u32;
                bits |= u32::from(warp::any(is_there)) << peer;
                if lane < top_k {
                    let at = place * top_k as usize + lane as usize;
                    let part = self.part_of(peer).as_ptr();
                    let expert = if is_there { number % experts + 1 } else { 0 };
                    mem::store(part.wrapping_add(of_experts + at), expert);
                    mem::store(part.wrapping_add(of_weights + at), weight);
                }
            }
        }
        bits
    }

    /// Returns the words of this lane's expert of a token in a message.
    fn entry(&self, message: *mut u32, token: u32) -> *mut u32 {
        let entry = token * self.shape.top_k + warp::lane_id();
        message.wrapping_add(4 * HEADER + 2 * entry as usize)
    }

    /// Returns the rows of a message with `len` tokens, and their scales; `those` are the tokens
    /// that have rows.
    fn rows(&self, message: *mut u32, len: u32, those: u32) -> [*mut u32; 2] {
        let rows = message.wrapping_add(4 * rows_at(self.shape, len));
        [rows, rows.wrapping_add((4 * those.count_ones() * self.shape.vectors) as usize)]
    }

    /// Returns the offsets of the received rows, scales, experts, weights and counts.
    fn offsets(&self) -> [usize; 6] {
        Received::offsets(self.shape, self.ranks, T::HAS_SCALES)
    }

    /// Loads a part of a row of this rank, and converts it. All lanes of a warp call this together.
    unsafe fn load<const VECTORS: usize>(&self, part: Part<VECTORS>) -> Payload<VECTORS> {
        // SAFETY: the input has the row, and all lanes of the warp are here.
        unsafe { Payload::of::<T>(&rows::load::<T, VECTORS>(self.input, part, part.row as usize)) }
    }

    /// Returns the memory of what a rank of the team receives; the rows are first.
    #[track_caller]
    fn part_of(&self, peer: i32) -> LsaPtr<u32> {
        self.received.lsa(peer)
    }

    /// Returns where a rank of the team keeps how many tokens each rank has.
    #[track_caller]
    fn counts(&self, peer: i32) -> *mut u32 {
        let [.., counts, _] = self.offsets();
        self.part_of(peer).as_ptr().wrapping_add(counts)
    }

    /// Loads the bits of the batch's token of this lane's number.
    ///
    /// # Safety
    ///
    /// A barrier of the block has followed the stores.
    unsafe fn route_of_lane(&self, len: u32) -> u32 {
        let lane = warp::lane_id();
        // SAFETY: the word is stored, as the caller guarantees.
        if lane < len { unsafe { mem::load(self.routes.wrapping_add(lane as usize)) } } else { 0 }
    }

    /// Returns the first part of a batch's rows for this warp, and the end of all.
    fn turns<const VECTORS: usize>(parts: Parts<VECTORS>, first: u32, len: u32) -> (u32, u32) {
        (parts.count(first) + warp::warp_id(), parts.count(first + len))
    }
}
