//! A barrier of all blocks of one GPU's grid.

use cuda_std::atomic::{AtomicU32, Order, Scope};
use cuda_std::thread;
use devcomm_types::{WaitFor, WaitKind};

use crate::wait::{Deadline, Outcome, finish, poll};
use crate::{Coop, DevComm};

/// A barrier of all threads of the grid, for a kernel whose blocks all run at once, as those of a
/// kernel with a [`DevComm`] do.
///
/// Its word is never reset and serves the next launch too: each synchronisation flips the highest
/// bit, as in CUDA's `grid_group::sync`.
///
/// ```
/// # use nccl_device::{DevComm, GridBarrier};
/// # unsafe fn kernel(comm: DevComm, word: *mut u32) {
/// // SAFETY: a word of this GPU's memory, 0 before the first launch, for this barrier alone.
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
    /// The barrier of `word`.
    ///
    /// # Safety
    ///
    /// `word` is in this GPU's memory, was 0 before the first launch, and is used by this barrier
    /// alone, of one launch at a time.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn new(comm: &'a DevComm, word: *mut u32) -> Self {
        Self { comm, word }
    }

    /// Waits until every thread of the grid is here; what they wrote before, all see after.
    ///
    /// The host can end the wait; the word is of no use then.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn sync(&mut self) {
        let coop = Coop::cta();
        coop.sync();
        let mut outcome = Outcome::Done;
        if coop.thread_rank() == 0 {
            // SAFETY: the constructor's contract.
            let word = unsafe { AtomicU32::from_ptr(self.word) };
            // All arrivals together add the bit, and nothing below it.
            let others = thread::grid_dim_x() - 1;
            let arrival = if thread::block_idx_x() == 0 { PHASE - others } else { 1 };
            let before = word.fetch_add(arrival, Order::AcqRel, Scope::Gpu);
            let met = || (word.load(Order::Acquire, Scope::Gpu) ^ before) & PHASE != 0;
            let what = || WaitFor {
                kind: WaitKind::GridBarrier,
                index: 0,
                context: 0,
                peer: -1,
                wanted: 0,
                seen: 0,
            };
            outcome = poll(self.comm, Deadline::NEVER, met, what);
        }
        finish(coop, outcome);
    }
}
