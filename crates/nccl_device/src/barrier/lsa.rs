//! Barriers between the GPUs of an LSA team.
//!
//! Arriving and waiting are implemented here, since NCCL's C function for the wait cannot fail; a
//! wait here ends when the host aborts and can have a timeout. The memory layout is NCCL's, so that
//! C++ and Rust kernels can share a set of barriers. An *epoch* counts synchronisations of a
//! barrier; an *inbox* is a word where a peer stores its epoch. A set of `n` barriers is an array
//! of `u32` in every rank's resource buffer: `n` epochs for multicast, `n` epochs, `n` inboxes for
//! multicast, and for each barrier one inbox per rank. A session loads its epoch when it opens and
//! stores it when it closes.

use crate::prelude::*;
use core::mem::MaybeUninit;

#[cfg(target_arch = "nvptx64")]
use cuda_std::mem::store;
use cuda_std::mem::{load_ordered, store_ordered};
use cuda_std::multimem;
use cuda_std::reduce::Sum;
use devcomm_types::nccl::{LsaBarrierHandle, LsaBarrierSession, MultimemHandle};

use super::arrival::{Arrive, Arrived};
use super::{Arrival, BarrierIndex, FenceLevel};
use crate::wait::has_reached;
#[cfg(not(target_arch = "nvptx64"))]
use crate::wait::is_unwinding;

/// A set of LSA barriers: the device communicator's, or an additional one that the host requested.
///
/// NCCL: `ncclLsaBarrierHandle` with its team.
#[doc(alias = "ncclLsaBarrierHandle")]
#[derive(Clone, Copy)]
pub struct LsaBarriers<'a> {
    comm: &'a DevComm,
    team: Team,
    handle: LsaBarrierHandle,
    multimem: Option<MultimemHandle>,
}

impl DevComm {
    /// Returns barrier `index` of the LSA team, for the threads of `coop`: [`LsaBarriers::barrier`]
    /// of [`lsa_barriers`](Self::lsa_barriers).
    ///
    /// ```
    /// # use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder};
    /// # fn kernel(comm: DevComm) {
    /// let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    /// barrier.sync(MemoryOrder::Acquire);
    /// // Load from and store to the other ranks' windows.
    /// barrier.sync(MemoryOrder::Release);
    /// # }
    /// ```
    #[track_caller]
    pub fn lsa_barrier(&self, coop: Coop, index: BarrierIndex) -> LsaBarrier<'_> {
        self.lsa_barriers().barrier(coop, index)
    }

    /// Returns the barriers of the LSA team. NCCL: `ncclDevComm.lsaBarrier`.
    #[doc(alias = "lsaBarrier")]
    pub fn lsa_barriers(&self) -> LsaBarriers<'_> {
        LsaBarriers::built_in(self, self.as_raw().lsa_barrier)
    }

    /// Returns the barriers of the LSA team that hybrid barriers use within the team. NCCL:
    /// `ncclDevComm.hybridLsaBarrier`.
    #[doc(alias = "hybridLsaBarrier")]
    pub fn hybrid_lsa_barriers(&self) -> LsaBarriers<'_> {
        LsaBarriers::built_in(self, self.as_raw().hybrid_lsa_barrier)
    }
}

#[cfg(target_arch = "nvptx64")]
unsafe extern "C" {
    // The builder notes which kernels have these calls, since a launch checks the number of
    // built-in barriers, and removes them.
    safe fn devcomm_built_in_lsa_barriers();
    safe fn devcomm_lsa_barriers_by_handle();
}

impl<'a> LsaBarriers<'a> {
    fn built_in(comm: &'a DevComm, handle: LsaBarrierHandle) -> Self {
        #[cfg(target_arch = "nvptx64")]
        devcomm_built_in_lsa_barriers();
        Self { comm, team: comm.lsa_team(), handle, multimem: None }
    }

    /// Returns the barriers of `handle`, which the host requested for `team`.
    ///
    /// # Safety
    ///
    /// The host got the handle for this device communicator and a team of these ranks, which can
    /// all load and store each other's memory.
    pub unsafe fn new(comm: &'a DevComm, team: Team, handle: LsaBarrierHandle) -> Self {
        #[cfg(target_arch = "nvptx64")]
        devcomm_lsa_barriers_by_handle();
        Self { comm, team, handle, multimem: None }
    }

