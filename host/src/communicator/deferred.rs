//! A call of an open group, and what it uses.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use super::Communicator;
use crate::device::issuer::Resource;
use crate::device::{KeepAlive, Stream};
use crate::error::Result;
use crate::sys::nccl::call::Call;

/// The state of a deferred call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallState {
    /// Not made yet: its group is still open.
    Deferred,
    /// Successful; a non-blocking communicator may still be in progress.
    Made,
    /// Failed, or never made.
    Failed,
}

/// The state of a call, shared by the call and the object that it creates. Results of the call are
/// read after it is [made](CallState::Made).
#[derive(Clone)]
pub(super) struct SharedState(Arc<Mutex<CallState>>);

impl SharedState {
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new(CallState::Deferred)))
    }

    pub(super) fn get(&self) -> CallState {
        *self.0.lock()
    }

    pub(super) fn set(&self, state: CallState) {
        *self.0.lock() = state;
    }
}

/// The memory of a send or a receive.
pub(super) struct Exchanged {
    /// The addresses of its bytes.
    pub bytes: Range<u64>,
    pub is_received: bool,
    /// Whether the peer is the rank itself.
    pub is_own: bool,
}

/// A call that is made when its group ends.
pub(super) struct DeferredCall {
    pub communicator: Communicator,
    pub call: Call,
    /// The call with its terms.
    pub description: String,
    /// Whether the ranks compare the call before they make it.
    pub compares: bool,
    /// The stream of an operation; `None` for a call that waits for all ranks, such as a
    /// registration.
    pub stream: Option<Stream>,
    /// The memory and handles that the call uses.
    pub uses: Uses,
    pub state: SharedState,
}

/// The objects that an operation uses.
#[derive(Default)]
pub(super) struct Uses {
    /// Kept alive until the operation is done.
    pub(super) kept: Vec<KeepAlive>,
    /// Kept alive too; must be open when the operation is enqueued.
    pub(super) open: Vec<Arc<dyn Resource>>,
    /// The memory of the operation, if it is a send or a receive.
    pub(super) exchanged: Option<Exchanged>,
}

impl Uses {
    pub(super) fn keeping(kept: KeepAlive) -> Self {
        Self { kept: vec![kept], ..Self::default() }
    }

    /// Fails if another thread has closed one of the resources.
    pub(super) fn require_open(&self, rank: usize) -> Result<()> {
        self.open.iter().try_for_each(|resource| resource.require_open(rank))
    }

    /// Returns all objects, to be kept alive.
    pub(super) fn kept(&self) -> Vec<KeepAlive> {
        let mut kept = self.kept.clone();
        if !self.open.is_empty() {
            kept.push(Arc::new(self.open.clone()));
        }
        kept
    }
}
