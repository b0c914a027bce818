//! The places of tokens in the order of the experts of all ranks, given how many rows there are
//! (`counts.rs`).

use super::prelude::*;

/// The tokens that a block handles at a time: one for each lane of a warp.
pub(super) const BATCH: u32 = warp::WARP_SIZE;

/// The most counters: one for each expert of all ranks (the launch requires that all ranks together
/// have at most [`Shape::EXPERTS`]), and one for each rank.
const COUNTERS: usize = Shape::EXPERTS + RANKS;

/// The block's shared memory.
#[derive(Clone, Copy)]
pub(super) struct Shared {
    /// Counters of the rows of each expert of all ranks, and then of the tokens for each rank.
    pub(super) counters: Counters,
    /// The first row of each expert, as if the rows that all ranks receive were in one array, those
    /// of a rank after those of the previous one; and then the end of that array.
    pub(super) starts: Words,
    /// The experts of each token of a batch, or [`NONE`], and the places of its rows.
    experts: Words,
    places: Words,
    /// The index of each token among those that each of [`RANKS`] ranks receives.
    pub(super) received: Words,
    /// A bit for each rank that gets the token.
    targets: *mut u64,
}

impl Shared {
    pub(super) fn new() -> Self {
        const ENTRIES: usize = BATCH as usize * Shape::TOP_K;
        Self {
            counters: Counters {
                totals: Words(shared_array![u32; COUNTERS]),
                next: Words(shared_array![u32; COUNTERS]),
            },
            starts: Words(shared_array![u32; Shape::EXPERTS + 1]),
            experts: Words(shared_array![u32; ENTRIES]),
            places: Words(shared_array![u32; ENTRIES]),
            received: Words(shared_array![u32; BATCH as usize * RANKS]),
            targets: shared_array![u64; BATCH as usize],
        }
    }
}

/// A launch's arguments.
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

/// The places of a token of a batch.
#[derive(Clone, Copy)]
pub(super) struct TokenPlaces {
    /// The rank of this lane's expert, if there is one.
    pub(super) rank: Option<u32>,
    /// The place of its row there; [`DROPPED`] if there is no room, and [`NONE`] without an expert.
    pub(super) place: u32,
    /// A bit for each rank that gets the token.
    pub(super) targets: u64,
}

impl<T: Rows> Dispatch<'_, T> {
    /// Returns the places of a token of the batch. The caller guarantees that
    /// [`place`](Self::place) has given them to the token, and that a barrier has followed.
    pub(super) unsafe fn placed(&self, token: u32) -> TokenPlaces {
        let (entry, Shared { places, targets, .. }) = (Self::entry(token), self.shared);
        // SAFETY: `place` has stored the token's places, as the caller guarantees.
        unsafe {
            let expert = self.expert(token);
            TokenPlaces {
                rank: expert.and_then(|expert| self.rank_of(expert as i32)),
                place: if expert.is_some() { places.load(entry) } else { NONE },
                targets: mem::load(targets.wrapping_add(token as usize)),
            }
        }
    }

    /// Returns where this lane's expert of a token of a batch is in `experts` and `places`.
    fn entry(token: u32) -> u32 {
        token * Shape::TOP_K as u32 + warp::lane_id()
    }

    /// Returns the number of experts of all ranks.
    pub(super) fn experts(&self) -> u32 {
        self.shape.experts * self.progress.team.n_ranks as u32
    }

    /// Returns the number of counters: those of the experts, and then those of the ranks.
    pub(super) fn counters(&self) -> u32 {
        self.experts() + self.progress.team.n_ranks as u32
    }

    /// Returns the rank of an expert; `None` if it does not exist or is absent.
    pub(super) fn rank_of(&self, id: i32) -> Option<u32> {
        // SAFETY: the launch requires experts. (Otherwise divisions would be checked.)
        unsafe { assert_unchecked(self.shape.experts > 0) };
        let rank = id as u32 / self.shape.experts;
        let is_there = rank < self.progress.team.n_ranks as u32
            && !self.progress.absent.contains(rank as usize);
        is_there.then_some(rank)
    }

    /// Calls `each` with the numbers of a token's experts and their ids; -1 after the last one.
    pub(super) unsafe fn each_id(&self, token: u32, mut each: impl FnMut(u32, i32)) {
        for first in Strided::new(0, self.shape.top_k, UNROLL) {
            let ids = UNROLLED.map(|u| {
                let at =
                    self.tokens.ids.wrapping_add((token * self.shape.top_k + first + u) as usize);
                // SAFETY: the token has the expert, as the kernel's caller guarantees.
                if first + u < self.shape.top_k { unsafe { mem::load(at) } } else { -1 }
            });
            for u in 0..UNROLL {
                each(first + u, ids[u as usize]);
            }
        }
    }

    /// Loads the experts of a batch, whose tokens begin with `first`: each lane those of a token.
    /// The block's first warp calls this.
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

    /// Gives the rows of a token of a batch their places. The block's first warp calls this, for
    /// the tokens in their order, after `find` has found the starts. Barriers separate it from the
    /// use of the places.
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
        if warp::lane_id() >= self.shape.top_k {
            return None;
        }
        // SAFETY: the batch has been staged, as the caller guarantees.
        let expert = unsafe { self.shared.experts.load(Self::entry(token)) };
        (expert != NONE).then_some(expert)
    }
}
