//! Stacks of the simulated threads: one mapping per warp, reused by later blocks.
//!
//! # Safety
//!
//! Stack `i` is the `i`th slice of the mapping; slices do not overlap. If the operating system
//! supports `MADV_GUARD_INSTALL` (Linux 6.13), the lowest page of every slice is a guard page.
//! Otherwise the first [`MAX_PROTECTED`] stacks of the process have a guard page by `mprotect`,
//! which costs two entries of the process's limited memory map. The others have a canary word,
//! which is checked when the thread ends.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use corosensei::stack::{Stack, StackPointer};
use parking_lot::Mutex;

use crate::base::mapping::{Mapping, page_size};

/// Maximum stacks of the process with a guard page by `mprotect`.
const MAX_PROTECTED: usize = 16 << 10;
static PROTECTED: AtomicUsize = AtomicUsize::new(0);

/// `MADV_GUARD_INSTALL`: a guard page without an entry in the memory map.
const MADV_GUARD_INSTALL: i32 = 102;

/// The lowest word of a stack without a guard page.
const CANARY: u64 = 0x5bd1_e995_c2b2_ae35;

/// Slabs of machines that have ended, for later ones: to map stacks and to touch their pages anew
/// takes longer than a short kernel.
static IDLE: Mutex<Vec<Slab>> = Mutex::new(Vec::new());
/// Maximum number of idle slabs.
const MAX_IDLE: usize = 64;

/// Stacks of equal size in one mapping.
pub(crate) struct Slab {
    mapping: Mapping,
    stacks: usize,
    /// Bytes of a stack, including its guard page.
    size: usize,
    /// Number of stacks with a guard page by `mprotect`.
    protected: usize,
    /// Stacks from this one on have a canary instead of a guard page.
    first_canary: usize,
}

impl Slab {
    /// Returns `stacks` stacks of at least `size` usable bytes.
    pub(crate) fn new(stacks: usize, size: usize) -> io::Result<Self> {
        let mut idle = IDLE.lock();
        let bytes = size.next_multiple_of(page_size()) + page_size();
        match idle.iter().position(|slab| slab.stacks == stacks && slab.size == bytes) {
            Some(index) => Ok(idle.swap_remove(index)),
            None => Self::guarded(stacks, size, true, MAX_PROTECTED),
        }
    }

    /// Keeps a slab whose stacks are not in use for a later machine.
    pub(crate) fn keep(self) {
        let mut idle = IDLE.lock();
        if idle.len() < MAX_IDLE && !(0..self.stacks).any(|i| self.overflowed(i)) {
            idle.push(self);
        }
    }

    /// Does the same as [`new`](Self::new), with `MADV_GUARD_INSTALL` if `hints`, or else at most
    /// `max_protected` protected pages in the process.
    fn guarded(stacks: usize, size: usize, hints: bool, max_protected: usize) -> io::Result<Self> {
        let page = page_size();
        let size = size.next_multiple_of(page) + page;
        let len = stacks.checked_mul(size).ok_or(io::ErrorKind::OutOfMemory)?;
        let mapping = Mapping::reserve(len)?;
        mapping.open(0, len)?;
        // With huge pages, the first access to a stack would commit 2 MiB.
        mapping.advise(0, len, libc::MADV_NOHUGEPAGE);
        let mut slab = Self { mapping, stacks, size, protected: 0, first_canary: stacks };
        let install = |i: usize| slab.mapping.advise(i * size, page, MADV_GUARD_INSTALL);
        if !(hints && (0..stacks).all(install)) {
            slab.protect(page, max_protected)?;
        }
        Ok(slab)
    }

