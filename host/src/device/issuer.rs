//! Traits by which streams, graphs and [`Health`](super::Health) use communicators: the device
//! module must not depend on the communicator module.

use std::rc::Weak;
use std::sync::Arc;

use crate::error::{Error, Result};

/// A communicator, which issues (enqueues) operations to streams. Any thread may abort it.
pub(crate) trait Issuer: Send + Sync {
    fn rank(&self) -> usize;

    /// Whether calls return only after their operations are in the stream (NCCL's blocking mode).
    fn is_blocking(&self) -> bool;

    fn is_live(&self) -> bool;

    /// Whether it was aborted, so that its operations may be incomplete.
    fn is_aborted(&self) -> bool;

    /// The error of a call after the communicator has ended.
    fn ended(&self) -> Error;

    /// Whether no operation is in progress (`ncclInProgress`), or the error of one that failed.
    fn poll(&self) -> Result<bool>;

    /// Aborts it on this rank alone, as `ncclCommAbort` does.
    fn abort(self: Arc<Self>);

    /// As [`abort`](Self::abort), which goes on in the background.
    fn start_abort(self: Arc<Self>);

    fn require_live(&self) -> Result<()> {
        if self.is_live() { Ok(()) } else { Err(self.ended()) }
    }
}

/// The owner of an [`Issuer`] on the rank's thread.
pub(crate) trait Owner {
    fn issuer(&self) -> Arc<dyn Issuer>;

    /// Registers `resource` to be closed before the issuer ends.
    fn adopt(&self, resource: Weak<dyn Resource>);
}

/// Something that is closed before its issuer ends.
pub(crate) trait Resource {
    /// Whether it is still to be closed.
    fn is_open(&self) -> bool;

    /// Closes it. Idempotent.
    fn close(&self) -> Result<()>;
}
