//! The handle of a communicator, shared by its rank's thread, threads that make blocking calls and
//! threads that abort.
//!
//! A communicator is freed only while no call uses it, by the one thread that takes it out of its
//! slot. So a thread that has checked a communicator can use it, however long it is stopped before
//! its call.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;

use devcomm_sys::nccl::IN_PROGRESS;
use devcomm_types::DataType;
use parking_lot::Mutex;

use crate::device::abort::{AbortFlag, AbortFlags};
use crate::device::{Health, KeepAlive};
use crate::error::{AbortCause, Error, Result, StateError};
use crate::machine::{CallLock, Held, Machine, Shared, Wakes};
use crate::sys::nccl::Nccl;
use crate::sys::nccl::call::{Call, CommPtr, CommSlot, Out};
use crate::sys::nccl::calls;

/// The state of a communicator, which limits the calls that it accepts. They are ordered: it has
/// ended from `Destroyed` on, and never leaves these two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Status {
    Live,
    /// The memory is released until it is resumed.
    Suspended,
    /// Stopped: it can be split, shrunk and ended.
    Revoked,
    /// Finalized on all ranks: it can be ended.
    Finalized,
    Destroyed,
    Aborted,
}

impl Status {
    const ALL: [Self; 6] = [
        Self::Live,
        Self::Suspended,
        Self::Revoked,
        Self::Finalized,
        Self::Destroyed,
        Self::Aborted,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Suspended => "suspended",
            Self::Revoked => "revoked",
            Self::Finalized => "finalized",
            Self::Destroyed => "destroyed",
            Self::Aborted => "aborted",
        }
    }
}

/// The abort of a communicator.
pub(crate) enum Aborting {
    /// No abort has begun, or no thread could be started for it.
    No,
    Running,
    /// Running after a wait for its end.
    Late,
    /// Done. The first wait takes the result.
    Over(Result<()>),
}

/// An NCCL communicator with its state.
pub(crate) struct Handle {
    nccl: Arc<Nccl>,
    slot: CommSlot,
    status: AtomicU8,
    /// Held while a call is made.
    busy: CallLock,
    /// Calls on other threads that have not returned. Incremented only while `busy` is held.
    calls: AtomicUsize,
    /// Held by the thread that finalizes or destroys it.
    ending: CallLock,
    aborting: Shared<Aborting>,
    /// Whether NCCL has revoked it, which it does once.
    is_revoked: AtomicBool,
    rank: usize,
    blocking: bool,
    health: Arc<Health>,
    /// Whether another library frees it.
    is_foreign: bool,
    /// The abort flags of its device communicators.
    flags: AbortFlags,
    /// Whether an abort has ended a kernel while it waited for other ranks.
    left_ranks_waiting: AtomicBool,
    /// What other ranks may use until the communicator ends on all ranks.
    kept: Mutex<Vec<KeptUntilEnd>>,
    /// NCCL's numbers of the operators that average, by type. They end with the communicator.
    averages: Mutex<Vec<(DataType, c_int)>>,
}

impl Handle {
    pub(crate) fn new(
        nccl: Arc<Nccl>,
        slot: CommSlot,
        rank: usize,
        blocking: bool,
        health: Arc<Health>,
        is_foreign: bool,
    ) -> Self {
        let status = AtomicU8::new(Status::Live as u8);
        let aborting = Shared::new(nccl.machine().clone(), Aborting::No);
        let (busy, ending, calls, is_revoked, flags) = Default::default();
        let (left_ranks_waiting, kept, averages) = Default::default();
        Self {
            nccl,
            slot,
            status,
            busy,
            calls,
            ending,
            aborting,
            is_revoked,
            rank,
            blocking,
            health,
            is_foreign,
            flags,
            left_ranks_waiting,
            kept,
            averages,
        }
    }

    /// Returns the operators that average, by type.
    pub(super) fn averages(&self) -> &Mutex<Vec<(DataType, c_int)>> {
        &self.averages
    }

