//! Counters of the rows of experts, and the words that say which rows a token has.

use super::prelude::*;

/// Experts that a thread loads together, so that several loads are in flight.
pub(super) const UNROLL: u32 = 8;
/// The numbers below [`UNROLL`].
pub(super) const UNROLLED: [u32; UNROLL as usize] = [0, 1, 2, 3, 4, 5, 6, 7];

/// Words of shared memory or of this GPU. Callers of the unsafe methods guarantee that the word is
/// allocated, and that accesses by other threads are atomic or on the other side of a barrier.
#[derive(Clone, Copy)]
pub(super) struct Words(pub(super) *mut u32);

#[track_callers]
impl Words {
    pub(super) unsafe fn load(self, at: u32) -> u32 {
        // SAFETY: the word is allocated, as the caller guarantees.
        unsafe { mem::load(self.0.wrapping_add(at as usize)) }
    }

    pub(super) unsafe fn store(self, at: u32, word: u32) {
        // SAFETY: the word is allocated, as the caller guarantees.
        unsafe { mem::store(self.0.wrapping_add(at as usize), word) }
    }

    /// Adds 1 to a word of shared memory, atomically.
    pub(super) unsafe fn add_one(self, at: u32) {
        // SAFETY: the word is allocated, as the caller guarantees.
        let word = unsafe { AtomicU32::from_ptr(self.0.wrapping_add(at as usize)) };
        word.fetch_add(1, Order::Relaxed, Scope::Cta);
    }
}

/// Counters in shared memory: of the rows of each expert, and maybe more.
#[derive(Clone, Copy)]
pub(super) struct Counters {
    /// The total of each counter.
    pub(super) totals: Words,
    /// The part of each counter before this block's tokens, and later the place of its next row.
    pub(super) next: Words,
}

impl Counters {
    /// Makes `len` counters 0. The whole block calls this, before a barrier.
    #[track_caller]
    pub(super) unsafe fn clear(self, len: u32) {
        for i in Coop::cta().strided(len) {
            // SAFETY: there are `len` counters, each for one thread.
            unsafe {
                self.totals.store(i, 0);
                self.next.store(i, 0);
            }
        }
    }

    /// Counts a row of a token; `is_before` says whether the token is before this block's tokens.
    #[track_caller]
    pub(super) unsafe fn count(self, i: u32, is_before: bool) {
        // SAFETY: the counter exists, as the caller guarantees, and accesses are atomic.
        unsafe {
            self.totals.add_one(i);
            if is_before {
                self.next.add_one(i);
            }
        }
    }

    /// Calls `each` with the place of the first row of each of `experts` experts, which begin at
    /// multiples of `alignment`, and then with `experts` and the end of all rows. The whole block
    /// calls this, after a barrier; `each` is called by one thread for an expert.
    #[track_caller]
    pub(super) unsafe fn each_start(self, experts: u32, alignment: u32, each: impl Fn(u32, u32)) {
        let per_thread = experts.div_ceil(thread::block_dim_x());
        let first = thread::thread_idx_x() * per_thread;
        let end = (first + per_thread).min(experts);
        // SAFETY: the whole block is here, and each expert has a counter.
        unsafe {
            let rows = |expert| self.totals.load(expert).div_ceil(alignment) * alignment;
            let mut mine = 0;
            for expert in first..end {
                mine += rows(expert);
            }
            let mut at = sum_before(mine);
            for expert in first..end {
                each(expert, at);
                at += rows(expert);
            }
            if first < end && end == experts {
                each(experts, at);
            }
        }
    }

    /// Returns the place of a token's row among those of an expert, and counts the token's rows; it
    /// may have the expert several times. Lane `k` has the `k`-th expert; a lane without one gets
    /// any number. A whole warp calls this, and no other warp uses `next`.
    pub(super) unsafe fn take_next(self, expert: Option<u32>) -> u32 {
        // SAFETY: the whole warp is here, and no other warp uses `next`, as the caller guarantees.
        unsafe {
            let same = warp::match_any(expert.unwrap_or(NONE));
            let before = same & ((1 << warp::lane_id()) - 1);
            let first = expert.map_or(0, |expert| self.next.load(expert));
            warp::sync();
            if let (Some(expert), 0) = (expert, before) {
                self.next.store(expert, first + same.count_ones());
            }
            warp::sync();
            first + before.count_ones()
        }
    }
}

/// Returns the sum of `mine` over the threads before this one. The whole block calls this, once
/// between two barriers.
#[track_caller]
unsafe fn sum_before(mine: u32) -> u32 {
    let sums = Words(shared_array![u32; 16]); // A block has up to 16 warps.
    // SAFETY: the whole block is here, and `sums` has a word for each warp.
    unsafe {
        let sum = warp_prefix_sum(mine);
        if warp::lane_id() == warp::WARP_SIZE - 1 {
            sums.store(warp::warp_id(), sum);
        }
        thread::sync_threads();
        let mut before = sum - mine;
        for warp in 0..warp::warp_id() {
            before += sums.load(warp);
        }
        before
    }
}

/// Stores the positions and weights of a token's rows: those of the lanes with `is_here`, in their
/// order, and then [`NONE`], in the token's words `returns`. A whole warp calls this.
#[track_caller]
pub(super) unsafe fn store_returns(returns: Words, is_here: bool, position: u32, weight: u32) {
    let lane = warp::lane_id();
    // SAFETY: the whole warp is here, and `returns` has the token's words.
    unsafe {
        let here = warp::ballot(is_here);
        let at = (here & ((1 << lane) - 1)).count_ones();
        if is_here {
            returns.store(2 * at, position);
            returns.store(2 * at + 1, weight);
        }
        if lane >= here.count_ones() && lane < Shape::TOP_K as u32 {
            returns.store(2 * lane, NONE);
            returns.store(2 * lane + 1, 0);
        }
    }
}
