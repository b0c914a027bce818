//! Communicators, as devices see them: streams, graphs and the health of the job know no more of
//! them than this.

use std::rc::Weak;
use std::sync::Arc;

use crate::error::{Error, Result};

/// What enqueues operations to streams, as whoever waits for a stream sees it. Any thread may end
/// it.
pub(crate) trait Issuer: Send + Sync {
    fn rank(&self) -> usize;

    /// Whether its operations are in the stream when the calls that enqueue them return.
    fn is_blocking(&self) -> bool;

    fn is_live(&self) -> bool;

    /// Whether its operations were cut short.
    fn is_aborted(&self) -> bool;

    /// Why it is of no use.
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
