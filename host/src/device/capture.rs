//! The objects that captured operations use, and that the graph must keep alive.

use std::sync::Arc;

use super::abort::AbortFlag;
use super::context::Context;
use super::enqueues::Target;
use super::issuer::{Issuer, KeepAlive, Owner};
use super::order::LastOperations;
use super::stream::Stream;
use crate::error::Result;

/// What the operations captured so far use.
#[derive(Default)]
pub(crate) struct Capture {
    /// The driver's number of the capture, once it has begun.
    pub(super) id: Option<u64>,
    pub(super) owners: Vec<Arc<dyn Owner>>,
    pub(super) kept: Vec<KeepAlive>,
    /// One entry per device communicator: its flag, and the first kernel launched with it.
    pub(super) kernels: Vec<(&'static str, Arc<AbortFlag>)>,
    /// The communicators of kernels' arguments.
    pub(super) kernel_communicators: Vec<Arc<dyn Issuer>>,
    /// Whether there are kernel launches.
    pub(super) launches: bool,
    /// The operations that are ordered.
    pub(super) last_operations: LastOperations,
    pub(super) followed: Vec<Followed>,
}

/// What the host knows of an object changes as its captured operations run.
pub(super) struct Followed {
    /// Fails if the capture must not end here.
    pub(super) may_end: Box<dyn Fn() -> Result<()> + Send>,
    /// Fails if the graph must not be launched now.
    pub(super) may_launch: Box<dyn Fn() -> Result<()> + Send>,
    pub(super) is_launched: Box<dyn Fn() + Send>,
}

impl Capture {
    pub(super) fn add_kernel(&mut self, name: &'static str, flag: Arc<AbortFlag>) {
        if !self.kernels.iter().any(|(_, own)| Arc::ptr_eq(own, &flag)) {
            self.kernels.push((name, flag));
        }
    }

    pub(super) fn add(&mut self, owner: &Arc<dyn Owner>, kept: Vec<KeepAlive>) {
        if !self.owners.iter().any(|own| Arc::ptr_eq(own, owner)) {
            self.owners.push(Arc::clone(owner));
        }
        self.kept.extend(kept);
    }
}

impl Stream {
    /// Returns the number of this thread's capture, as [`capture_id`](Self::capture_id) does, if
    /// the stream's work goes to its graph.
    ///
    /// # Errors
    ///
    /// Those of [`is_capturing`](Self::is_capturing).
    #[doc(hidden)]
    pub fn own_capture_id(&self) -> Result<Option<u64>> {
        let Some(id) = self.context().with_capture(|capture| capture.id) else { return Ok(None) };
        Ok(if self.target()? == Target::Graph { id } else { None })
    }
}

impl Context {
    /// Adds to this thread's capture what follows the operations of an object, which are
    /// [ordered](super::StreamOrder). The capture fails if `may_end` does when it ends. Each launch
    /// of the graph calls `may_launch` before it enqueues anything, and fails with its error, and
    /// `is_launched` after it, both within its [`Turn`](super::Turn).
    #[doc(hidden)]
    pub fn follow_capture(
        &self,
        may_end: impl Fn() -> Result<()> + Send + 'static,
        may_launch: impl Fn() -> Result<()> + Send + 'static,
        is_launched: impl Fn() + Send + 'static,
    ) {
        let (may_end, may_launch) = (Box::new(may_end), Box::new(may_launch));
        let followed = Followed { may_end, may_launch, is_launched: Box::new(is_launched) };
        self.with_capture(|capture| capture.followed.push(followed));
    }
}
