//! `mbarrier`: barriers in shared memory with separate arrive and wait, at which asynchronous
//! copies arrive too.
//!
//! A barrier goes through phases. A phase ends when the number of threads it was made for have
//! arrived and all bytes that were announced have landed; the next begins at once. A wait names
//! the phase by its parity: 0 for the first, 1 for the second, 0 for the third. To wait for parity
//! 1 on a fresh barrier returns at once, as if a phase had ended before the first.
//!
//! # Safety model
//!
//! [`MBarrier::init`] is `unsafe`: it claims eight bytes of shared memory. What follows is safe;
//! threads that wait for a phase that never ends hang the kernel. Needs sm_90.
//!
//! # Example
//!
//! ```
//! use cuda_std::mbarrier::{self, MBarrier};
//! use cuda_std::prelude::*;
//! /// One thread lets all continue.
//! fn gate() {
//!     // SAFETY: the word is the barrier's alone, and made by one thread before the block's
//!     // barrier.
//!     let gate = unsafe { MBarrier::at(shared_array![u64; 1]) };
//!     if thread::thread_idx_x() == 0 {
//!         unsafe { gate.init(1) };
//!         mbarrier::fence_init();
//!     }
//!     thread::sync_threads();
//!     if thread::thread_idx_x() == 0 {
//!         gate.arrive();
//!     }
//!     gate.wait(0);
//! }
//! ```

use crate::arch;

/// A barrier in shared memory.
#[doc(alias = "mbarrier")]
#[derive(Clone, Copy)]
pub struct MBarrier(*mut u64);

impl MBarrier {
    /// The barrier at this address.
    ///
    /// # Safety
    ///
    /// `word` lies in shared memory, aligned to 8 bytes, and is a barrier's alone from
    /// [`init`](Self::init) on, which comes before anything else.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const unsafe fn at(word: *mut u64) -> Self {
        Self(word)
    }

    /// Its address.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(crate) const fn as_ptr(self) -> *mut u64 {
        self.0
    }

    /// Makes the barrier, for `arrivals` (1 to 2^20 - 1) a phase. [`fence_init`] and a barrier of
    /// the block follow. PTX: `mbarrier.init`.
    ///
    /// # Safety
    ///
    /// One thread calls it, and none uses the barrier yet.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub unsafe fn init(self, arrivals: u32) {
        arch::mbarrier_init(self.0, arrivals);
    }

    /// Arrives. What this thread did before is visible to those that wait for the phase. PTX:
    /// `mbarrier.arrive` (release, of the block).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn arrive(self) {
        arch::mbarrier_arrive(self.0);
    }

    /// Arrives, and announces `bytes` (below 2^20) that copies of this phase bring. PTX:
    /// `mbarrier.arrive.expect_tx`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn arrive_expect_tx(self, bytes: u32) {
        arch::mbarrier_arrive_expect_tx(self.0, bytes);
    }

    /// Whether the phase of this parity (0 or 1) has ended; it may wait a little. PTX:
    /// `mbarrier.try_wait.parity` (acquire, of the block).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn try_wait(self, parity: u32) -> bool {
        arch::mbarrier_try_wait(self.0, parity)
    }

    /// Waits until the phase of this parity (0 or 1) has ended.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn wait(self, parity: u32) {
        while !self.try_wait(parity) {}
    }
}

/// Makes fresh barriers visible to TMA. PTX: `fence.mbarrier_init`, `fence.proxy.async`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn fence_init() {
    arch::mbarrier_fence_init();
}
