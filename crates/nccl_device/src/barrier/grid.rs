//! A barrier between all blocks of a grid.

use crate::prelude::*;
use cuda_std::atomic::AtomicU32;

/// A barrier of all threads of a one-dimensional grid. All blocks must be co-resident, as they are
/// in a cooperative launch, the default of a kernel that takes a [`DevComm`].
///
/// The barrier's 32-bit word is never reset, and the next launch can use the word again: each
/// synchronisation flips the highest bit, as in CUDA's `grid_group::sync`.
///
/// ```
/// # use nccl_device::{DevComm, GridBarrier};
/// # unsafe fn kernel(comm: DevComm, word: *mut u32) {
/// // SAFETY: `word` is in this GPU's memory, 0 before the first launch; only this barrier uses it.
/// let mut barrier = unsafe { GridBarrier::new(&comm, word) };
/// // Each block writes.
/// barrier.sync();
/// // Each block reads what the others wrote.
/// # }
/// ```
#[doc(alias = "grid_group")]
#[doc(alias = "this_grid")]
pub struct GridBarrier<'a> {
    comm: &'a DevComm,
    word: *mut u32,
}

/// The bit that a synchronisation flips.
const PHASE: u32 = 1 << 31;

impl<'a> GridBarrier<'a> {
    /// Returns the barrier whose state is `word`.
    ///
    /// # Safety
    ///
    /// `word` is in this GPU's memory and was 0 before the first launch. Only this barrier uses it,
    /// in one launch at a time.
    pub unsafe fn new(comm: &'a DevComm, word: *mut u32) -> Self {
        Self { comm, word }
    }

    /// Waits until every thread of the grid has arrived. Writes before the barrier are visible to
    /// all threads after it.
    ///
    /// The host can abort the wait. After an abort the word cannot be used again.
    #[track_caller]
    pub fn sync(&mut self) {
        let coop = Coop::cta();
        coop.sync_in(CoopCall::new("grid_barrier.sync"));
        let mut outcome = Outcome::Done;
        if coop.thread_rank() == 0 {
            // SAFETY: the kernel gave the constructor a word that only this barrier uses.
            let word = unsafe { AtomicU32::from_ptr(self.word) };
            // The arrivals of all blocks add up to exactly `PHASE`.
            let others = thread::grid_dim_x() - 1;
            let arrival = if thread::block_idx_x() == 0 { PHASE - others } else { 1 };
            let before = word.fetch_add(arrival, Order::AcqRel, Scope::Gpu);
            let done = || (word.load(Order::Acquire, Scope::Gpu) ^ before) & PHASE != 0;
            let what = || WaitFor::of(WaitKind::GridBarrier);
            outcome = poll(self.comm, Deadline::NEVER, done, what);
        }
        finish(coop, outcome, CoopCall::new("grid_barrier.sync"));
    }
}