    /// Returns the same barriers, but a rank signals its peers by one multicast reduction. In each
    /// synchronisation either all ranks must use multicast or none. [`MemoryOrder::SeqCst`] is then
    /// acquire and release only: PTX has no such reduction.
    ///
    /// # Safety
    ///
    /// `multimem` is the multicast mapping of the barriers' team.
    pub unsafe fn over_multimem(self, multimem: MultimemHandle) -> Self {
        Self { multimem: Some(multimem), ..self }
    }

    /// Returns the number of barriers.
    pub fn count(&self) -> u32 {
        self.handle.n_barriers as u32
    }

    /// Opens a session on barrier `index` for the threads of `coop`; dropping the guard closes it.
    ///
    /// Every thread of the coop must call this, in every rank of the team. Traps when the set has
    /// no such barrier.
    ///
    /// NCCL: `ncclLsaBarrierSession`'s constructor.
    #[doc(alias = "ncclLsaBarrierSessionInit")]
    #[track_caller]
    pub fn barrier(self, coop: Coop, index: BarrierIndex) -> LsaBarrier<'a> {
        let mut barrier = LsaBarrier { set: self, coop, index: index.get(), epoch: 0 };
        // SAFETY: NCCL has just initialized the session.
        barrier.epoch = unsafe { epoch_of(&mut barrier.session()).read() };
        // This is checked after NCCL's call, so that the simulator's detailed error comes first.
        assert!(barrier.index < self.count(), "the barrier index is not reserved");
        barrier
    }
}

/// An open session on a barrier of an LSA team: [`DevComm::lsa_barrier`], [`LsaBarriers::barrier`].
///
/// Every thread of the coop must drop it, which closes the session and stores the barrier's epoch
/// for the next session. A session that is forgotten ([`core::mem::forget`]) loses its epoch: then
/// the next synchronisations on that index do not wait.
///
/// NCCL: `ncclLsaBarrierSession`.
#[doc(alias = "ncclLsaBarrierSession")]
pub struct LsaBarrier<'a> {
    set: LsaBarriers<'a>,
    coop: Coop,
    index: u32,
    epoch: u32,
}

/// NCCL: `ncclLsaBarrierSession`'s destructor.
///
/// Implemented here because NCCL's function calls the coop through its vtable, and in a large
/// kernel LLVM cannot devirtualise that call.
#[cfg(target_arch = "nvptx64")]
impl Drop for LsaBarrier<'_> {
    fn drop(&mut self) {
        self.forget_addresses();
        let LsaBarriers { team, handle, multimem, .. } = self.set;
        if self.coop.thread_rank() == 0 {
            let first = if multimem.is_some() { 0 } else { handle.n_barriers as usize };
            let word = self.words(team.rank).wrapping_add(first + self.index as usize);
            // SAFETY: the word has the stored epoch. Only this session accesses it, since one coop
            // at a time uses the index.
            unsafe { store(word, self.epoch) };
        }
        self.coop.sync_in(self.call("the end of a session"));
    }
}

/// NCCL's function closes the session in the simulator, unless the thread is unwinding.
#[cfg(not(target_arch = "nvptx64"))]
impl Drop for LsaBarrier<'_> {
    fn drop(&mut self) {
        if is_unwinding() {
            return;
        }
        let mut session = self.session();
        // SAFETY: the session is open; NCCL stores the epoch.
        unsafe {
            epoch_of(&mut session).write(self.epoch);
            raw::ncclLsaBarrierSessionDestroy(session.as_mut_ptr());
        }
    }
}

#[track_callers]
impl<'a> LsaBarrier<'a> {
    /// Returns NCCL's session, with the stored epoch.
    fn session(&self) -> MaybeUninit<LsaBarrierSession> {
        let LsaBarriers { comm, team, handle, multimem } = self.set;
        let mut session = MaybeUninit::uninit();
        // SAFETY: the set's contract; the session is used by this coop only.
        unsafe {
            raw::ncclLsaBarrierSessionInit(
                session.as_mut_ptr(),
                &self.coop.as_raw(),
                comm.as_raw(),
                &team,
                &handle,
                self.index,
                multimem.is_some(),
                &multimem.unwrap_or(MultimemHandle::NULL),
            );
        }
        session
    }

