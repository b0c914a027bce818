//! The places of tokens in the order of the experts of all ranks, which tell each other first how
//! many rows there are.

use core::hint;

use cuda_std::atomic::{AtomicU32, Order, Scope};
use cuda_std::mem;
use cuda_std::prelude::*;
use nccl_device::{Coop, Team};

use super::counted::{Counted, Progress, Step};
use super::counters::{UNROLL, WARPS, add_one, sum_before, take_next};
use super::ep_layout::{DROPPED, Grouped, NONE};
use super::ranks::RANKS;
use super::shape::{Faults, Shape};

/// The tokens that a block handles at a time: one for each lane of a warp.
pub(super) const BATCH: u32 = warp::WARP_SIZE;

/// The most counters: of each expert of all ranks, and of each rank.
const COUNTERS: usize = Shape::EXPERTS + RANKS;

/// The block's shared memory.
#[derive(Clone, Copy)]
pub(super) struct Shared {
    /// The total of each counter.
    totals: *mut u32,
    /// The part of each counter before this block's tokens, then the place of its next row.
    next: *mut u32,
    /// The first row of each expert, with the rows of all ranks one after the other.
    starts: *mut u32,
    /// The sums of each warp.
    sums: *mut u32,
    /// How many results the tokens before this block's have.
    results: *mut u32,
    /// The experts of each token of a batch, or [`NONE`], and the places of its rows.
    experts: *mut u32,
    places: *mut u32,
    /// The index of each token among those that each rank receives.
    received: *mut u32,
    /// A bit for each rank that gets the token, and the index of the token's first result.
    targets: *mut u64,
    returns: *mut u32,
}

impl Shared {
    pub(super) fn new() -> Self {
        const ENTRIES: usize = BATCH as usize * Shape::TOP_K;
        Self {
            totals: shared_array![u32; COUNTERS],
            next: shared_array![u32; COUNTERS],
            starts: shared_array![u32; Shape::EXPERTS + 1],
            sums: shared_array![u32; WARPS],
            results: shared_array![u32; 1],
            experts: shared_array![u32; ENTRIES],
            places: shared_array![u32; ENTRIES],
            received: shared_array![u32; BATCH as usize * RANKS],
            targets: shared_array![u64; BATCH as usize],
            returns: shared_array![u32; BATCH as usize],
        }
    }

    /// Returns the words of a token of a batch in `experts` or `places`.
    fn of_token(words: *mut u32, token: u32) -> *mut u32 {
        words.wrapping_add(token as usize * Shape::TOP_K)
    }
}

/// The places of a launch's tokens.
pub(super) struct Places<'a> {
    pub(super) progress: &'a Progress<'a>,
    pub(super) team: Team,
    pub(super) memory: Counted,
    pub(super) shape: Shape,
    pub(super) ids: *const i32,
    pub(super) tokens: u32,
    pub(super) grouped: Grouped,
    pub(super) faults: *mut u32,
    pub(super) shared: Shared,
}

/// The places of a token of a batch.
#[derive(Clone, Copy)]
pub(super) struct Placed {
    /// The rank of this lane's expert, if there is one.
    pub(super) rank: Option<u32>,
    /// The place of its row there; [`DROPPED`] if there is no room, and [`NONE`] without an expert.
    pub(super) place: u32,
    /// A bit for each rank that gets the token.
    pub(super) targets: u64,
    /// The index of its first result.
    pub(super) result: u32,
}

