//! The counts of rows, which all ranks tell each other, and with them the places of tokens in the
//! order of the experts of all ranks.

use super::prelude::*;

/// The tokens that a block handles at a time: one for each lane of a warp.
pub(super) const BATCH: u32 = warp::WARP_SIZE;

/// The most counters: one for each expert of all ranks (the launch requires that all ranks together
/// have at most [`Shape::EXPERTS`]), and one for each rank.
const COUNTERS: usize = Shape::EXPERTS + RANKS;

/// A launch's arguments. The whole block calls the methods, or its first warp those for a batch.
pub(super) struct Dispatch<'a, T> {
    pub(super) progress: &'a Progress<'a>,
    pub(super) memory: Counted,
    pub(super) rows: Window<T>,
    pub(super) scales: Window<f32>,
    pub(super) shape: Shape,
    pub(super) tokens: Tokens,
    pub(super) grouped: Grouped,
    pub(super) faults: *mut u32,
    pub(super) shared: Shared,
}

/// The words of a block in shared memory.
#[derive(Clone, Copy)]
pub(super) struct Shared {
    /// Counters of the rows of each expert of all ranks, and then of the tokens for each rank.
    counters: Counters,
    /// The first row of each expert, as if the rows that all ranks receive were in one array, those
    /// of a rank after those of the previous one; and then the end of that array.
    starts: Words,
    /// The experts of each token of a batch, or [`NONE`], and the places of its rows.
    experts: Words,
    places: Words,
    /// The index of each token among those that each of [`RANKS`] ranks receives.
    pub(super) received: Words,
    /// A bit for each rank that gets the token.
    pub(super) targets: *mut u64,
}

impl Shared {
    pub(super) fn new() -> Self {
        const ENTRIES: usize = BATCH as usize * Shape::TOP_K;
        let [totals, next] =
            [shared_array![u32; COUNTERS], shared_array![u32; COUNTERS]].map(Words);
        Self {
            counters: Counters { totals, next },
            starts: Words(shared_array![u32; Shape::EXPERTS + 1]),
            experts: Words(shared_array![u32; ENTRIES]),
            places: Words(shared_array![u32; ENTRIES]),
            received: Words(shared_array![u32; BATCH as usize * RANKS]),
            targets: shared_array![u64; BATCH as usize],
        }
    }
}

