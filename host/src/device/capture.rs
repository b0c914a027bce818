//! The objects that captured operations use, and that the graph must keep alive.

use std::sync::{Arc, OnceLock};

use super::abort::AbortFlag;
use super::issuer::{Issuer, KeepAlive, Owner};
use super::order::LastOperations;

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
    pub(super) outcome: Outcome,
}

/// Whether the capture has become a graph: empty until it has ended.
#[derive(Default)]
pub(crate) struct Outcome(pub(super) Arc<OnceLock<bool>>);

impl Drop for Outcome {
    fn drop(&mut self) {
        // It is set already if there is a graph.
        let _ = self.0.set(false);
    }
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