    pub(crate) fn nccl(&self) -> &Arc<Nccl> {
        &self.nccl
    }

    pub(crate) fn machine(&self) -> &Machine {
        self.nccl.machine()
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn is_blocking(&self) -> bool {
        self.blocking
    }

    pub(crate) fn address(&self) -> *mut std::ffi::c_void {
        self.slot.address()
    }

    pub(crate) fn status(&self) -> Status {
        // Only statuses are stored.
        Status::ALL[usize::from(self.status.load(Ordering::Acquire))]
    }

    /// Changes the status, unless the communicator has ended; returns whether it did.
    pub(crate) fn set_status(&self, status: Status) -> bool {
        let changed = self.status.try_update(Ordering::AcqRel, Ordering::Acquire, |now| {
            (now < Status::Destroyed as u8).then_some(status as u8)
        });
        changed.is_ok()
    }

    /// Returns the error of a call that the status does not allow: the loss of a rank if there is
    /// one.
    pub(crate) fn ended(&self) -> Error {
        let state = Error::State(StateError::CommunicatorEnded {
            rank: self.rank,
            how: self.status().name(),
        });
        self.health.check().err().unwrap_or(state)
    }

    /// Waits, for at most `limit`, while another thread finalizes or destroys the communicator.
    /// This thread can do so while the result lives.
    pub(crate) fn begin_end(&self, limit: Option<Duration>) -> Result<Held<'_>> {
        self.ending.lock(self.machine(), limit, || Ok(()))
    }

    /// Notes that NCCL has revoked the communicator.
    pub(crate) fn set_revoked(&self) {
        self.is_revoked.store(true, Ordering::Release);
    }

    /// Returns whether NCCL has revoked the communicator, and refuses to do so again.
    pub(crate) fn is_revoked(&self) -> bool {
        self.is_revoked.load(Ordering::Acquire)
    }