impl Places<'_> {
    /// Finds the places of this block's tokens, from `first` on, with the counts of all ranks.
    /// Returns how many results the tokens before them have. All threads of the block call this
    /// together.
    pub(super) unsafe fn find(&self, first: u32) -> u32 {
        // SAFETY: all threads of the block are here, and the peers launch the same kernel.
        unsafe {
            self.count(first);
            if thread::block_idx_x() == 0 {
                self.tell_counts();
            }
            self.progress.wait(Step::Counted);
            self.add_others();
            self.find_starts();
            mem::load(self.shared.results)
        }
    }

    /// Gives a batch of tokens, from `first` on, its places; `results` is how many results the
    /// tokens before it have. Returns that number for the next batch. All lanes of the block's
    /// first warp call this together, and barriers separate it from what uses the places.
    pub(super) unsafe fn give(&self, first: u32, batch: u32, results: u32) -> u32 {
        // SAFETY: all lanes of the first warp are here, and `find` has found the starts.
        unsafe {
            self.stage(first, batch);
            self.place(batch, results)
        }
    }

    /// Returns the places of a token of the batch.
    ///
    /// # Safety
    ///
    /// The batch has its places.
    pub(super) unsafe fn of(&self, token: u32) -> Placed {
        let Shared { places, targets, returns, .. } = self.shared;
        // SAFETY: the batch has its places, as the caller guarantees.
        unsafe {
            let (expert, mut place) = (self.expert_of_lane(token), NONE);
            if expert.is_some() {
                place = mem::load(
                    Shared::of_token(places, token).wrapping_add(warp::lane_id() as usize),
                );
            }
            Placed {
                rank: expert.and_then(|expert| self.rank_of(expert as i32)),
                place,
                targets: mem::load(targets.wrapping_add(token as usize)),
                result: mem::load(returns.wrapping_add(token as usize)),
            }
        }
    }

    /// Returns the index of a token of the batch among those that a rank receives.
    ///
    /// # Safety
    ///
    /// The batch has its places, and the rank gets the token.
    pub(super) unsafe fn index(&self, token: u32, rank: u32) -> usize {
        let at = token as usize * RANKS + rank as usize;
        // SAFETY: the batch has its places, and the rank gets the token.
        unsafe { mem::load(self.shared.received.wrapping_add(at)) as usize }
    }

    /// Returns the number of experts of all ranks.
    fn experts(&self) -> u32 {
        self.shape.experts * self.team.n_ranks as u32
    }

    /// Returns the number of counters: those of the experts, and then those of the ranks.
    fn counters(&self) -> u32 {
        self.experts() + self.team.n_ranks as u32
    }

    /// Returns the rank of an expert; `None` if it does not exist or is absent.
    fn rank_of(&self, id: i32) -> Option<u32> {
        // SAFETY: the launch's conditions. (Otherwise divisions would be checked.)
        unsafe { hint::assert_unchecked(self.shape.experts > 0) };
        let rank = id as u32 / self.shape.experts;
        let is_there =
            rank < self.team.n_ranks as u32 && !self.progress.absent.contains(rank as usize);
        is_there.then_some(rank)
    }

    /// Loads some experts of a token, from the `k`-th on; -1 after the last one.
    unsafe fn load_ids(&self, token: u32, k: u32) -> [i32; UNROLL] {
        let (mut ids, mut u) = ([-1; UNROLL], 0);
        while u < UNROLL {
            if k + (u as u32) < self.shape.top_k {
                let at = token * self.shape.top_k + k + u as u32;
                // SAFETY: `ids` has the expert of the token, as the kernel's caller guarantees.
                ids[u] = unsafe { mem::load(self.ids.wrapping_add(at as usize)) };
            }
            u += 1;
        }
        ids
    }

    /// Counts what this rank has, and what of it comes before the token `first`. All threads of the
    /// block call this together.
    unsafe fn count(&self, first: u32) {
        let Shared { totals, next, results, .. } = self.shared;
        // SAFETY: the shared memory has all counters, and accesses between barriers are atomic.
        unsafe {
            for i in Coop::cta().strided(self.counters()) {
                mem::store(totals.wrapping_add(i as usize), 0);
                mem::store(next.wrapping_add(i as usize), 0);
            }
            if thread::thread_idx_x() == 0 {
                mem::store(results, 0);
            }
            thread::sync_threads();
            let mut before = 0;
            for token in Coop::cta().strided(self.tokens) {
                let count = |i: u32| {
                    add_one(totals.wrapping_add(i as usize));
                    if token < first {
                        add_one(next.wrapping_add(i as usize));
                    }
                };
                let (mut targets, mut k) = (0_u64, 0);
                while k < self.shape.top_k {
                    let (ids, mut u) = (self.load_ids(token, k), 0);
                    while u < UNROLL {
                        if let Some(rank) = self.rank_of(ids[u]) {
                            count(ids[u] as u32);
                            targets |= 1 << rank;
                        }
                        u += 1;
                    }
                    k += UNROLL as u32;
                }
                before += if token < first { targets.count_ones() } else { 0 };
                while targets != 0 {
                    count(self.experts() + targets.trailing_zeros());
                    targets &= targets - 1;
                }
            }
            AtomicU32::from_ptr(results).fetch_add(before, Order::Relaxed, Scope::Cta);
            thread::sync_threads();
        }
    }

    /// Returns where a rank's counters are in the memory of a rank.
    #[track_caller]
    fn counts(&self, of: u32, at: i32) -> *mut u32 {
        let counts = self.memory.counts.lsa(at).as_ptr();
        counts.wrapping_add((of * self.counters()) as usize)
    }

    /// Tells all others the counts of this rank. All threads of one block of the grid call this
    /// together.
    unsafe fn tell_counts(&self) {
        for peer in self.team.others() {
            if self.progress.absent.contains(peer as usize) {
                continue;
            }
            let to = self.counts(self.team.rank as u32, peer);
            for i in Coop::cta().strided(self.counters()) {
                // SAFETY: the kernel's caller guarantees the memory. The peer has ended the launch
                // before this one.
                unsafe {
                    let count = mem::load(self.shared.totals.wrapping_add(i as usize));
                    mem::store(to.wrapping_add(i as usize), count);
                }
            }
        }
        thread::sync_threads();
        self.progress.tell(Step::Counted);
    }

    /// Adds the counts of the other ranks; the first block notes where the tokens of each one begin
    /// among those that this rank receives. All threads of the block call this together, and all
    /// have told.
    unsafe fn add_others(&self) {
        let Shared { totals, next, .. } = self.shared;
        let (ranks, me) = (self.team.n_ranks as u32, self.team.rank as u32);
        let of_mine = self.experts() + me;
        let counts = self.counts(0, self.team.rank);
        for i in Coop::cta().strided(self.counters()) {
            // SAFETY: all ranks have told, and each counter is handled by one thread.
            unsafe {
                let (total, before) =
                    (totals.wrapping_add(i as usize), next.wrapping_add(i as usize));
                let own = mem::load(total);
                let (mut sum, mut lower, mut rank) = (0, 0, 0);
                while rank < ranks {
                    let (mut loaded, mut u) = ([0; UNROLL], 0);
                    while u < UNROLL as u32 {
                        let source = rank + u;
                        if source == me {
                            loaded[u as usize] = own;
                        } else if source < ranks && !self.progress.absent.contains(source as usize)
                        {
                            let at = source * self.counters() + i;
                            loaded[u as usize] = mem::load(counts.wrapping_add(at as usize));
                        }
                        u += 1;
                    }
                    let mut u = 0;
                    while u < UNROLL as u32 {
                        let source = rank + u;
                        if i == of_mine && thread::block_idx_x() == 0 && source < ranks {
                            let first = sum.min(self.memory.capacity);
                            mem::store(self.memory.firsts.wrapping_add(source as usize), first);
                        }
                        sum += loaded[u as usize];
                        lower += if source < me { loaded[u as usize] } else { 0 };
                        u += 1;
                    }
                    rank += UNROLL as u32;
                }
                if i == of_mine && thread::block_idx_x() == 0 {
                    let all = self.memory.firsts.wrapping_add(ranks as usize);
                    mem::store(all, sum.min(self.memory.capacity));
                }
                mem::store(total, sum);
                mem::store(before, mem::load(before) + lower);
            }
        }
        thread::sync_threads();
    }

    /// Computes where the rows of each expert begin in its rank. All threads of the block call this
    /// together.
    unsafe fn find_starts(&self) {
        let Shared { totals, next, starts, sums, .. } = self.shared;
        let (experts, of_rank) = (self.experts(), self.shape.experts);
        let each = experts.div_ceil(thread::block_dim_x());
        let first = thread::thread_idx_x() * each;
        let end = (first + each).min(experts);
        // SAFETY: the launch's conditions. (Otherwise divisions would be checked.)
        unsafe { hint::assert_unchecked(of_rank > 0 && self.grouped.alignment > 0) };
        // SAFETY: all threads of the block are here, and barriers separate the steps.
        unsafe {
            let padded = |expert: u32| {
                let rows = mem::load(totals.wrapping_add(expert as usize));
                rows.div_ceil(self.grouped.alignment) * self.grouped.alignment
            };
            let (mut mine, mut i) = (0, first);
            while i < end {
                mine += padded(i);
                i += 1;
            }
            let (mut at, mut i) = (sum_before(mine, sums), first);
            while i < end {
                mem::store(starts.wrapping_add(i as usize), at);
                at += padded(i);
                i += 1;
            }
            if first < end && end == experts {
                mem::store(starts.wrapping_add(end as usize), at);
            }
            thread::sync_threads();
            let start = |expert: u32| {
                let first = mem::load(starts.wrapping_add((expert / of_rank * of_rank) as usize));
                mem::load(starts.wrapping_add(expert as usize)) - first
            };
            for i in Coop::cta().strided(experts) {
                let next = next.wrapping_add(i as usize);
                mem::store(next, mem::load(next) + start(i));
            }
            if thread::block_idx_x() == 0 {
                let own = self.team.rank as u32 * of_rank;
                for i in Coop::cta().strided(of_rank) {
                    let total = mem::load(totals.wrapping_add((own + i) as usize));
                    mem::store(self.grouped.offsets.wrapping_add(i as usize), start(own + i));
                    mem::store(self.grouped.sizes.wrapping_add(i as usize), total);
                }
                if thread::thread_idx_x() == 0 {
                    let rows = self.check_room();
                    mem::store(self.grouped.offsets.wrapping_add(of_rank as usize), rows);
                }
            }
            thread::sync_threads();
        }
    }

    /// Records the ranks for whose rows there is no room. Returns the rows of this one. One thread
    /// of the grid calls this, and the starts are known.
    unsafe fn check_room(&self) -> u32 {
        let (mut own, mut rank) = (0, 0);
        while rank < self.team.n_ranks as u32 {
            let first = self.shared.starts.wrapping_add((rank * self.shape.experts) as usize);
            // SAFETY: the starts are known, and only this thread records rows.
            unsafe {
                let end = mem::load(first.wrapping_add(self.shape.experts as usize));
                let rows = end - mem::load(first);
                if rows > self.memory.capacity {
                    Faults::record_rows_of(self.faults, rows, rank);
                }
                own = if rank == self.team.rank as u32 { rows } else { own };
            }
            rank += 1;
        }
        own
    }

    /// Loads the experts of a batch, whose tokens begin with `first`: each lane those of a token.
    /// All lanes of the block's first warp call this together.
    unsafe fn stage(&self, first: u32, batch: u32) {
        let (lane, Shape { top_k, .. }) = (warp::lane_id(), self.shape);
        let (mut targets, mut k) = (0_u64, 0);
        // SAFETY: the kernel's caller guarantees the memory; there are words for a whole batch.
        unsafe {
            while k < top_k && lane < batch {
                let (ids, mut u) = (self.load_ids(first + lane, k), 0);
                while u < UNROLL && k + (u as u32) < top_k {
                    let (id, at) = (ids[u], k + u as u32);
                    let rank = self.rank_of(id);
                    targets |= rank.map_or(0, |rank| 1 << rank);
                    if id as u32 >= self.experts() && id != -1 {
                        Faults::record_id(self.faults, (first + lane) * top_k + at, id);
                    }
                    let to = Shared::of_token(self.shared.experts, lane).wrapping_add(at as usize);
                    mem::store(to, if rank.is_some() { id as u32 } else { NONE });
                    u += 1;
                }
                k += UNROLL as u32;
            }
            if lane < batch {
                mem::store(self.shared.targets.wrapping_add(lane as usize), targets);
            }
            warp::sync();
        }
    }

    /// Gives the rows of a batch their places, in their order; `results` is how many results the
    /// tokens before it have. Returns that number for the next batch. All lanes of the block's
    /// first warp call this together.
    unsafe fn place(&self, batch: u32, mut results: u32) -> u32 {
        let (lane, Shared { next, targets, .. }) = (warp::lane_id(), self.shared);
        let mut token = 0;
        while token < batch {
            // SAFETY: the batch has been staged, and only the first warp is here, with all lanes.
            unsafe {
                let expert = self.expert_of_lane(token);
                let place = take_next(next, expert);
                if expert.is_some() {
                    let place = if place < self.memory.capacity { place } else { DROPPED };
                    let places = Shared::of_token(self.shared.places, token);
                    mem::store(places.wrapping_add(lane as usize), place);
                }
                let gets = mem::load(targets.wrapping_add(token as usize));
                // Without those that have no room for the token.
                let (mut kept, mut first) = (0, 0);
                while first < self.team.n_ranks as u32 {
                    let rank = first + lane;
                    let (is_one, mut index) = (rank < RANKS as u32 && gets >> rank & 1 == 1, 0);
                    if is_one {
                        let counter = next.wrapping_add((self.experts() + rank) as usize);
                        index = mem::load(counter);
                        mem::store(counter, index + 1);
                        let to = token as usize * RANKS + rank as usize;
                        mem::store(self.shared.received.wrapping_add(to), index);
                    }
                    let has_room = warp::ballot(is_one && index < self.memory.capacity);
                    kept |= u64::from(has_room) << first;
                    first += warp::WARP_SIZE;
                }
                // All have read it.
                warp::sync();
                if lane == 0 {
                    mem::store(targets.wrapping_add(token as usize), kept);
                    mem::store(self.shared.returns.wrapping_add(token as usize), results);
                }
                results += gets.count_ones();
            }
            token += 1;
        }
        results
    }

    /// Returns the expert of a token of a batch that has this lane's number, if there is one.
    ///
    /// # Safety
    ///
    /// The batch has been staged.
    unsafe fn expert_of_lane(&self, token: u32) -> Option<u32> {
        let (lane, of_token) = (warp::lane_id(), Shared::of_token(self.shared.experts, token));
        if lane >= self.shape.top_k {
            return None;
        }
        // SAFETY: the batch has been staged, as the caller guarantees.
        let expert = unsafe { mem::load(of_token.wrapping_add(lane as usize)) };
        (expert != NONE).then_some(expert)
    }
}
