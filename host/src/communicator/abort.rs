//! Aborting a communicator, from any thread.

use std::sync::Arc;
use std::time::Duration;

use super::Communicator;
use super::handle::{Aborting, Handle, Status};
use crate::device::issuer::Issuer;
use crate::error::{Error, Result, StateError};
use crate::sys::nccl::calls;

/// The flags of `ncclCommRevoke`, for which NCCL defines none.
pub(super) const REVOKE_FLAGS: i32 = 0;
/// How long an abort waits for a running call to return, before it stops the call.
const CALL_LIMIT: Duration = Duration::from_millis(200);
/// How long to wait for an abort, which a running kernel can block.
const ABORT_LIMIT: Duration = Duration::from_secs(5);

impl Communicator {
    /// Returns a handle with which another thread can abort the communicator, for example while
    /// this thread waits for an operation that hangs.
    #[must_use]
    pub fn abort_handle(&self) -> AbortHandle {
        AbortHandle { handle: Arc::clone(&self.inner.handle) }
    }
}

/// Aborts a communicator from any thread.
///
/// ```no_run
/// # use std::time::Duration;
/// # use devcomm_host::{Communicator, Result, Stream};
/// # fn work(comm: &Communicator, stream: &Stream) -> Result<()> {
/// let watchdog = comm.abort_handle();
/// std::thread::spawn(move || {
///     std::thread::sleep(Duration::from_secs(60));
///     let _ = watchdog.abort();
/// });
/// stream.synchronize() // an error if the watchdog aborted first
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct AbortHandle {
    handle: Arc<Handle>,
}

impl AbortHandle {
    /// Ends the communicator. On this rank, a wait for its operations, or for other ranks in its
    /// methods, fails with [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded);
    /// a wait for a kernel that uses its device communicators fails with
    /// [`LaunchError::KernelAborted`](crate::LaunchError::KernelAborted). Idempotent. NCCL returns
    /// only after the CUDA graphs with operations of the communicator are destroyed; the rank's
    /// thread destroys them in [`Communicator::abort`] or [`Communicator::destroy`].
    ///
    /// A call in progress is stopped (`ncclCommRevoke`), and the communicator is freed once the
    /// call has returned: never while a thread may still use it. A communicator of another library
    /// ([`Communicator::from_raw`]) is only stopped, and freed by its owner.
    ///
    /// NCCL: `ncclCommAbort`.
    ///
    /// # Errors
    ///
    /// [`Error::Nccl`]; [`StateError::DeadlinePassed`](crate::StateError::DeadlinePassed) when the
    /// abort has not ended within 5 s: it continues in the background. [`Error::InvalidInput`] if
    /// the system has had no room for its thread for 2 s.
    #[doc(alias = "ncclCommAbort")]
    pub fn abort(&self) -> Result<()> {
        abort(&self.handle)
    }
}

/// Starts an abort on a new thread, unless the communicator has already ended. If there can be no
/// thread, the next abort or the communicator's drop tries again.
pub(super) fn start_abort(handle: &Arc<Handle>) -> Result<()> {
    if !handle.begin_abort() {
        return Ok(());
    }
    let aborted = Arc::clone(handle);
    let work = move || {
        let freed = free(&aborted);
        aborted.aborting().change(|aborting| *aborting = Aborting::Over(freed));
        Ok(())
    };
    let started = handle.machine().spawn("devcomm-abort", work);
    let failed = |_: &Error| handle.aborting().change(|aborting| *aborting = Aborting::No);
    started.inspect_err(failed).map(drop)
}

/// Frees an aborted communicator once no call uses it. A call that does not return soon is stopped;
/// one that does not return even then keeps the communicator allocated, and this thread waiting.
fn free(handle: &Handle) -> Result<()> {
    let unused = match handle.take_unused(Some(CALL_LIMIT)) {
        Err(Error::State(StateError::DeadlinePassed { .. })) => {
            stop(handle);
            handle.take_unused(None)?
        }
        taken => taken?,
    };
    let Some(comm) = unused else { return Ok(()) };
    // A foreign one would be freed a second time by its owner.
    let (name, call) = match handle.is_foreign() {
        true if handle.is_revoked() => return Ok(()),
        true => ("ncclCommRevoke", calls::comm_revoke(comm, REVOKE_FLAGS)),
        false => ("ncclCommAbort", calls::comm_abort(comm)),
    };
    // SAFETY: the communicator was taken out of its slot, and no call uses it.
    let code = unsafe { call.make(handle.nccl())? };
    handle.nccl().check(name, code, Some(handle.rank()))
}

