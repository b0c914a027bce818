//! Traits by which streams, graphs and [`Health`](super::Health) use communicators: the device
//! module must not depend on the communicator module.

use std::any::Any;
use std::sync::{Arc, Weak};

use crate::error::{Error, Result, StateError};

/// A reference that keeps alive what an operation uses.
pub(crate) type KeepAlive = Arc<dyn Any + Send + Sync>;

/// A communicator, which issues (enqueues) operations to streams. Any thread may abort it.
pub(crate) trait Issuer: Send + Sync {
    fn rank(&self) -> usize;

    /// Returns whether calls return only after their operations are in the stream (NCCL's blocking
    /// mode).
    fn is_blocking(&self) -> bool;

    fn is_live(&self) -> bool;

    /// Returns its state: live, suspended, revoked, finalized, destroyed or aborted.
    fn state(&self) -> &'static str;

    /// Returns whether it was aborted, so that its operations may be incomplete.
    fn is_aborted(&self) -> bool;

    /// Returns the error of a call after the communicator has ended.
    fn ended(&self) -> Error;

    /// Returns whether no operation is in progress (`ncclInProgress`), or the error of one that
    /// failed.
    fn poll(&self) -> Result<bool>;

    /// Aborts it on this rank alone, as `ncclCommAbort` does, in the background.
    fn start_abort(self: Arc<Self>);

    fn require_live(&self) -> Result<()> {
        if self.is_live() { Ok(()) } else { Err(self.ended()) }
    }
}

/// The owner of an [`Issuer`] and of what was made with it.
pub(crate) trait Owner: Send + Sync {
    fn issuer(&self) -> Arc<dyn Issuer>;

    /// Registers `resource` to be closed before the issuer ends.
    fn adopt(&self, resource: Weak<dyn Resource>);
}

/// An object that is closed before its issuer ends.
pub(crate) trait Resource: Send + Sync {
    /// Returns what it is, for messages: "the window".
    fn name(&self) -> &'static str;

    /// Returns whether it is still to be closed.
    fn is_open(&self) -> bool;

    /// Closes it. Idempotent.
    fn close(&self) -> Result<()>;

    /// Does the same, while its issuer goes on: if a graph may use it, it ends with the graph.
    fn close_or_hold(&self) -> Result<()> {
        self.close()
    }

    /// Fails if it is closed. `rank` is for the message.
    fn require_open(&self, rank: usize) -> Result<()> {
        if self.is_open() {
            return Ok(());
        }
        Err(StateError::Closed { what: self.name(), rank }.into())
    }
}
