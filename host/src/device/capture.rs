//! What a capture collects for its graph.

use std::any::Any;
use std::rc::Rc;
use std::sync::Arc;

use super::abort::AbortFlag;
use super::issuer::Owner;

/// What the operations use that are being captured.
#[derive(Default)]
pub(crate) struct Capture {
    pub(super) owners: Vec<Rc<dyn Owner>>,
    pub(super) keep: Vec<Rc<dyn Any>>,
    /// Kernels that communicate, and the device communicator of each, once.
    pub(super) kernels: Vec<(&'static str, Arc<AbortFlag>)>,
}

impl Capture {
    pub(super) fn take_in_kernel(&mut self, name: &'static str, flag: Arc<AbortFlag>) {
        if !self.kernels.iter().any(|(_, own)| Arc::ptr_eq(own, &flag)) {
            self.kernels.push((name, flag));
        }
    }

    pub(super) fn take_in(&mut self, owner: &Rc<dyn Owner>, keep: Vec<Rc<dyn Any>>) {
        if !self.owners.iter().any(|own| Rc::ptr_eq(own, owner)) {
            self.owners.push(Rc::clone(owner));
        }
        self.keep.extend(keep);
    }
}
