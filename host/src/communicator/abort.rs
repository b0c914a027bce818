//! Aborting a communicator, from any thread.

use std::sync::Arc;
use std::time::Duration;

use super::Communicator;
use super::handle::{Handle, Status};
use crate::device::issuer::Issuer;
use crate::error::{Error, Result};
use crate::machine::Task;
use crate::sys::nccl::calls;

/// How long to wait for an abort, which a running kernel can block.
const ABORT_LIMIT: Duration = Duration::from_secs(5);

impl Communicator {
    /// A handle with which another thread can abort the communicator, for example while this thread
    /// waits for an operation that hangs.
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
    /// Ends the communicator. On this rank, waits for its operations, and for other ranks in its
    /// methods, fail with [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded);
    /// waits for kernels that use its device communicators fail with
    /// [`LaunchError::KernelAborted`](crate::LaunchError::KernelAborted). Idempotent. NCCL returns
    /// only after the CUDA graphs with operations of the communicator are destroyed; the rank's
    /// thread destroys them in [`Communicator::abort`] or [`Communicator::destroy`].
    ///
    /// NCCL: `ncclCommAbort`.
    ///
    /// # Errors
    ///
    /// [`Error::Nccl`]; [`StateError::DeadlinePassed`](crate::StateError::DeadlinePassed) when NCCL
    /// has not returned within 5 s: the abort continues in the background.
    #[doc(alias = "ncclCommAbort")]
    pub fn abort(&self) -> Result<()> {
        abort(&self.handle)
    }
}

/// Starts an abort on a new thread, unless the communicator has already ended.
pub(super) fn start_abort(handle: &Arc<Handle>) -> Option<Result<Task<()>>> {
    if handle.status() >= Status::Destroyed {
        return None;
    }
    let comm = handle.take_for_abort()?;
    let aborted = Arc::clone(handle);
    let work = move || {
        // SAFETY: the communicator was taken out of its slot, so no other call can start on it;
        // NCCL allows an abort during a call.
        let code = unsafe { calls::comm_abort(comm).make(aborted.nccl())? };
        aborted.nccl().check("ncclCommAbort", code, Some(aborted.rank()))
    };
    Some(handle.machine().spawn("devcomm-abort", work))
}

/// Waits with a timeout: running kernels and undestroyed CUDA graphs block `ncclCommAbort`.
pub(super) fn wait_for_abort(aborting: &Task<()>) -> Result<()> {
    aborting.wait(Some(ABORT_LIMIT), || Ok(()))?
}

/// Aborts, and waits at most [`ABORT_LIMIT`].
fn abort(handle: &Arc<Handle>) -> Result<()> {
    start_abort(handle).map_or(Ok(()), |aborting| wait_for_abort(&aborting?))
}

/// Aborts a communicator that is no longer used, and only logs an error.
pub(super) fn abort_and_log(handle: &Arc<Handle>) {
    if let Err(error) = abort(handle) {
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

    fn is_aborted(&self) -> bool {
        self.is_aborted()
    }

    fn ended(&self) -> Error {
        self.ended()
    }

    fn poll(&self) -> Result<bool> {
        self.poll()
    }

    fn abort(self: Arc<Self>) {
        abort_and_log(&self);
    }

    fn start_abort(self: Arc<Self>) {
        // The task goes on without its handle.
        if let Some(Err(error)) = start_abort(&self) {
            tracing::warn!("the communicator of rank {} was not aborted: {error}", self.rank());
        }
    }
}
