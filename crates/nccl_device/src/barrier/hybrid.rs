//! Hybrid barriers of all ranks: load and store within LSA teams, the network between them.
//!
//! NCCL's C function does nothing in some modes (with a fence for puts and FULL connections, the
//! default). This implementation is built on the LSA and the GIN barrier, and has every mode of
//! NCCL's C++ class.

use super::arrival::{Arrive, Arrived};
use super::{Arrival, BarrierIndex, FenceLevel, GinBarrier, GinBarriers, LsaBarrier};
use crate::gin::{Gin, GinBackend};
use crate::prelude::*;

/// A barrier of all ranks, which the host reserved with the option `barriers`:
/// [`Gin::hybrid_barrier`].
///
/// NCCL: `ncclBarrierSession` of the world.
#[doc(alias = "ncclBarrierSession")]
pub struct HybridBarrier<'a, B> {
    coop: Coop,
    gin: Gin<'a, B>,
    index: BarrierIndex,
    lsa: LsaBarrier<'a>,
}

/// The barriers that one synchronisation uses.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Path {
    /// A barrier within the LSA teams by load and store, then the rail teams over the network. With
    /// a fence for puts it is used only if the contexts connect rails only, so that no rank outside
    /// the rail can have put here.
    LsaThenRail,
    /// All ranks over the network, where each signal follows its rank's puts on the connection.
    Network,
    /// A barrier within the LSA teams by load and store, then over the network the ranks that GIN
    /// connects: more than the rail team, but not all ranks.
    LsaThenNetwork,
}

impl<'a, B: GinBackend> Gin<'a, B> {
    /// Returns barrier `index` of all ranks, by load and store and this context, for the threads of
    /// `coop`; dropping the guard closes it. Its fences cover the puts and gets of this context.
    ///
    /// Every thread of the coop calls this, in every rank. Traps when there is no such barrier.
    ///
    /// NCCL: `ncclBarrierSession`'s constructor for the world, and its destructor.
    #[doc(alias = "ncclBarrierSessionInit")]
    #[doc(alias = "ncclBarrierSessionDestroy")]
    #[track_caller]
    pub fn hybrid_barrier(&self, coop: Coop, index: BarrierIndex) -> HybridBarrier<'a, B> {
        let lsa = self.comm().hybrid_lsa_barriers().barrier(coop, index);
        HybridBarrier { coop, gin: *self, index, lsa }
    }
}

