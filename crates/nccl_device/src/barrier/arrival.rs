//! The token that arriving at a barrier returns and that waiting for the peers consumes.

use crate::prelude::*;
use core::mem;

use super::FenceLevel;

/// The memory order and fence with which a coop arrived.
#[derive(Clone, Copy)]
pub struct Arrived {
    pub(super) order: MemoryOrder,
    pub(super) fence: FenceLevel,
}

/// A barrier whose arrival and wait are split: [`LsaBarrier`](crate::LsaBarrier),
/// [`GinBarrier`](crate::GinBarrier), [`HybridBarrier`](crate::HybridBarrier),
/// [`NeighborBarrier`](crate::NeighborBarrier).
pub trait Arrive {
    /// Waits for the peers, or exits the kernel when the host aborts it.
    #[track_caller]
    #[doc(hidden)]
    fn complete(
        &mut self,
        arrived: Arrived,
        order: MemoryOrder,
        deadline: Deadline,
    ) -> Result<(), TimedOut>;
}

/// A coop's arrival at a barrier, before the wait for its peers. It borrows the barrier until the
/// wait. Dropping it waits with [`MemoryOrder::AcqRel`].
#[must_use = "an arrival that is dropped waits at once"]
pub struct Arrival<'b, B: Arrive> {
    barrier: &'b mut B,
    arrived: Arrived,
}

impl<'b, B: Arrive> Arrival<'b, B> {
    pub(super) fn new(barrier: &'b mut B, arrived: Arrived) -> Self {
        Self { barrier, arrived }
    }

    /// Waits until the coop of every peer has arrived. NCCL: `ncclLsaBarrierSessionWait`.
    #[doc(alias = "ncclLsaBarrierSessionWait")]
    #[track_caller]
    pub fn wait(self, order: MemoryOrder) {
        // Without a deadline the wait does not time out.
        let _ = self.barrier.complete(self.arrived, order, Deadline::NEVER);
        mem::forget(self);
    }

    /// Does the same as [`wait`](Self::wait), with a timeout, after which the barrier counts as
    /// passed, without its guarantees: see
    /// [`LsaBarrier::sync_timeout`](crate::LsaBarrier::sync_timeout).
    ///
    /// # Errors
    ///
    /// [`TimedOut`], in every thread of the coop.
    #[track_caller]
    pub fn wait_timeout(self, order: MemoryOrder, timeout: Timeout) -> Result<(), TimedOut> {
        let result = self.barrier.complete(self.arrived, order, Deadline::after(timeout));
        mem::forget(self);
        result
    }
}

impl<B: Arrive> Drop for Arrival<'_, B> {
    fn drop(&mut self) {
        if !crate::wait::is_unwinding() {
            let _ = self.barrier.complete(self.arrived, MemoryOrder::AcqRel, Deadline::NEVER);
        }
    }
}
