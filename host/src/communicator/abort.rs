//! Aborting a communicator, from any thread.

use std::sync::Arc;
use std::time::Duration;

use super::Communicator;
use super::handle::{Handle, Status};
use crate::device::issuer::Issuer;
use crate::error::{Error, Result};
use crate::machine::Task;
use crate::sys::nccl::calls;

/// How long to wait for an abort, which can hang behind a kernel.
const ABORT_LIMIT: Duration = Duration::from_secs(5);

impl Communicator {
    /// What other threads can abort the communicator with, while this one waits for an operation
    /// that hangs.
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
/// stream.synchronize() // an error if the watchdog was faster
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct AbortHandle {
    handle: Arc<Handle>,
}

impl AbortHandle {
    /// Ends the communicator: what waits for its operations, on this rank, returns with
    /// [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded), and what waits for
    /// kernels of its device communicators with
    /// [`LaunchError::KernelAborted`](crate::LaunchError::KernelAborted). Idempotent. NCCL returns
    /// when the graphs with operations of the communicator are gone, too, which the rank's thread
    /// closes by [`Communicator::abort`] or [`Communicator::destroy`].
    ///
    /// NCCL: `ncclCommAbort`.
    ///
    /// # Errors
    ///
    /// [`Error::Nccl`]; [`StateError::DeadlinePassed`](crate::StateError::DeadlinePassed) when NCCL
    /// has not come back within 5 s: it continues in the background.
    #[doc(alias = "ncclCommAbort")]
    pub fn abort(&self) -> Result<()> {
        abort(&self.handle)
    }
}

/// Begins an abort on a thread of its own, unless the communicator was ended already.
pub(super) fn start_abort(handle: &Arc<Handle>) -> Option<Result<Task<()>>> {
    if handle.status() >= Status::Destroyed {
        return None;
    }
    let comm = handle.take_for_abort()?;
    let aborted = Arc::clone(handle);
    let work = move || {
        // SAFETY: taken out of the slot, so that no other call begins with it; NCCL allows an abort
        // while one is running.
        let code = unsafe { calls::comm_abort(comm).make(aborted.nccl())? };
        aborted.nccl().check("ncclCommAbort", code, Some(aborted.rank()))
    };
    Some(handle.machine().spawn("devcomm-abort", work))
}

/// Waits with a timeout: an abort hangs behind a kernel that does not end, and behind graphs.
pub(super) fn wait_for_abort(aborting: &Task<()>) -> Result<()> {
    aborting.wait(Some(ABORT_LIMIT), || Ok(()))?
}

/// Aborts, and waits with a timeout.
fn abort(handle: &Arc<Handle>) -> Result<()> {
    start_abort(handle).map_or(Ok(()), |aborting| wait_for_abort(&aborting?))
}

/// Aborts a communicator that is not used any more.
pub(super) fn abort_in_background(handle: &Arc<Handle>) {
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
        abort_in_background(&self);
    }
}
