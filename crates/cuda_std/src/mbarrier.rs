//! `mbarrier`: barriers in shared memory with separate arrive and wait, which also track
//! asynchronous copies.
//!
//! A barrier has a sequence of phases. A phase completes when the number of arrivals of
//! [`MBarrier::init`] and all expected bytes have arrived; then the next phase begins. A wait takes
//! the parity of the phase: 0 for the first, 1 for the second, 0 for the third. On a new barrier a
//! wait for parity 1 returns immediately, as if a phase had completed before the first.
//!
//! # Safety model
//!
//! [`MBarrier::at`] and [`MBarrier::init`] are `unsafe`: they use eight bytes of shared memory. The
//! other operations are safe; a wait for a phase that never completes hangs the kernel. Needs
//! sm_90.
//!
//! # Example
//!
//! ```
//! use cuda_std::mbarrier::{self, MBarrier};
//! use cuda_std::prelude::*;
//! /// Makes all threads wait until the first one arrives.
//! fn gate() {
//!     // SAFETY: only the barrier uses the word, and one thread initializes it before the block's
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
use crate::track_callers;

/// A barrier in shared memory.
#[doc(alias = "mbarrier")]
#[derive(Clone, Copy)]
pub struct MBarrier(arch::SharedAddress);

#[track_callers]
impl MBarrier {
    /// Returns the barrier at this address.
    ///
    /// # Safety
    ///
    /// `word` lies in shared memory, aligned to 8 bytes. [`init`](Self::init) is called before
    /// other methods, and from then on only the barrier uses the word.
    pub unsafe fn at(word: *mut u64) -> Self {
        Self(arch::shared_address(word))
    }

    /// Returns the barrier `index` words further.
    pub(crate) fn after(self, index: u32) -> Self {
        Self(arch::shared_offset(self.0, 8 * index))
    }

    /// Returns the barrier's address.
    pub(crate) const fn address(self) -> arch::SharedAddress {
        self.0
    }

    /// Initializes the barrier for `arrivals` (1 to 2^20 - 1) per phase. Call [`fence_init`] and a
    /// block barrier afterwards. PTX: `mbarrier.init`.
    ///
    /// # Safety
    ///
    /// One thread calls this, and no thread uses the barrier yet.
    pub unsafe fn init(self, arrivals: u32) {
        arch::mbarrier_init(self.0, arrivals);
    }

    /// Arrives. This thread's earlier writes are visible to threads that wait for the phase. PTX:
    /// `mbarrier.arrive` (release at block scope).
    pub fn arrive(self) {
        arch::mbarrier_arrive(self.0);
    }

    /// Arrives at the barrier at this address in block `block` of the cluster, which is one of its
    /// blocks and has not ended. PTX: `mapa.shared::cluster`, `mbarrier.arrive.shared::cluster`
    /// (release at block scope).
    pub fn arrive_in(self, block: u32) {
        arch::mbarrier_arrive_cluster(self.0, block);
    }

    /// Arrives, and expects `bytes` (below 2^20) more bytes of copies in this phase. PTX:
    /// `mbarrier.arrive.expect_tx`.
    pub fn arrive_expect_tx(self, bytes: u32) {
        arch::mbarrier_arrive_expect_tx(self.0, bytes);
    }

    /// Returns whether the phase of this parity (0 or 1) has completed; may wait for a limited
    /// time. PTX: `mbarrier.try_wait.parity` (acquire at block scope).
    pub fn try_wait(self, parity: u32) -> bool {
        arch::mbarrier_try_wait(self.0, parity)
    }

    /// Waits until the phase of this parity (0 or 1) has completed.
    pub fn wait(self, parity: u32) {
        arch::mbarrier_wait(self.0, parity);
    }
}

/// Makes initialized barriers visible to TMA and to other blocks of the cluster. PTX:
/// `fence.mbarrier_init`, `fence.proxy.async`.
#[track_caller]
pub fn fence_init() {
    arch::mbarrier_fence_init();
}
