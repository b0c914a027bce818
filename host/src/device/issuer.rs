//! The traits by which streams, graphs and the health of the job reach communicators, which are a
//! layer above.

use std::rc::Weak;
use std::sync::Arc;

use crate::error::{Error, Result};

/// What enqueues operations to streams, as a wait for a stream sees it. Any thread may end it.
pub(crate) trait Issuer: Send + Sync {
    fn rank(&self) -> usize;

    /// Whether its operations are in the stream when the calls that enqueue them return.
    fn is_blocking(&self) -> bool;

    fn is_live(&self) -> bool;

    /// Whether its operations were cut short.
    fn is_aborted(&self) -> bool;

    /// Why it cannot be used.
    fn ended(&self) -> Error;

    /// Whether the operations in the background are over, or the error of one that failed.
    fn poll(&self) -> Result<bool>;

    /// Ends it without asking the other ranks.
    fn abort(self: Arc<Self>);

    fn require_live(&self) -> Result<()> {
        if self.is_live() { Ok(()) } else { Err(self.ended()) }
    }
}

/// What keeps an issuer on its own thread.
pub(crate) trait Owner {
    fn issuer(&self) -> Arc<dyn Issuer>;

    /// Has `resource` closed before the issuer ends.
    fn adopt(&self, resource: Weak<dyn Resource>);
}

/// Something that is closed before its issuer ends.
pub(crate) trait Resource {
    /// Idempotent.
    fn close(&self) -> Result<()>;
}
