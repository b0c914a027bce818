//! A cache of the accesses that a thread has found to be ordered before its own.
//!
//! A tile has thousands of words, all written by the same copy. A thread's clock only grows, so
//! what the thread has found for one word holds for the others too, and for later accesses.

use std::cell::Cell;

use cuda_std::arch::Space;

use super::shadow::Stamp;

/// The number of pairs that are kept.
const KEPT: usize = 8;

/// Recent pairs of accesses of which the first is ordered before the second.
#[derive(Default)]
pub(super) struct Memo([Cell<Pair>; KEPT]);

/// The agents of both accesses, and all else that the answer depends on. Zeros are no pair.
type Pair = (u64, u64, u64);

impl Memo {
    /// Returns whether the first access is ordered before the second: by the cache or by `check`.
    #[inline]
    pub(super) fn check(
        &self,
        (before, now, space): (Stamp, Stamp, Space),
        check: impl FnOnce() -> bool,
    ) -> bool {
        // `time` has the time and, in its lowest 4 bits, the kind of the first access. The kind of
        // the second one, whose time does not matter, and the space go above these bits.
        let [(a, time), (b, kind)] = [before.order_key(), now.order_key()];
        let kind = (kind & 0xf) << 4 | (space as u64) << 8;
        let pair = (a, b, time | kind);
        let hash = (a ^ time >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61;
        let entry = &self.0[hash as usize % KEPT];
        if entry.get() == pair {
            return true;
        }
        let is_ordered = check();
        if is_ordered {
            entry.set(pair);
        }
        is_ordered
    }
}