#[track_callers]
impl<'a, B: GinBackend> HybridBarrier<'a, B> {
    /// Returns the inner barrier, of the LSA team only. NCCL: `ncclBarrierSession::lsaBarrier`.
    #[doc(alias = "lsaBarrier")]
    pub fn lsa(&mut self) -> &mut LsaBarrier<'a> {
        &mut self.lsa
    }

    /// Returns the outer barrier, of the rail team only. NCCL: `ncclBarrierSession::ginBarrier`.
    #[doc(alias = "ginBarrier")]
    pub fn rail(&mut self) -> GinBarrier<'a, B> {
        let comm = self.gin.comm();
        let handle = comm.as_raw().hybrid_rail_gin_barrier;
        // SAFETY: the handle is the device communicator's, for its rail team.
        unsafe { GinBarriers::new(self.gin, comm.rail_team(), handle) }
            .barrier(self.coop, self.index)
    }

    /// Signals this coop's arrival to the LSA team, or to all ranks if the barrier uses only the
    /// network. After a signal to the LSA team, [`Arrival::wait`] signals the ranks of other LSA
    /// teams, so a peer's wait may depend on this rank's wait. Dropping the arrival waits too.
    ///
    /// NCCL's `ncclBarrierSession` has no split arrive and wait.
    pub fn arrive(&mut self, order: MemoryOrder, fence: FenceLevel) -> Arrival<'_, Self> {
        match self.path(fence) {
            Path::Network => {
                let mut outer = self.outer(Path::Network);
                if let Err(outcome) = outer.signal_peers(order, fence, Deadline::NEVER) {
                    finish(self.coop, outcome, CoopCall::new("hybrid_barrier.sync"));
                }
            }
            Path::LsaThenRail | Path::LsaThenNetwork => self.lsa.signal_peers(order),
        }
        Arrival::new(self, Arrived { order, fence })
    }

    /// Waits until the same coop of every rank has arrived; `fence` says which puts and gets are
    /// complete then. With RAIL connections a fence for puts covers puts within the rail team: no
    /// other puts are possible.
    ///
    /// NCCL: `ncclBarrierSession::sync`.
    #[doc(alias = "ncclBarrierSessionSync")]
    pub fn sync(&mut self, order: MemoryOrder, fence: FenceLevel) {
        // Without a deadline the wait does not time out.
        let _ = self.sync_until(order, fence, Deadline::NEVER);
    }

    /// Does the same as [`sync`](Self::sync), with a timeout. After a timeout the barrier counts as
    /// passed, without its guarantees. If with weak signals a fence waits for puts, and that wait
    /// times out, it is as after [`GinBarrier::sync_timeout`]: the peers keep waiting, and no rank
    /// may use the barrier again.
    ///
    /// NCCL: `ncclBarrierSession::sync` with `timeoutCycles`.
    ///
    /// # Errors
    ///
    /// [`TimedOut`], in every thread of the coop.
    pub fn sync_timeout(
        &mut self,
        order: MemoryOrder,
        fence: FenceLevel,
        timeout: Timeout,
    ) -> Result<(), TimedOut> {
        self.sync_until(order, fence, Deadline::after(timeout))
    }

    fn sync_until(
        &mut self,
        order: MemoryOrder,
        fence: FenceLevel,
        deadline: Deadline,
    ) -> Result<(), TimedOut> {
        let (path, mut inner) = (self.path(fence), Ok(()));
        if path != Path::Network {
            inner = self.lsa.sync_until(order, deadline);
        }
        // This runs even if `inner` timed out: the peers wait for this rank at both barriers.
        let mut outer = self.outer(path);
        let outcome = outer.arrive_and_wait(order, fence, deadline);
        finish_by(deadline, self.coop, outcome, CoopCall::new("hybrid_barrier.sync")).and(inner)
    }

    fn path(&self, fence: FenceLevel) -> Path {
        let raw = self.gin.comm().as_raw();
        if !fence.covers_puts() || raw.gin_context_stride as i32 == raw.lsa_size {
            Path::LsaThenRail
        } else if raw.gin_context_stride == 1 {
            Path::Network
        } else {
            Path::LsaThenNetwork
        }
    }

    fn outer(&mut self, path: Path) -> GinBarrier<'a, B> {
        if path == Path::LsaThenRail {
            return self.rail();
        }
        let (raw, stride) = (self.gin.comm().as_raw(), self.gin.comm().gin_stride());
        let connected = Team { n_ranks: raw.n_ranks / stride, rank: raw.rank / stride, stride };
        // SAFETY: the handle is the device communicator's, for the ranks that its contexts connect.
        unsafe { GinBarriers::new(self.gin, connected, raw.hybrid_dense_gin_barrier) }
            .barrier(self.coop, self.index)
    }
}

impl<B: GinBackend> HybridBarrier<'_, B> {
    /// Waits over the network, as the second part of the wait after an arrival.
    #[track_caller]
    fn wait_outer(
        &mut self,
        Arrived { order: arrived, fence }: Arrived,
        order: MemoryOrder,
        deadline: Deadline,
    ) -> Outcome {
        let path = self.path(fence);
        let mut outer = self.outer(path);
        match path {
            Path::Network => outer.wait_for_peers(order, fence, deadline),
            // These signals, to other LSA teams, are a part of the arrival, and release as it does.
            _ => outer.arrive_and_wait(order.and_release_of(arrived), fence, deadline),
        }
    }
}

impl<B: GinBackend> Arrive for HybridBarrier<'_, B> {
    fn complete(
        &mut self,
        arrived: Arrived,
        order: MemoryOrder,
        deadline: Deadline,
    ) -> Result<(), TimedOut> {
        let mut inner = Ok(());
        if self.path(arrived.fence) != Path::Network {
            inner = self.lsa.wait_until(order, deadline);
        }
        // This runs even if `inner` timed out: the peers wait for this rank at both barriers.
        let outcome = self.wait_outer(arrived, order, deadline);
        finish_by(deadline, self.coop, outcome, CoopCall::new("hybrid_barrier.sync")).and(inner)
    }
}