    /// Returns the team that the barrier synchronises.
    pub fn team(&self) -> Team {
        self.set.team
    }

    /// Signals this coop's arrival to the peers. [`Arrival::wait`] waits for theirs; dropping the
    /// arrival waits too.
    ///
    /// NCCL: `ncclLsaBarrierSessionArrive`.
    #[doc(alias = "ncclLsaBarrierSessionArrive")]
    pub fn arrive(&mut self, order: MemoryOrder) -> Arrival<'_, Self> {
        self.signal_peers(order);
        Arrival::new(self, Arrived { order, fence: FenceLevel::None })
    }

    /// Arrives and waits. NCCL: `ncclLsaBarrierSessionSync`.
    #[doc(alias = "ncclLsaBarrierSessionSync")]
    pub fn sync(&mut self, order: MemoryOrder) {
        // Without a deadline the wait does not time out.
        let _ = self.sync_until(order, Deadline::NEVER);
    }

    /// Does the same as [`sync`](Self::sync), with a timeout. After a timeout the barrier counts as
    /// passed, without its guarantees: the next synchronisation also waits for the arrivals that
    /// this one missed. With multicast, where all ranks add to one counter, do not use the barrier
    /// after a timeout.
    ///
    /// NCCL: `ncclLsaBarrierSession::sync` with `timeoutCycles`.
    ///
    /// # Errors
    ///
    /// [`TimedOut`], in every thread of the coop.
    pub fn sync_timeout(&mut self, order: MemoryOrder, timeout: Timeout) -> Result<(), TimedOut> {
        self.sync_until(order, Deadline::after(timeout))
    }

    pub(super) fn sync_until(
        &mut self,
        order: MemoryOrder,
        deadline: Deadline,
    ) -> Result<(), TimedOut> {
        self.signal_peers(order);
        self.wait_until(order, deadline)
    }

    pub(super) fn signal_peers(&mut self, order: MemoryOrder) {
        self.forget_addresses();
        let Self { set: LsaBarriers { team, multimem, .. }, coop, .. } = *self;
        self.epoch = self.epoch.wrapping_add(self.step());
        coop.sync_in(self.call("barrier.sync"));
        if let Some(handle) = multimem {
            if coop.thread_rank() == 0 {
                let inbox = self.multicast_inbox(handle);
                let order = if order.releases() { Order::Release } else { Order::Relaxed };
                // SAFETY: the inbox is in the team's mapping, by the contract of `over_multimem`.
                unsafe { multimem::red(Sum, inbox, 1, order, Scope::Sys) };
            }
            return;
        }
        let mut i = coop.thread_rank();
        // The other threads' writes come before this fence too, by the coop's synchronisation. In
        // NCCL all threads execute a fence, and each waits for the multiprocessor's stores.
        if i < (team.n_ranks - 1) as u32 {
            order.fence_before_arrival();
        }
        while i < (team.n_ranks - 1) as u32 {
            let inbox = self.inbox(nth_peer(team, i as i32), team.rank);
            // SAFETY: the word is an inbox of the peer, which only this rank writes.
            unsafe { store_ordered(inbox, self.epoch, Order::Relaxed, Scope::Sys) };
            i += coop.size();
        }
    }

    pub(super) fn wait_until(
        &mut self,
        order: MemoryOrder,
        deadline: Deadline,
    ) -> Result<(), TimedOut> {
        let outcome = self.wait_for_peers(order, deadline);
        finish_by(deadline, self.coop, outcome, self.call("barrier.sync"))
    }

    /// Makes the compiler recompute the addresses of epoch and inboxes: kept between two
    /// synchronisations, they would occupy registers that the kernel needs.
    fn forget_addresses(&mut self) {
        let LsaBarriers { team, handle, .. } = &mut self.set;
        handle.buffer = hint::opaque(handle.buffer);
        handle.n_barriers = hint::opaque(handle.n_barriers as u32) as i32;
        team.n_ranks = hint::opaque(team.n_ranks as u32) as i32;
        self.index = hint::opaque(self.index);
    }

    /// Returns what a synchronisation adds to the epoch. With multicast the epoch counts all ranks'
    /// arrivals, which go to one inbox.
    fn step(&self) -> u32 {
        if self.set.multimem.is_some() { self.set.team.n_ranks as u32 } else { 1 }
    }

    /// Polls this thread's share of the inboxes.
    fn wait_for_peers(&self, order: MemoryOrder, deadline: Deadline) -> Outcome {
        let Self { set: LsaBarriers { team, multimem, .. }, coop, .. } = *self;
        if multimem.is_some() {
            if coop.thread_rank() > 0 {
                return Outcome::Done;
            }
            return self.wait_for(self.own_multicast_inbox(), -1, order, deadline);
        }
        let mut i = coop.thread_rank();
        while i < (team.n_ranks - 1) as u32 {
            let peer = nth_peer(team, i as i32);
            let inbox = self.inbox(team.rank, peer);
            let outcome = self.wait_for(inbox, peer, order, deadline);
            if outcome != Outcome::Done {
                return outcome;
            }
            i += coop.size();
        }
        Outcome::Done
    }

    /// Polls until the count in an inbox of this rank has reached the epoch.
    fn wait_for(
        &self,
        inbox: *mut u32,
        peer: i32,
        order: MemoryOrder,
        deadline: Deadline,
    ) -> Outcome {
        // SAFETY: the word is an inbox of this rank, which peers write by ordered stores.
        let arrived = || unsafe { load_ordered(inbox, order.of_load(), Scope::Sys) };
        poll(self.set.comm, deadline, || has_reached(arrived(), self.epoch), || self.describe(peer))
    }

    /// Returns a call on this barrier, for the simulator's reports.
    fn call(&self, name: &'static str) -> CoopCall {
        CoopCall::new(name).arg("LSA barrier", self.index.into())
    }

    /// Describes a wait for team rank `peer`, or for all ranks over multicast (-1).
    fn describe(&self, peer: i32) -> WaitFor {
        let Self { set: LsaBarriers { comm, team, .. }, index, .. } = *self;
        let peer = if peer < 0 { peer } else { team.to_world(comm.rank(), peer) };
        WaitFor { index, peer, ..WaitFor::of(WaitKind::LsaBarrier) }
    }

    /// Returns the set's array in the resource buffer of team rank `owner`.
    fn words(&self, owner: i32) -> *mut u32 {
        let LsaBarriers { comm, team, handle, .. } = self.set;
        comm.resource_buffer(handle.buffer).peer::<u32>(team, owner).as_ptr()
    }

    /// Returns the inbox in the memory of rank `owner` to which rank `peer` writes its arrivals.
    fn inbox(&self, owner: i32, peer: i32) -> *mut u32 {
        let LsaBarriers { team, handle, .. } = self.set;
        let inboxes = 3 * handle.n_barriers + self.index as i32 * team.n_ranks;
        self.words(owner).wrapping_offset(inboxes as isize).wrapping_offset(peer as isize)
    }

    fn own_multicast_inbox(&self) -> *mut u32 {
        let first = 2 * self.set.handle.n_barriers;
        self.words(self.set.team.rank)
            .wrapping_offset(first as isize)
            .wrapping_add(self.index as usize)
    }

    fn multicast_inbox(&self, multimem: MultimemHandle) -> *mut u32 {
        let LsaBarriers { comm, handle, .. } = self.set;
        let words = comm.resource_buffer(handle.buffer).multimem_of::<u32>(multimem);
        words.wrapping_offset(2 * handle.n_barriers as isize).wrapping_add(self.index as usize)
    }
}

/// Returns the address of `epoch` in NCCL's session.
fn epoch_of(session: &mut MaybeUninit<LsaBarrierSession>) -> *mut u32 {
    /// Byte offset of the field, which the simulator's declaration of the struct asserts.
    const OFFSET: usize = 72;
    session.as_mut_ptr().cast::<u32>().wrapping_byte_add(OFFSET)
}

impl Arrive for LsaBarrier<'_> {
    fn complete(
        &mut self,
        _arrived: Arrived,
        order: MemoryOrder,
        deadline: Deadline,
    ) -> Result<(), TimedOut> {
        self.wait_until(order, deadline)
    }
}

/// Returns the `i`-th rank of the team, this rank not counted.
fn nth_peer(team: Team, i: i32) -> i32 {
    i + i32::from(team.rank <= i)
}
