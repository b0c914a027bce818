//! Calls of NCCL as values, made by [`calls`](super::calls). One and the same call is made at once,
//! or on a thread that may be left behind when it hangs, or when a group ends.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::Nccl;
use crate::error::Result;
use devcomm_sys::nccl::RawComm;

/// A communicator of NCCL. NCCL allows any thread to use it, one at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CommPtr(pub(super) RawComm);

// SAFETY: an opaque handle. Who makes a call holds the communicator's lock .
unsafe impl Send for CommPtr {}

/// Where a communicator's address is kept for all its users, of any thread. Empty before it is made
/// and after it has ended.
#[derive(Debug, Default)]
pub(crate) struct CommSlot(AtomicPtr<c_void>);

impl CommSlot {
    pub(crate) fn new(comm: CommPtr) -> Self {
        Self(AtomicPtr::new(comm.0))
    }

    /// Of a communicator that another part of the program made.
    pub(crate) fn from_raw(raw: *mut c_void) -> Self {
        Self(AtomicPtr::new(raw))
    }

    pub(crate) fn get(&self) -> Option<CommPtr> {
        let raw = self.0.load(Ordering::Acquire);
        (!raw.is_null()).then_some(CommPtr(raw))
    }

    /// Empties the slot: only who gets the communicator from here may end it.
    pub(crate) fn take(&self) -> Option<CommPtr> {
        let raw = self.0.swap(std::ptr::null_mut(), Ordering::AcqRel);
        (!raw.is_null()).then_some(CommPtr(raw))
    }

    pub(crate) fn address(&self) -> *mut c_void {
        self.0.load(Ordering::Acquire)
    }
}

/// A place that NCCL writes a result to, perhaps after the call has returned: at the end of a
/// group, or in the background. It stays where it is as long as a call or its owner needs it.
#[derive(Debug)]
pub(crate) struct Out<T>(Arc<UnsafeCell<T>>);

// SAFETY: plain values and opaque handles. NCCL writes while the call that has the address is going
// on, owners read when it is over; the state of the communicator (busy, in a group, in progress)
// tells them apart.
unsafe impl<T: Copy> Send for Out<T> {}

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T: Copy> Out<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Arc::new(UnsafeCell::new(value)))
    }

    pub(crate) fn as_ptr(&self) -> *mut T {
        self.0.get()
    }

    /// What is there now; of use when the call that writes it is over.
    pub(crate) fn get(&self) -> T {
        // SAFETY: the cell is live, and by the rule above nobody writes it now; volatile, since it
        // is C that wrote it.
        unsafe { self.0.get().read_volatile() }
    }
}

impl Out<RawComm> {
    /// The communicator that a call made, if it made one.
    pub(crate) fn communicator(&self) -> Option<CommPtr> {
        let raw = self.get();
        (!raw.is_null()).then_some(CommPtr(raw))
    }
}

type Body = Box<dyn FnOnce(&Nccl) -> Result<c_int> + Send>;

/// One call with its arguments.
pub(crate) struct Call {
    pub(crate) operation: &'static str,
    body: Body,
}

impl Call {
    /// # Safety
    ///
    /// Made while the contract of [`make`](Self::make) holds, `body` keeps to the contract of the
    /// functions that it calls.
    pub(super) unsafe fn new(
        operation: &'static str,
        body: impl FnOnce(&Nccl) -> Result<c_int> + Send + 'static,
    ) -> Self {
        Self { operation, body: Box::new(body) }
    }

    /// Makes the call on this thread and returns NCCL's code.
    ///
    /// # Safety
    ///
    /// The communicator and the handles that the call was made with are live and used by nobody
    /// else meanwhile; its device is current; the memory stays allocated until the stream has
    /// passed the operation.
    pub(crate) unsafe fn make(self, nccl: &Nccl) -> Result<c_int> {
        (self.body)(nccl)
    }
}