impl<T: Rows> Dispatch<'_, T> {
    /// Returns the rank of this lane's expert of a token of a batch, and its row's place there:
    /// [`DROPPED`] if there is no room, and [`NONE`] without an expert. The batch has its places.
    pub(super) unsafe fn placed(&self, token: u32) -> (Option<u32>, u32) {
        // SAFETY: the batch has its places, as the caller guarantees.
        unsafe {
            let expert = self.expert(token);
            let place = || self.shared.places.load(Self::entry(token));
            let rank = expert.and_then(|expert| self.rank_of(expert as i32));
            (rank, if expert.is_some() { place() } else { NONE })
        }
    }

    /// Returns where this lane's expert of a token of a batch is in `experts` and `places`.
    fn entry(token: u32) -> u32 {
        token * Shape::TOP_K as u32 + warp::lane_id()
    }

    /// Returns the number of experts of all ranks.
    fn experts(&self) -> u32 {
        self.shape.experts * self.progress.team.n_ranks as u32
    }

    /// Returns the number of counters: those of the experts, and then those of the ranks.
    fn counters(&self) -> u32 {
        self.experts() + self.progress.team.n_ranks as u32
    }

    /// Returns the rank of an expert; `None` if it does not exist or is absent.
    fn rank_of(&self, id: i32) -> Option<u32> {
        // SAFETY: the launch requires experts. (Otherwise divisions would be checked.)
        unsafe { assert_unchecked(self.shape.experts > 0) };
        let rank = id as u32 / self.shape.experts;
        let is_there = rank < self.progress.team.n_ranks as u32
            && !self.progress.absent.contains(rank as usize);
        is_there.then_some(rank)
    }

    /// Calls `each` with the numbers of a token's experts and their ids; -1 after the last one.
    unsafe fn each_id(&self, token: u32, mut each: impl FnMut(u32, i32)) {
        let (all, top_k) = (self.tokens.ids, self.shape.top_k);
        for first in Strided::new(0, top_k, UNROLL) {
            let ids = UNROLLED.map(|u| {
                let at = all.wrapping_add((token * top_k + first + u) as usize);
                // SAFETY: the token has the expert, as the kernel's caller guarantees.
                if first + u < top_k { unsafe { mem::load(at) } } else { -1 }
            });
            for u in 0..UNROLL {
                each(first + u, ids[u as usize]);
            }
        }
    }

    /// Counts this rank's rows and tokens, and how many of them come before the token `first`.
    pub(super) unsafe fn count(&self, first: u32) {
        let Shared { counters, .. } = self.shared;
        // SAFETY: the shared memory has all counters, and accesses between barriers are atomic.
        unsafe {
            counters.clear(self.counters());
            thread::sync_threads();
            for token in Coop::cta().strided(self.tokens.count) {
                let mut targets = 0_u64;
                self.each_id(token, |_, id| {
                    if let Some(rank) = self.rank_of(id) {
                        counters.count(id as u32, token < first);
                        targets |= 1 << rank;
                    }
                });
                while targets != 0 {
                    counters.count(self.experts() + targets.trailing_zeros(), token < first);
                    targets &= targets - 1;
                }
            }
            thread::sync_threads();
        }
    }

    /// Returns the counters of the rank `of` in the memory of the rank `at`.
    #[track_caller]
    fn counts(&self, of: u32, at: i32) -> Words {
        let counts = self.memory.counts.lsa(at).as_ptr();
        Words(counts.wrapping_add((of * self.counters()) as usize))
    }

    /// Tells all other ranks the counts of this rank, and waits for theirs: then all have begun
    /// this launch, and their memory may be written.
    pub(super) unsafe fn exchange_counts(&self) {
        if thread::block_idx_x() == 0 {
            for peer in self.progress.team.others() {
                if self.progress.absent.contains(peer as usize) {
                    continue;
                }
                let to = self.counts(self.progress.team.rank as u32, peer);
                for i in Coop::cta().strided(self.counters()) {
                    // SAFETY: the kernel's caller guarantees the memory. The last launch has waited
                    // for the peer's rows, so the peer has read those counts.
                    unsafe { to.store(i, self.shared.counters.totals.load(i)) };
                }
            }
            thread::sync_threads();
            self.progress.tell(Step::Counted);
        }
        self.progress.wait(Step::Counted);
    }

    /// Adds the counts of the other ranks, which have told them; the first block notes where the
    /// tokens of each one begin among those that this rank receives.
    pub(super) unsafe fn add_others(&self) {
        let Counters { totals, next } = self.shared.counters;
        let (ranks, me) = (self.progress.team.n_ranks as u32, self.progress.team.rank as u32);
        let (counts, firsts) = (self.counts(0, self.progress.team.rank), Words(self.memory.firsts));
        for i in Coop::cta().strided(self.counters()) {
            let is_noted = i == self.experts() + me && thread::block_idx_x() == 0;
            // SAFETY: all ranks have told, and each counter is handled by one thread.
            unsafe {
                let (own, mut sum, mut lower) = (totals.load(i), 0, 0);
                for first in Strided::new(0, ranks + 1, UNROLL) {
                    let loaded = UNROLLED.map(|u| match first + u {
                        source if source == me => own,
                        source if source >= ranks => 0,
                        source if self.progress.absent.contains(source as usize) => 0,
                        source => counts.load(source * self.counters() + i),
                    });
                    for u in 0..UNROLL {
                        let (source, count) = (first + u, loaded[u as usize]);
                        if is_noted && source <= ranks {
                            firsts.store(source, sum.min(self.memory.capacity));
                        }
                        sum += count;
                        lower += if source < me { count } else { 0 };
                    }
                }
                totals.store(i, sum);
                next.store(i, next.load(i) + lower);
            }
        }
        thread::sync_threads();
    }

    /// Computes where the rows of each expert begin in its rank, and records a lack of room.
    pub(super) unsafe fn find_starts(&self) {
        let Shared { counters, starts, .. } = self.shared;
        let Counters { totals, next } = counters;
        let (of_rank, alignment) = (self.shape.experts, self.grouped.alignment);
        let (offsets, sizes) = (Words(self.grouped.offsets), Words(self.grouped.sizes));
        // SAFETY: the whole block is here, and barriers separate the steps.
        unsafe {
            // The launch requires this. (Otherwise divisions would be checked.)
            assert_unchecked(of_rank > 0 && alignment > 0);
            let experts = self.experts();
            counters.each_start(experts, alignment, |expert, at| starts.store(expert, at));
            thread::sync_threads();
            let start = |expert| starts.load(expert) - starts.load(expert / of_rank * of_rank);
            for i in Coop::cta().strided(experts) {
                next.store(i, next.load(i) + start(i));
            }
            if thread::block_idx_x() == 0 {
                let own = self.progress.team.rank as u32 * of_rank;
                for i in Coop::cta().strided(of_rank) {
                    offsets.store(i, start(own + i));
                    sizes.store(i, totals.load(own + i));
                }
            }
            if thread::first() {
                for rank in 0..self.progress.team.n_ranks as u32 {
                    let [first, end] = [rank, rank + 1].map(|rank| starts.load(rank * of_rank));
                    if rank == self.progress.team.rank as u32 {
                        offsets.store(of_rank, end - first);
                    }
                    if end - first > self.memory.capacity {
                        Faults::record_rows(self.faults, end - first, Some(rank));
                    }
                }
            }
            thread::sync_threads();
        }
    }

    /// Loads the experts of a batch, whose tokens begin with `first`: each lane those of a token.
    pub(super) unsafe fn stage(&self, first: u32, batch: u32) {
        let (lane, mut targets) = (warp::lane_id(), 0_u64);
        // SAFETY: the kernel's caller guarantees the memory; there are words for a whole batch.
        unsafe {
            if lane < batch {
                self.each_id(first + lane, |k, id| {
                    let rank = self.rank_of(id);
                    targets |= rank.map_or(0, |rank| 1 << rank);
                    if id as u32 >= self.experts() && id != -1 {
                        Faults::record_id(self.faults, (first + lane) * self.shape.top_k + k, id);
                    }
                    let expert = if rank.is_some() { id as u32 } else { NONE };
                    self.shared.experts.store(lane * Shape::TOP_K as u32 + k, expert);
                });
                mem::store(self.shared.targets.wrapping_add(lane as usize), targets);
            }
            warp::sync();
        }
    }

    /// Gives the rows of a token of a batch their places, after [`find_starts`](Self::find_starts),
    /// for the tokens in their order. Barriers separate it from the use of the places.
    pub(super) unsafe fn place(&self, token: u32) {
        let (lane, Shared { counters, received, .. }) = (warp::lane_id(), self.shared);
        let targets = self.shared.targets.wrapping_add(token as usize);
        // SAFETY: the batch has been staged, and only the first warp is here, with all lanes.
        unsafe {
            let expert = self.expert(token);
            let place = counters.take_next(expert);
            if expert.is_some() {
                let place = if place < self.memory.capacity { place } else { DROPPED };
                self.shared.places.store(Self::entry(token), place);
            }
            let (wanted, mut kept) = (mem::load(targets), 0);
            // Ranks that have no room for the token are not in `kept`.
            for first in Strided::new(0, self.progress.team.n_ranks as u32, warp::WARP_SIZE) {
                let rank = first + lane;
                let (is_target, mut index) = (rank < RANKS as u32 && wanted >> rank & 1 == 1, 0);
                if is_target {
                    let counter = self.experts() + rank;
                    index = counters.next.load(counter);
                    counters.next.store(counter, index + 1);
                    received.store(token * RANKS as u32 + rank, index);
                }
                let has_room = warp::ballot(is_target && index < self.memory.capacity);
                kept |= u64::from(has_room) << first;
            }
            // After this, all lanes have read the targets.
            warp::sync();
            if lane == 0 {
                mem::store(targets, kept);
            }
        }
    }

    /// Returns this lane's expert of a token of a batch, which was staged, if there is one.
    unsafe fn expert(&self, token: u32) -> Option<u32> {
        let is_there = warp::lane_id() < self.shape.top_k;
        // SAFETY: the batch has been staged, as the caller guarantees.
        let expert = is_there.then(|| unsafe { self.shared.experts.load(Self::entry(token)) });
        expert.filter(|expert| *expert != NONE)
    }
}
