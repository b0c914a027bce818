//! The handle of a communicator, shared by its rank's thread, threads that make blocking calls and
//! threads that abort.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use devcomm_sys::nccl::IN_PROGRESS;
use parking_lot::{Mutex, MutexGuard};

use crate::device::Health;
use crate::device::abort::{AbortFlag, AbortFlags};
use crate::error::{AbortCause, Error, Result, StateError};
use crate::machine::{Machine, Wakes};
use crate::sys::nccl::Nccl;
use crate::sys::nccl::call::{Call, CommPtr, CommSlot, Out};
use crate::sys::nccl::calls;

/// How long an abort waits for a running call to return, before it aborts during the call.
const ABORT_TIMEOUT: Duration = Duration::from_millis(200);

/// What a communicator can still be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Status {
    Live,
    /// Its memory is released until it is resumed.
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

/// An NCCL communicator with its state.
pub(crate) struct Handle {
    nccl: Arc<Nccl>,
    slot: CommSlot,
    status: AtomicU8,
    /// Held while a call is made.
    busy: Mutex<()>,
    rank: usize,
    blocking: bool,
    health: Arc<Health>,
    /// The abort flags of its device communicators.
    flags: AbortFlags,
}

impl Handle {
    pub(crate) fn new(
        nccl: Arc<Nccl>,
        slot: CommSlot,
        rank: usize,
        blocking: bool,
        health: Arc<Health>,
    ) -> Self {
        let status = AtomicU8::new(Status::Live as u8);
        let (busy, flags) = (Mutex::new(()), AbortFlags::default());
        Self { nccl, slot, status, busy, rank, blocking, health, flags }
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
        Status::ALL[usize::from(self.status.load(Ordering::Acquire)).min(5)]
    }

    pub(crate) fn set_status(&self, status: Status) {
        // An abort is final.
        let _ = self.status.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
            (now != Status::Aborted as u8).then_some(status as u8)
        });
    }

    /// The error of a call that the status does not allow: the loss of a rank if there is one.
    pub(crate) fn ended(&self) -> Error {
        let state = Error::State(StateError::CommunicatorEnded {
            rank: self.rank,
            how: self.status().name(),
        });
        self.health.check().err().unwrap_or(state)
    }

    /// Locks the communicator for calls; fails unless its status is one of `allowed`.
    pub(crate) fn enter(&self, allowed: &[Status]) -> Result<Entered<'_>> {
        let busy = self.busy.lock();
        if !allowed.contains(&self.status()) {
            return Err(self.ended());
        }
        let comm = self.slot.get().ok_or_else(|| self.ended())?;
        Ok(Entered { handle: self, comm, _busy: busy })
    }

    /// Locks the communicator to end it: empties the slot, so that later calls fail.
    pub(crate) fn enter_last(&self) -> Option<Entered<'_>> {
        let busy = self.busy.lock();
        self.slot.take().map(|comm| Entered { handle: self, comm, _busy: busy })
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

    /// Marks the communicator aborted, asks its kernels to exit, and empties its slot, even during
    /// a call that blocks.
    pub(crate) fn take_for_abort(&self) -> Option<CommPtr> {
        self.status.store(Status::Aborted as u8, Ordering::Release);
        // Kernels first: an NCCL abort waits for them.
        self.flags.raise(AbortCause::CommunicatorAborted);
        // The rank's thread may wait for the other ranks on the host.
        self.machine().notify();
        // Gives short calls time to return.
        let _ = self
            .machine()
            .poll(Wakes::Anything, Some(ABORT_TIMEOUT), || Ok(self.busy.try_lock().is_some()));
        self.slot.take()
    }

    /// Whether the asynchronous operations are done, or the error of one that failed.
    pub(crate) fn poll(&self) -> Result<bool> {
        let entered = self.enter(&[Status::Live, Status::Revoked, Status::Finalized])?;
        entered.poll()
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
    _busy: MutexGuard<'a, ()>,
}

impl Entered<'_> {
    pub(crate) fn comm(&self) -> CommPtr {
        self.comm
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

    /// Replaces the result by an error if the communicator was aborted, unless it says why.
    pub(crate) fn or_aborted<T>(&self, result: Result<T>) -> Result<T> {
        match result {
            Err(Error::State(StateError::NotReturned { .. })) => result,
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