    /// Protects the lowest page of stacks, within the limit; gives the other stacks a canary.
    fn protect(&mut self, page: usize, max_protected: usize) -> io::Result<()> {
        // The counter is all that threads share here, so `Relaxed` suffices.
        let taken = PROTECTED.fetch_add(self.stacks, Ordering::Relaxed);
        let allowed = max_protected.saturating_sub(taken).min(self.stacks);
        PROTECTED.fetch_sub(self.stacks - allowed, Ordering::Relaxed);
        self.protected = allowed;
        self.first_canary = allowed;
        for i in 0..allowed {
            self.mapping.close(i * self.size, page)?;
        }
        for i in allowed..self.stacks {
            // SAFETY: the pointer is to the lowest word of a stack that no coroutine runs on.
            unsafe { self.canary(i).write(CANARY) };
        }
        Ok(())
    }

    fn canary(&self, i: usize) -> *mut u64 {
        self.mapping.base().wrapping_add(i * self.size).cast()
    }

    /// Returns whether stack `i` overflowed, as far as can be detected.
    pub(crate) fn overflowed(&self, i: usize) -> bool {
        // SAFETY: the pointer is to the lowest word of a stack without a guard page. The read is
        // volatile, since a coroutine may have written the word.
        i >= self.first_canary && unsafe { self.canary(i).read_volatile() } != CANARY
    }

    /// Returns whether `address` lies in the guard page of stack `i`.
    pub(crate) fn in_guard(&self, i: usize, address: usize) -> bool {
        let low = self.canary(i).addr();
        (low..low + page_size()).contains(&address)
    }

    /// Returns the lowest address and the end of stack `i`, without its guard page.
    pub(crate) fn bounds(&self, i: usize) -> (usize, usize) {
        let low = self.canary(i).addr();
        (low + page_size(), low + self.size)
    }

    /// Returns stack `i` for a coroutine.
    ///
    /// # Safety
    ///
    /// `i` is below the number of stacks, the slab outlives the coroutine, and no other coroutine
    /// uses the stack.
    pub(crate) unsafe fn stack(&self, i: usize) -> SlabStack {
        debug_assert!(i < self.stacks);
        let low = self.canary(i).addr();
        SlabStack { base: low + self.size, limit: low }
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        PROTECTED.fetch_sub(self.protected, Ordering::Relaxed);
    }
}

/// One stack of a [`Slab`].
pub(crate) struct SlabStack {
    base: usize,
    limit: usize,
}

/// Returns a stack address, which is not zero, since it lies in a mapping.
fn pointer(address: usize) -> StackPointer {
    StackPointer::new(address).unwrap_or(StackPointer::MIN)
}

// SAFETY: `limit..base` are whole pages of a live mapping (Slab::stack's contract), readable and
// writable except for the guard page at the low end, above which there are at least four pages.
unsafe impl Stack for SlabStack {
    #[inline]
    fn base(&self) -> StackPointer {
        pointer(self.base)
    }

    #[inline]
    fn limit(&self) -> StackPointer {
        pointer(self.limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_guard_hints_some_stacks_are_protected_and_the_rest_have_canaries() {
        let page = page_size();
        let taken = PROTECTED.load(Ordering::Relaxed);
        let slab = Slab::guarded(4, 4 * page, false, taken + 2).unwrap();
        assert_eq!((slab.protected, slab.first_canary), (2, 2));
        assert!((0..4).all(|i| !slab.overflowed(i)));
        // SAFETY: the pointer is to the lowest word of a stack that no coroutine runs on.
        unsafe { slab.canary(3).write(0) };
        assert!(slab.overflowed(3) && !slab.overflowed(2));
        drop(slab);
        assert_eq!(PROTECTED.load(Ordering::Relaxed), taken);
    }

    #[test]
    fn stacks_do_not_overlap_and_hold_what_was_asked_for() {
        let slab = Slab::new(3, 20_000).unwrap();
        for i in 0..3 {
            let (low, high) = slab.bounds(i);
            assert!(high - low >= 20_000);
            assert!(slab.in_guard(i, low - 1) && !slab.in_guard(i, low));
            assert!(i == 0 || slab.bounds(i - 1).1 < low);
        }
    }
}
