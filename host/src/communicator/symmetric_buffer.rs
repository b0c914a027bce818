//! Device memory that NCCL can share between ranks.

use std::marker::PhantomData;
use std::sync::Arc;

use devcomm_types::{Element, IntoArg, Slice};

use super::{Communicator, Library};
use crate::device::{Buffer, Context, CreationTime, DeviceSlice};
use crate::error::{Error, Result};
use crate::sys::nccl::query::Allocation;

/// `len` elements of device memory from `ncclMemAlloc`, zeroed. Clones share the memory.
///
/// The methods that copy and fill first wait for this rank's streams, so they see what earlier
/// launches wrote and do not overlap work on this GPU. They do not wait for kernels of other ranks
/// that may still write to this memory; that needs a barrier.
///
/// After the last clone, [`Window`](crate::Window), [`DeviceSlice`] and [`Graph`](crate::Graph)
/// that uses the memory is dropped, it is freed when this rank's streams are idle: at once, or if
/// they are still busy after 100 ms, at a later drop or allocation, or when the rank's function has
/// ended. If they are not idle 10 s later, or cannot become idle (a rank is lost, a deadline was
/// missed), the memory stays allocated until the process ends.
///
/// NCCL: `ncclMemAlloc`, `ncclMemFree`.
#[doc(alias = "ncclMemAlloc")]
#[doc(alias = "ncclMemFree")]
pub struct SymmetricBuffer<T: Element> {
    memory: Arc<Memory>,
    len: usize,
    element: PhantomData<T>,
}

/// An allocation that is freed with its last user.
struct Memory {
    /// `None` only while dropping.
    allocation: Option<Allocation>,
    context: Context,
    library: Library,
    created_at: CreationTime,
}

impl Communicator {
    /// Allocates `len` elements of device memory, zeroed, on this rank only. Not collective.
    ///
    /// NCCL: `ncclMemAlloc`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a length of 0,
    /// [`WorldError::RankLost`](crate::WorldError::RankLost),
    /// [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded), [`Error::Nccl`].
    #[doc(alias = "ncclMemAlloc")]
    pub fn mem_alloc<T: Element>(&self, len: usize) -> Result<SymmetricBuffer<T>> {
        self.refuse_ended()?;
        self.bind()?;
        SymmetricBuffer::new(self.library(), self.context(), len)
    }
}

impl<T: Element> SymmetricBuffer<T> {
    /// Allocates on the context's GPU. [`Communicator::mem_alloc`](crate::Communicator::mem_alloc)
    /// does the same.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a length of 0,
    /// [`WorldError::RankLost`](crate::WorldError::RankLost), [`Error::Nccl`];
    /// [`StateError::Capturing`](crate::StateError::Capturing) while a stream of the context is
    /// captured.
    pub fn new(library: &Library, context: &Context, len: usize) -> Result<Self> {
        let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= isize::MAX as usize);
        let bytes = match bytes {
            None => {
                return Err(Error::invalid(format!("{len} elements of {} are too many", T::NAME)));
            }
            Some(0) => return Err(Error::invalid("an allocation of 0 elements")),
            Some(bytes) => bytes,
        };
        context.refuse_capturing("device memory is allocated")?;
        context.check_health()?;
        context.free_postponed();
        context.cuda().bind()?;
        let allocation = Some(library.nccl().alloc(bytes)?);
        let (library, created_at) = (library.clone(), context.creation_time());
        let memory = Memory { allocation, context: context.clone(), library, created_at };
        let buffer = Self { memory: Arc::new(memory), len, element: PhantomData };
        buffer.device_slice().fill_new(0)?;
        Ok(buffer)
    }

    /// Returns the number of elements; never 0.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the size in bytes.
    #[must_use]
    pub fn byte_len(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Returns the device address of the first element; valid on this GPU while the memory is
    /// allocated.
    #[must_use]
    pub fn device_address(&self) -> u64 {
        self.memory.allocation.as_ref().map_or(0, Allocation::address)
    }

    /// Copies `data` to the first `data.len()` elements.
    ///
    /// # Errors
    ///
    /// The errors are those of [`DeviceSlice::copy_from_host`].
    pub fn copy_from_host(&self, data: &[T]) -> Result<()> {
        self.device_slice().copy_from_host(data)
    }

    /// Copies the first `data.len()` elements to `data`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`DeviceSlice::copy_to_host`].
    pub fn copy_to_host(&self, data: &mut [T]) -> Result<()> {
        self.device_slice().copy_to_host(data)
    }

    /// Sets every byte.
    ///
    /// # Errors
    ///
    /// The errors are those of [`DeviceSlice::fill_bytes`].
    pub fn fill_bytes(&self, byte: u8) -> Result<()> {
        self.device_slice().fill_bytes(byte)
    }
}

// SAFETY: the memory is freed after the last reference to it, when the streams are idle.
unsafe impl<T: Element> Buffer for SymmetricBuffer<T> {
    type Element = T;

    fn device_slice(&self) -> DeviceSlice<T> {
        let owner = Arc::clone(&self.memory);
        DeviceSlice::owned(&self.memory.context, self.device_address(), self.len, owner)
    }
}

/// Passes the address, for a kernel that takes a pointer.
// SAFETY: the bytes refer to no window and no device communicator.
unsafe impl<T: Element> IntoArg<u64> for &SymmetricBuffer<T> {
    fn into_arg(self) -> u64 {
        self.device_address()
    }
}

/// Passes address and length, for a kernel that takes `&[T]`.
// SAFETY: the bytes refer to no window and no device communicator.
unsafe impl<T: Element> IntoArg<Slice<T>> for &SymmetricBuffer<T> {
    fn into_arg(self) -> Slice<T> {
        Slice::new(self.device_address(), self.len)
    }
}

impl<T: Element> Clone for SymmetricBuffer<T> {
    fn clone(&self) -> Self {
        Self { memory: Arc::clone(&self.memory), len: self.len, element: PhantomData }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let (context, created_at) = (self.context.clone(), self.created_at);
        let moved = || {
            let (allocation, library) = (self.allocation.take(), self.library.clone());
            Self { allocation, context: context.clone(), library, created_at }
        };
        if context.is_rank_lost() || !context.can_free_or_hold("device memory", created_at, moved) {
            return;
        }
        let Some(allocation) = self.allocation.take() else { return };
        self.context.bind_to_free();
        // SAFETY: this rank's streams are idle, and no window over the memory is left. That peers
        // have finished with it is part of the contract of launches.
        if let Err(error) = unsafe { self.library.nccl().free(allocation) } {
            tracing::warn!("{error}");
        }
    }
}

impl<T: Element> std::fmt::Debug for SymmetricBuffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (name, address) = (T::NAME, self.device_address());
        write!(f, "SymmetricBuffer<{name}>({address:#x}, {} elements)", self.len)
    }
}
