//! Calls of NCCL as closures, from [`calls`](super::calls). A call can be made at once, on another
//! thread (which is abandoned if the call hangs), or at the end of a group.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};

use devcomm_sys::nccl::{CommProperties, RawComm, RawUniqueId, SimInfo};
use devcomm_types::DevComm;

use super::Nccl;
use crate::error::Result;

/// An `ncclComm_t`. NCCL allows any thread to use it, one at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CommPtr(pub(super) RawComm);

// SAFETY: an opaque handle. Calls are made under the communicator's lock.
unsafe impl Send for CommPtr {}

/// An `ncclComm_t` shared by threads. NULL before it is created and after it has ended.
/// Acquire and release make visible, to a thread that gets it, what NCCL wrote to create it.
#[derive(Debug, Default)]
pub(crate) struct CommSlot(AtomicPtr<c_void>);

impl CommSlot {
    pub(crate) fn new(comm: CommPtr) -> Self {
        Self(AtomicPtr::new(comm.0))
    }

    /// Returns the slot of a communicator that another part of the program made.
    pub(crate) fn from_raw(raw: *mut c_void) -> Self {
        Self(AtomicPtr::new(raw))
    }

    pub(crate) fn get(&self) -> Option<CommPtr> {
        let raw = self.0.load(Ordering::Acquire);
        (!raw.is_null()).then_some(CommPtr(raw))
    }

    /// Empties the slot. Only the caller that gets the communicator may destroy or abort it.
    pub(crate) fn take(&self) -> Option<CommPtr> {
        let raw = self.0.swap(std::ptr::null_mut(), Ordering::AcqRel);
        (!raw.is_null()).then_some(CommPtr(raw))
    }

    pub(crate) fn address(&self) -> *mut c_void {
        self.0.load(Ordering::Acquire)
    }
}

/// Memory to which NCCL writes a result, perhaps after the call has returned: at the end of a
/// group, or in the background. Shared by the call and the owner of the result.
#[derive(Debug)]
pub(crate) struct Out<T>(Arc<UnsafeCell<T>>);

// SAFETY: plain values and opaque handles. Words are read atomically. Structs are read once the
// call that has the address is complete, which the communicator's state (busy, in a group, in
// progress) tells.
unsafe impl<T: Written> Send for Out<T> {}
// SAFETY: as above; owners on several threads only read.
unsafe impl<T: Written> Sync for Out<T> {}

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T: Written> Out<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Arc::new(UnsafeCell::new(value)))
    }

    pub(crate) fn as_ptr(&self) -> *mut T {
        self.0.get()
    }

    /// Returns the current value; the result once the call that writes it is complete. A struct is
    /// read only then.
    pub(crate) fn get(&self) -> T {
        // SAFETY: the cell is live; nothing writes a struct now, by the rule above.
        unsafe { T::read(self.0.get()) }
    }
}

/// A type of results that NCCL writes.
pub(crate) trait Written: Copy {
    /// Reads what NCCL wrote.
    ///
    /// # Safety
    ///
    /// `at` is live and aligned. Only NCCL writes it; a struct is not being written now.
    unsafe fn read(at: *mut Self) -> Self;
}

/// Words, which threads may read while a call that was abandoned, or is in the background, writes
/// them.
macro_rules! word {
    ($($word:ty, $atomic:ty;)*) => {
        $(impl Written for $word {
            unsafe fn read(at: *mut Self) -> Self {
                // SAFETY: the word is live by the contract; this program writes it atomically only.
                unsafe { <$atomic>::from_ptr(at) }.load(Ordering::Acquire)
            }
        })*
    };
}

word! {
    c_int, AtomicI32;
    u64, AtomicU64;
    RawComm, AtomicPtr<c_void>;
}

/// Structs, which are read only after the call that writes them.
macro_rules! structs {
    ($($name:ty),*) => {
        $(impl Written for $name {
            unsafe fn read(at: *mut Self) -> Self {
                // SAFETY: by the contract, the struct is live and not being written; C code wrote
                // it.
                unsafe { at.read_volatile() }
            }
        })*
    };
}

structs!(CommProperties, DevComm, RawUniqueId, SimInfo);

impl Out<RawComm> {
    /// Returns the communicator that a call made, if it made one.
    pub(crate) fn communicator(&self) -> Option<CommPtr> {
        let raw = self.get();
        (!raw.is_null()).then_some(CommPtr(raw))
    }
}

/// A plain value with device addresses, as [`DevComm`](devcomm_types::DevComm).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addresses<T>(pub(crate) T);

// SAFETY: the host does not follow the addresses.
unsafe impl<T: Copy> Send for Addresses<T> {}
// SAFETY: the host does not follow the addresses, and a shared value is not written.
unsafe impl<T: Copy> Sync for Addresses<T> {}

type Body = Box<dyn FnOnce(&Nccl) -> Result<c_int> + Send>;

/// One call with its arguments.
pub(crate) struct Call {
    pub(crate) operation: &'static str,
    body: Body,
}

impl Call {
    /// # Safety
    ///
    /// Under the contract of [`make`](Self::make), `body` upholds the contracts of the functions
    /// that it calls.
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
    /// The communicator and the handles among the arguments are live and have no other user
    /// meanwhile; the communicator's device is current; the memory stays allocated until the
    /// operation is done.
    pub(crate) unsafe fn make(self, nccl: &Nccl) -> Result<c_int> {
        (self.body)(nccl)
    }
}
