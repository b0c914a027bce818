//! Makes NCCL calls that may never return without hanging the rank.
//!
//! NCCL calls that create or end communicators, windows and device communicators wait for every
//! rank, for a dead one forever. Such a call runs on a separate thread, while the rank's thread
//! checks the health of the job. When a rank is lost, or the job's deadline has passed, the
//! communicator is aborted, which makes the call return; if it does not return even then, its
//! thread is leaked. The simulated NCCL detects a call that can never return, so it is called on
//! the rank's own thread.

use std::time::Duration;

use crate::device::Context;
use crate::device::recorder::Operation;
use crate::error::{Error, Result, StateError};
use crate::machine::uninterrupted;

/// How long a call may take to return after its communicator was aborted.
const RETURN_TIMEOUT: Duration = Duration::from_secs(3);

/// Runs `work`, a call of `operation`, on a thread with the context current. If a rank is lost
/// meanwhile or the deadline passes, calls `abort`, waits at most [`RETURN_TIMEOUT`] longer and
/// fails.
pub(crate) fn watched<T: Send + 'static>(
    context: &Context,
    operation: &'static str,
    work: impl FnOnce() -> Result<T> + Send + 'static,
    abort: impl FnOnce(),
) -> Result<T> {
    context.check_health()?;
    let _call = context.recorder().begin(Operation::Nccl(operation.into()));
    if context.machine().is_simulated() {
        return work().map_err(|error| match context.check_health() {
            Ok(()) => error,
            Err(lost) => {
                abort();
                lost
            }
        });
    }
    let binder = context.cuda().binder();
    let work = move || binder.bind().and_then(|()| work());
    let task = context.machine().spawn("devcomm-nccl", work)?;
    let lost = match task.wait(context.deadline(), || context.check_health()) {
        Ok(result) => return result,
        Err(Error::State(StateError::DeadlinePassed { waited })) => {
            context.recorder().print();
            StateError::NotReturned { operation, waited }.into()
        }
        Err(lost) => lost,
    };
    abort();
    // Also after an interrupt (Ctrl-C), which may be what ended the first wait.
    if uninterrupted(|| task.wait(Some(RETURN_TIMEOUT), || Ok(()))).is_err() {
        tracing::warn!("an NCCL call does not return; its thread is leaked");
        // The leaked thread still uses the context.
        std::mem::forget(context.clone());
    }
    Err(lost)
}