    /// Locks the communicator for calls; fails unless its status is one of `allowed`.
    pub(crate) fn enter(&self, allowed: &[Status]) -> Result<Entered<'_>> {
        self.require(allowed)?;
        // Waits while another thread makes a call. A call that waits for other ranks has a
        // deadline.
        let busy = self.busy.lock(self.machine(), None, || self.require(allowed))?;
        self.entered(allowed, busy)
    }

    /// Does the same as [`enter`](Self::enter); `None` while another thread makes a call.
    fn try_enter(&self, allowed: &[Status]) -> Result<Option<Entered<'_>>> {
        self.require(allowed)?;
        let busy = self.busy.try_lock(self.machine());
        busy.map(|busy| self.entered(allowed, busy)).transpose()
    }

    /// Fails unless the status is one of `allowed`.
    pub(crate) fn require(&self, allowed: &[Status]) -> Result<()> {
        if allowed.contains(&self.status()) { Ok(()) } else { Err(self.ended()) }
    }

    fn entered<'a>(&'a self, allowed: &[Status], busy: Held<'a>) -> Result<Entered<'a>> {
        self.require(allowed)?;
        let comm = self.slot.get().ok_or_else(|| self.ended())?;
        Ok(Entered { handle: self, comm, busy: Some(busy) })
    }

    /// Takes the communicator to destroy it; `None` if it has ended already.
    pub(crate) fn take_to_destroy(&self) -> Result<Option<CommPtr>> {
        // A call on another thread that has not returned is not in the way: when its caller gives
        // up the wait and unlocks, it has begun an abort.
        let _busy = self.busy.lock(self.machine(), None, || Ok(()))?;
        // An abort that has begun ends it.
        Ok(self.set_status(Status::Destroyed).then(|| self.slot.take()).flatten())
    }

    /// Fails while the communicator is suspended: its resources cannot be closed.
    pub(crate) fn refuse_suspended(&self) -> Result<()> {
        if self.status() == Status::Suspended { Err(self.ended()) } else { Ok(()) }
    }

    /// Makes a call that closes a resource, which a revoked communicator allows too.
    pub(crate) fn release(&self, call: impl FnOnce(CommPtr) -> Call) -> Result<()> {
        let entered = self.enter(&[Status::Live, Status::Revoked, Status::Finalized])?;
        entered.perform(call(entered.comm()))
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.status() == Status::Aborted
    }

    /// Registers the abort flag of a device communicator, to be raised when the communicator is
    /// aborted or a rank is lost; kernels that find it raised exit.
    pub(crate) fn register_flag(&self, flag: &Arc<AbortFlag>) {
        self.health.register_flag(flag);
        self.flags.add(flag);
        if self.is_aborted() {
            flag.raise(AbortCause::CommunicatorAborted);
        }
    }

    /// Returns whether peers may use this rank's windows and device communicators for as long as
    /// the process runs: a rank is lost, or an abort has ended a kernel while it waited for other
    /// ranks. These ranks may count this one as arrived when they come.
    pub(crate) fn may_peers_access_forever(&self) -> bool {
        // Remembered, because the flags are dropped with their device communicators.
        if self.flags.have_ended_waits() {
            self.left_ranks_waiting.store(true, Ordering::Release);
        }
        self.health.is_lost() || self.left_ranks_waiting.load(Ordering::Acquire)
    }

    /// Keeps a registration, which `release` ends, and its memory until the communicator ends on
    /// all ranks.
    pub(crate) fn keep_until_end(
        &self,
        memory: Option<KeepAlive>,
        release: impl FnOnce(CommPtr) -> Call + Send + 'static,
    ) {
        self.kept.lock().push(KeptUntilEnd { release: Box::new(release), memory });
    }

    /// Ends the registrations that were kept, newest first, and returns their memory: all ranks
    /// have come to the end. NCCL's end of the communicator would wait forever for some of them.
    pub(crate) fn release_kept(&self) -> Result<Vec<KeepAlive>> {
        let kept = std::mem::take(&mut *self.kept.lock());
        let (mut memory, mut failed) = (Vec::new(), None);
        for kept in kept.into_iter().rev() {
            match self.release(kept.release) {
                Ok(_) => memory.extend(kept.memory),
                Err(error) => {
                    // NCCL may still use it.
                    std::mem::forget(kept.memory);
                    failed.get_or_insert(error);
                }
            }
        }
        failed.map_or(Ok(memory), Err)
    }

    /// Marks the communicator aborted, and ends the waits of its kernels and of host threads for
    /// other ranks. Returns true if the caller frees it: it had not ended before, and no other
    /// thread frees it.
    pub(crate) fn begin_abort(&self) -> bool {
        if self.set_status(Status::Aborted) {
            // Kernels first: an NCCL abort waits for them.
            self.flags.raise(AbortCause::CommunicatorAborted);
            self.machine().notify();
        }
        let mut aborting = self.aborting.lock();
        let begins = self.is_aborted() && matches!(*aborting, Aborting::No);
        if begins {
            *aborting = Aborting::Running;
        }
        begins
    }

    /// Returns whether another library frees the communicator.
    pub(crate) fn is_foreign(&self) -> bool {
        self.is_foreign
    }

    /// Returns the communicator during its abort, whether calls use it or not. It stays allocated
    /// until the abort [takes](Self::take_unused) it.
    pub(crate) fn to_be_aborted(&self) -> Option<CommPtr> {
        self.slot.get().filter(|_| self.is_aborted())
    }

    /// Waits, for at most `limit`, until no call uses the aborted communicator, and takes it.
    pub(crate) fn take_unused(&self, limit: Option<Duration>) -> Result<Option<CommPtr>> {
        let mut taken = None;
        self.machine().poll(Wakes::Anything, limit, || {
            let Some(_busy) = self.busy.try_lock(self.machine()) else { return Ok(false) };
            if self.calls.load(Ordering::Acquire) > 0 {
                return Ok(false);
            }
            taken = self.slot.take();
            Ok(true)
        })?;
        Ok(taken)
    }

    /// Returns the abort, to wait for.
    pub(crate) fn aborting(&self) -> &Shared<Aborting> {
        &self.aborting
    }

    /// Returns whether the asynchronous operations are done, or the error of one that failed. While
    /// another thread makes a call, the operations of a non-blocking communicator count as not
    /// done.
    pub(crate) fn poll(&self) -> Result<bool> {
        let allowed = [Status::Live, Status::Suspended, Status::Revoked, Status::Finalized];
        match self.try_enter(&allowed)? {
            Some(entered) => entered.poll(),
            None => Ok(self.blocking),
        }
    }
}