/// Makes running calls of an aborted communicator return, without freeing it. NCCL refuses this for
/// a finalized one, and has no such call before 2.28.7.
fn stop(handle: &Handle) {
    let Some(comm) = handle.to_be_aborted().filter(|_| !handle.is_revoked()) else { return };
    // SAFETY: only this thread frees the communicator, later; NCCL allows a revocation during a
    // call: its purpose is to end running calls.
    let stopped = unsafe { calls::comm_revoke(comm, REVOKE_FLAGS).make(handle.nccl()) };
    let rank = handle.rank();
    let stopped = stopped.and_then(|code| handle.nccl().check("ncclCommRevoke", code, Some(rank)));
    match stopped {
        Ok(()) => handle.set_revoked(),
        Err(error) => tracing::warn!("a call of an aborted communicator may not return: {error}"),
    }
}

/// Waits for an abort in progress, with a limit: running kernels, undestroyed CUDA graphs and calls
/// that do not return block it. If another thread has begun it and could not start a thread for it,
/// this one starts it.
pub(super) fn wait_for_abort(handle: &Arc<Handle>) -> Result<()> {
    loop {
        let over = handle.aborting().wait(Some(ABORT_LIMIT), |aborting| {
            Ok(match aborting {
                Aborting::No => Some(None),
                Aborting::Running | Aborting::Late => None,
                Aborting::Over(result) => Some(Some(std::mem::replace(result, Ok(())))),
            })
        });
        let over = over.inspect_err(|_| {
            let mut aborting = handle.aborting().lock();
            if let Aborting::Running = *aborting {
                *aborting = Aborting::Late;
            }
        });
        match over? {
            Some(result) => return result,
            None if handle.is_aborted() => start_abort(handle)?,
            // It has ended without an abort.
            None => return Ok(()),
        }
    }
}

/// Aborts, and waits at most [`ABORT_LIMIT`].
fn abort(handle: &Arc<Handle>) -> Result<()> {
    start_abort(handle)?;
    wait_for_abort(handle)
}

/// Aborts a communicator that is no longer used, and only logs an error. Does not wait again after
/// a wait in vain.
pub(super) fn abort_and_log(handle: &Arc<Handle>) {
    let is_late = matches!(*handle.aborting().lock(), Aborting::Late);
    if !is_late {
        log(handle, abort(handle));
    }
}

/// Starts to abort a communicator that this thread or a call may use, and only logs an error.
pub(super) fn start_abort_and_log(handle: &Arc<Handle>) {
    log(handle, start_abort(handle));
}

fn log(handle: &Handle, aborted: Result<()>) {
    if let Err(error) = aborted {
        tracing::warn!("the communicator of rank {} was not aborted: {error}", handle.rank());
    }
}

impl Issuer for Handle {
    fn rank(&self) -> usize {
        self.rank()
    }

    fn is_blocking(&self) -> bool {
        self.is_blocking()
    }

    fn is_live(&self) -> bool {
        self.status() == Status::Live
    }

    fn state(&self) -> &'static str {
        self.status().name()
    }

    fn is_aborted(&self) -> bool {
        self.is_aborted()
    }

    fn ended(&self) -> Error {
        self.ended()
    }

    fn poll(&self) -> Result<bool> {
        match self.poll() {
            // What it has enqueued before its end is waited for in the streams.
            Err(Error::State(StateError::CommunicatorEnded { .. }))
                if self.status() == Status::Destroyed =>
            {
                Ok(true)
            }
            polled => polled,
        }
    }

    fn start_abort(self: Arc<Self>) {
        start_abort_and_log(&self);
    }
}

#[cfg(all(test, feature = "simulator"))]
#[path = "abort_tests.rs"]
mod tests;
