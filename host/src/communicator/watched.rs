//! Calls that may never return.
//!
//! Making and ending communicators and what belongs to them means talking to every rank, and NCCL waits for a dead one for
//! ever. Such a call is made on a thread of its own, while this one looks after the health of the job. When a rank is lost,
//! the communicator is aborted, which makes NCCL's calls return; a thread that does not come back even then is left behind.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use crate::{Context, Error, Result};

/// How often the health of the job is looked at.
const PULSE: Duration = Duration::from_millis(5);
/// How long a call may take to return once its communicator was aborted.
const RESCUE_PATIENCE: Duration = Duration::from_secs(3);

/// Runs `work` on a thread with the context current. If a rank is lost meanwhile, calls `rescue`, waits a moment longer and
/// gives up.
pub(crate) fn watched<T: Send + 'static>(
    context: &Context,
    work: impl FnOnce() -> Result<T> + Send + 'static,
    rescue: impl FnOnce(),
) -> Result<T> {
    context.health().check()?;
    let (sender, receiver) = sync_channel(1);
    let binder = context.cuda().binder();
    let thread = move || {
        // Nobody listens any more to one that was left behind.
        let _ = sender.send(binder.bind().and_then(|()| work()));
    };
    std::thread::Builder::new()
        .name("devcomm-nccl".to_owned())
        .spawn(thread)
        .map_err(|error| Error::invalid(format!("a thread for NCCL cannot be started: {error}")))?;
    let lost = loop {
        match receiver.recv_timeout(PULSE) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::invalid("a thread that called NCCL panicked"));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Err(lost) = context.health().check() {
            break lost;
        }
    };
    rescue();
    if let Err(RecvTimeoutError::Timeout) = receiver.recv_timeout(RESCUE_PATIENCE) {
        tracing::warn!("a call of NCCL does not return and is left behind");
        // The thread goes on using it.
        std::mem::forget(context.clone());
    }
    Err(lost)
}
