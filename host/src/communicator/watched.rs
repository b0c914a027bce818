//! Calls that may never return, made so that the rank does not hang.
//!
//! Making and ending communicators and what belongs to them takes every rank, and NCCL waits for a
//! dead one forever. Such a call is made on a thread of its own, while this one watches the health
//! of the job. When a rank is lost, the communicator is aborted, which makes NCCL's calls return; a
//! thread that does not return even then is leaked. A simulated NCCL detects a call that can never
//! return, and is called on the rank's own thread.

use std::time::Duration;

use crate::device::Context;
use crate::error::Result;

/// How long a call may take to return once its communicator was aborted.
const RESCUE_TIMEOUT: Duration = Duration::from_secs(3);

/// Runs `work` on a thread with the context current. If a rank is lost meanwhile, calls `rescue`,
/// waits a moment longer and gives up.
pub(crate) fn watched<T: Send + 'static>(
    context: &Context,
    work: impl FnOnce() -> Result<T> + Send + 'static,
    rescue: impl FnOnce(),
) -> Result<T> {
    context.health().check()?;
    if context.machine().is_simulated() {
        return work().map_err(|error| match context.health().check() {
            Ok(()) => error,
            Err(lost) => {
                rescue();
                lost
            }
        });
    }
    let binder = context.cuda().binder();
    let work = move || binder.bind().and_then(|()| work());
    let task = context.machine().spawn("devcomm-nccl", work)?;
    let lost = match task.wait(None, || context.health().check()) {
        Ok(result) => return result,
        Err(lost) => lost,
    };
    rescue();
    if task.wait(Some(RESCUE_TIMEOUT), || Ok(())).is_err() {
        tracing::warn!("a call of NCCL does not return; its thread is leaked");
        // The thread continues using it.
        std::mem::forget(context.clone());
    }
    Err(lost)
}