/// A registration that is kept until the communicator ends.
struct KeptUntilEnd {
    release: Box<dyn FnOnce(CommPtr) -> Call + Send>,
    memory: Option<KeepAlive>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Other ranks may use the kept memory: the communicator has not ended together with them.
        std::mem::forget(std::mem::take(self.kept.get_mut()));
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:p} ({})", self.address(), self.status().name())
    }
}

/// Lock guard: exclusive use of a live communicator, for a sequence of calls.
pub(crate) struct Entered<'a> {
    handle: &'a Handle,
    comm: CommPtr,
    /// `None` only while dropping.
    busy: Option<Held<'a>>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.busy.take();
        if self.handle.is_aborted() {
            // The abort waits for the end of this call.
            self.handle.machine().notify();
        }
    }
}

/// A call on another thread, during which the communicator is not freed. Never dropped if the call
/// never returns.
pub(crate) struct OffThreadCall(Arc<Handle>);

impl OffThreadCall {
    pub(crate) fn handle(&self) -> &Handle {
        &self.0
    }
}

impl Drop for OffThreadCall {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, Ordering::Release);
    }
}

impl Entered<'_> {
    pub(crate) fn comm(&self) -> CommPtr {
        self.comm
    }

    /// Keeps the communicator, whose handle is `handle`, for a call on another thread.
    pub(crate) fn begin_off_thread(&self, handle: &Arc<Handle>) -> OffThreadCall {
        debug_assert!(std::ptr::eq(self.handle, Arc::as_ptr(handle)));
        // `take_unused` reads it with the lock that `self` holds.
        handle.calls.fetch_add(1, Ordering::Relaxed);
        OffThreadCall(Arc::clone(handle))
    }

    /// Makes the call on this thread, where the communicator's context must be current.
    pub(crate) fn perform(&self, call: Call) -> Result<()> {
        let operation = call.operation;
        let nccl = &self.handle.nccl;
        // SAFETY: the communicator is live and this is the only call on it; the call's arguments
        // stay alive, since buffers wait for this rank's streams before they are freed.
        let code = unsafe { call.make(nccl)? };
        self.or_aborted(nccl.check(operation, code, Some(self.handle.rank)))
    }

    /// Replaces the result by an error if the communicator was aborted, unless the result says why.
    pub(crate) fn or_aborted<T>(&self, result: Result<T>) -> Result<T> {
        match result {
            Err(Error::State(StateError::NotReturned { .. } | StateError::Interrupted)) => result,
            _ if self.handle.is_aborted() => Err(self.handle.ended()),
            _ => result,
        }
    }

    pub(crate) fn poll(&self) -> Result<bool> {
        let state = Out::new(0);
        self.perform(calls::async_error(self.comm, state.clone()))?;
        let code = state.get();
        let rank = Some(self.handle.rank);
        self.or_aborted(self.handle.nccl.check("an asynchronous NCCL operation", code, rank))?;
        Ok(code != IN_PROGRESS)
    }

    /// Fails while an operation of a non-blocking communicator is in progress: until it is done,
    /// NCCL accepts no other operation.
    pub(crate) fn require_ready(&self, operation: &'static str) -> Result<()> {
        if self.handle.blocking || self.poll()? {
            return Ok(());
        }
        Err(StateError::InProgress { operation, rank: self.handle.rank }.into())
    }
}
