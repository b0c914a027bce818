//! The operations in a stream that may not be done yet.

use std::sync::Arc;

use super::abort::AbortFlag;
use super::issuer::{Issuer, KeepAlive};

/// The operations in a stream, each registered after it was enqueued. A wait for the stream takes
/// those that were registered when it last asked whether the stream is idle: meanwhile another
/// thread may have enqueued more.
#[derive(Default)]
pub(super) struct Operations {
    /// The number of registrations so far: of two, the later one has the larger number.
    count: u64,
    /// Communicators whose operations may not be done yet.
    pending: Vec<(u64, Arc<dyn Issuer>)>,
    /// Abort flags of kernels that may still run.
    running: Vec<(u64, Arc<AbortFlag>)>,
    /// Memory and operators of operations that a non-blocking communicator may still enqueue.
    kept: Vec<(u64, KeepAlive)>,
}

impl Operations {
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    pub(super) fn pending(&self) -> Vec<Arc<dyn Issuer>> {
        without_numbers(&self.pending)
    }

    pub(super) fn running(&self) -> Vec<Arc<AbortFlag>> {
        without_numbers(&self.running)
    }

    /// Registers an operation of a communicator, and what it uses.
    pub(super) fn add(&mut self, issuer: Arc<dyn Issuer>, kept: Vec<KeepAlive>) {
        let number = self.next();
        self.kept.extend(kept.into_iter().map(|kept| (number, kept)));
        register(&mut self.pending, number, issuer);
    }

    /// Registers a kernel.
    pub(super) fn add_kernel(&mut self, flag: Arc<AbortFlag>) {
        let number = self.next();
        register(&mut self.running, number, flag);
    }

    fn next(&mut self) -> u64 {
        self.count += 1;
        self.count - 1
    }

    /// Takes those that were registered before `count` registrations.
    pub(super) fn take(&mut self, count: u64) -> Self {
        fn split<T>(all: &mut Vec<(u64, T)>, count: u64) -> Vec<(u64, T)> {
            all.extract_if(.., |(number, _)| *number < count).collect()
        }
        Self {
            count,
            pending: split(&mut self.pending, count),
            running: split(&mut self.running, count),
            kept: split(&mut self.kept, count),
        }
    }

    /// Takes the communicators.
    pub(super) fn take_pending(&mut self) -> Self {
        Self { pending: std::mem::take(&mut self.pending), ..Self::default() }
    }

    /// Takes the kernels.
    pub(super) fn take_running(&mut self) -> Self {
        Self { running: std::mem::take(&mut self.running), ..Self::default() }
    }
}

/// Registers `object` anew, as the last one.
fn register<T: ?Sized>(all: &mut Vec<(u64, Arc<T>)>, number: u64, object: Arc<T>) {
    match all.iter_mut().find(|(_, other)| Arc::ptr_eq(other, &object)) {
        Some((last, _)) => *last = number,
        None => all.push((number, object)),
    }
}

fn without_numbers<T: ?Sized>(all: &[(u64, Arc<T>)]) -> Vec<Arc<T>> {
    all.iter().map(|(_, object)| Arc::clone(object)).collect()
}
