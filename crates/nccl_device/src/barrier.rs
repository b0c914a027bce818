//! Barriers between the GPUs of an LSA team.

use core::marker::PhantomData;
use core::mem::MaybeUninit;

use cuda_std::thread;
use devcomm_types::nccl::{LsaBarrierSession, MultimemHandle};

use crate::{Coop, DevComm, raw};

/// What a barrier orders. NCCL: `cuda::memory_order`.
#[doc(alias = "memory_order")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum MemoryOrder {
    /// Nothing: the ranks have arrived.
    Relaxed = 0,
    /// What peers wrote in earlier kernels is visible after it: the barrier at a kernel's start.
    Acquire = 2,
    /// What this rank wrote is complete before a peer passes: the barrier at a kernel's end.
    Release = 3,
    /// Both: data is exchanged in mid-kernel.
    AcqRel = 4,
    /// Both, in one total order.
    SeqCst = 5,
}

/// Which of the device communicator's LSA barriers a coop uses. One index has one user at a time, also across kernels in
/// flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarrierIndex(u32);

impl BarrierIndex {
    /// The block's own: `blockIdx.x`. A launch is refused when the grid has more blocks than there are barriers.
    #[inline(always)]
    pub fn this_block() -> Self {
        Self(thread::block_idx_x())
    }

    /// Barrier `index`, below [`DevComm::n_lsa_barriers`].
    #[inline(always)]
    pub fn new(index: u32) -> Self {
        Self(index)
    }
}

/// An open session on a barrier of the LSA team. [`LsaBarrier::with`] opens and closes it.
///
/// NCCL: `ncclLsaBarrierSession`.
#[doc(alias = "ncclLsaBarrierSession")]
pub struct LsaBarrier<'a> {
    session: MaybeUninit<LsaBarrierSession>,
    // Owned, and passed to NCCL by way of a local copy. NCCL calls the coop through a vtable, and the calls fold only where
    // LLVM sees which: not through a reference that is stored here, nor where session and coop are one object.
    coop: Coop,
    comm: PhantomData<&'a DevComm>,
}

impl<'a> LsaBarrier<'a> {
    /// Opens a session on barrier `index` for the threads of `coop`, runs `body` and closes the session.
    ///
    /// A scope, because a session that is not closed loses its epoch, and the next one on that index would pass at once.
    /// Every thread of the coop calls this; so does the same coop in every other rank of the team.
    ///
    /// NCCL: `ncclLsaBarrierSessionInit`, `ncclLsaBarrierSessionDestroy`.
    #[doc(alias = "ncclLsaBarrierSessionInit")]
    #[doc(alias = "ncclLsaBarrierSessionDestroy")]
    #[inline(always)]
    #[track_caller]
    pub fn with<R>(
        coop: Coop,
        comm: &'a DevComm,
        index: BarrierIndex,
        body: impl FnOnce(&mut Self) -> R,
    ) -> R {
        debug_assert!(index.0 < comm.n_lsa_barriers(), "the barrier index is not reserved");
        let mut barrier = Self { session: MaybeUninit::uninit(), coop, comm: PhantomData };
        // SAFETY: the session is filled here and used by this coop only; team and handle are the device communicator's own;
        // without multimem the handle is not looked at.
        unsafe {
            raw::ncclLsaBarrierSessionInit(
                barrier.session.as_mut_ptr(),
                &coop.0,
                comm.as_raw(),
                &comm.lsa_team(),
                &comm.as_raw().lsa_barrier,
                index.0,
                false,
                &MultimemHandle::NULL,
            );
        }
        let result = body(&mut barrier);
        // SAFETY: opened above.
        unsafe { raw::ncclLsaBarrierSessionDestroy(barrier.session.as_mut_ptr()) };
        result
    }

    /// Tells the peers that this coop arrived. NCCL: `ncclLsaBarrierSessionArrive`.
    #[doc(alias = "ncclLsaBarrierSessionArrive")]
    #[inline(always)]
    #[track_caller]
    pub fn arrive(&mut self, order: MemoryOrder) {
        let coop = self.coop;
        // SAFETY: a session exists only while it is open.
        unsafe {
            raw::ncclLsaBarrierSessionArrive(self.session.as_mut_ptr(), &coop.0, order as i32);
        }
    }

    /// Waits until the coop of every peer arrived; [`arrive`](Self::arrive) comes first. NCCL: `ncclLsaBarrierSessionWait`.
    #[doc(alias = "ncclLsaBarrierSessionWait")]
    #[inline(always)]
    #[track_caller]
    pub fn wait(&mut self, order: MemoryOrder) {
        let coop = self.coop;
        // SAFETY: a session exists only while it is open.
        unsafe {
            raw::ncclLsaBarrierSessionWait(self.session.as_mut_ptr(), &coop.0, order as i32);
        }
    }

    /// Arrives and waits. NCCL: `ncclLsaBarrierSessionSync`.
    #[doc(alias = "ncclLsaBarrierSessionSync")]
    #[inline(always)]
    #[track_caller]
    pub fn sync(&mut self, order: MemoryOrder) {
        let coop = self.coop;
        // SAFETY: a session exists only while it is open.
        unsafe {
            raw::ncclLsaBarrierSessionSync(self.session.as_mut_ptr(), &coop.0, order as i32);
        }
    }
}
