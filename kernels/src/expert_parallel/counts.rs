//! The counts of rows, which all ranks tell each other, and the places where the rows of each
//! expert begin.

use super::places::{Dispatch, Shared};
use super::prelude::*;

impl<T: Rows> Dispatch<'_, T> {
    /// Finds the places of this block's tokens, from `first` on, with the counts of all ranks. The
    /// whole block calls this.
    pub(super) unsafe fn find(&self, first: u32) {
        // SAFETY: the whole block is here, and the peers launch the same kernel.
        unsafe {
            self.count(first);
            if thread::block_idx_x() == 0 {
                self.tell_counts();
            }
            self.progress.wait(Step::Counted);
            self.add_others();
            self.find_starts();
        }
    }

    /// Counts this rank's rows and tokens, and how many of them come before the token `first`. The
    /// whole block calls this.
    unsafe fn count(&self, first: u32) {
        let Shared { counters, .. } = self.shared;
        // SAFETY: the shared memory has all counters, and accesses between barriers are atomic.
        unsafe {
            counters.clear(self.counters());
            thread::sync_threads();
            for token in strided(self.tokens.count) {
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

    /// Tells all other ranks the counts of this rank. One whole block calls this.
    unsafe fn tell_counts(&self) {
        for peer in self.progress.team.others() {
            if self.progress.absent.contains(peer as usize) {
                continue;
            }
            let to = self.counts(self.progress.team.rank as u32, peer);
            for i in strided(self.counters()) {
                // SAFETY: the kernel's caller guarantees the memory. The last launch has waited for
                // the peer's rows, so the peer has read those counts.
                unsafe { to.store(i, self.shared.counters.totals.load(i)) };
            }
        }
        thread::sync_threads();
        self.progress.tell(Step::Counted);
    }

    /// Adds the counts of the other ranks; the first block notes where the tokens of each one begin
    /// among those that this rank receives. The whole block calls this, and all ranks have told
    /// their counts.
    unsafe fn add_others(&self) {
        let Counters { totals, next } = self.shared.counters;
        let (ranks, me) = (self.progress.team.n_ranks as u32, self.progress.team.rank as u32);
        let (counts, firsts) = (self.counts(0, self.progress.team.rank), Words(self.memory.firsts));
        for i in strided(self.counters()) {
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

    /// Computes where the rows of each expert begin in its rank, and records the ranks without room
    /// for their rows. The whole block calls this.
    unsafe fn find_starts(&self) {
        let Shared { counters: Counters { totals, next }, starts, .. } = self.shared;
        let (of_rank, alignment) = (self.shape.experts, self.grouped.alignment);
        let (offsets, sizes) = (Words(self.grouped.offsets), Words(self.grouped.sizes));
        // SAFETY: the whole block is here, and barriers separate the steps. The launch requires
        // both numbers to be above 0.
        unsafe {
            assert_unchecked(of_rank > 0 && alignment > 0); // Divisions would be checked.
            let experts = self.experts();
            let counters = self.shared.counters;
            counters.each_start(experts, alignment, |expert, at| starts.store(expert, at));
            thread::sync_threads();
            let start = |expert| starts.load(expert) - starts.load(expert / of_rank * of_rank);
            for i in strided(experts) {
                next.store(i, next.load(i) + start(i));
            }
            if thread::block_idx_x() == 0 {
                let own = self.progress.team.rank as u32 * of_rank;
                for i in strided(of_rank) {
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
}
