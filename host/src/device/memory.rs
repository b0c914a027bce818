//! Memory of one GPU, without a communicator.

use std::marker::PhantomData;
use std::sync::Arc;

use devcomm_types::{Element, IntoArg, Slice};

use super::context::Context;
use super::holds::CreationTime;
use super::slice::{Buffer, DeviceSlice};
use crate::error::{Error, Result};
use crate::sys::cuda::memory::DeviceAllocation;

/// `len` elements in the memory of one GPU, initially zero. Peers cannot access it, nor can NCCL
/// register it: that is [`SymmetricBuffer`](crate::SymmetricBuffer).
///
/// Clones share the memory. It is freed when the last one is dropped and the context's streams are
/// idle.
///
/// CUDA: `cuMemAlloc`, `cuMemFree`.
#[doc(alias = "cudaMalloc")]
pub struct DeviceBuffer<T> {
    memory: Arc<Memory>,
    len: usize,
    element: PhantomData<T>,
}

/// An allocation that is freed with its last user.
struct Memory {
    /// `None` only while dropping.
    allocation: Option<DeviceAllocation>,
    context: Context,
    created_at: CreationTime,
}

/// Returns the size in bytes of `len` elements, which is not 0 and fits in the address space; the
/// error otherwise names the `memory`.
pub(super) fn bytes_of<T: Element>(memory: &str, len: usize) -> Result<usize> {
    let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= isize::MAX as usize);
    bytes
        .filter(|bytes| *bytes > 0)
        .ok_or_else(|| Error::invalid(format!("{memory} of {len} elements of {}", T::NAME)))
}

impl Context {
    /// Allocates memory of the context's GPU for `len` elements, zeroed.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a length of 0;
    /// [`StateError::Capturing`](crate::StateError::Capturing) while a stream of the context is
    /// captured; the driver's errors.
    pub fn alloc<T: Element>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        let bytes = bytes_of::<T>("device memory", len)?;
        self.refuse_capturing("device memory is allocated")?;
        self.check_health()?;
        self.free_postponed();
        let allocation = Some(self.cuda().alloc(bytes)?);
        let memory = Memory { allocation, context: self.clone(), created_at: self.creation_time() };
        let memory = Arc::new(memory);
        let buffer = DeviceBuffer { memory, len, element: PhantomData };
        buffer.device_slice().fill_new(0)?;
        Ok(buffer)
    }
}

impl<T: Element> DeviceBuffer<T> {
    /// Returns the number of elements; never 0.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the device address of the first element.
    #[must_use]
    pub fn device_address(&self) -> u64 {
        self.memory.allocation.as_ref().map_or(0, DeviceAllocation::address)
    }
}

// SAFETY: the memory is freed after the last reference to it, when the streams are idle.
unsafe impl<T: Element> Buffer for DeviceBuffer<T> {
    type Element = T;

    fn device_slice(&self) -> DeviceSlice<T> {
        let owner = Arc::clone(&self.memory);
        DeviceSlice::owned(&self.memory.context, self.device_address(), self.len, owner)
    }
}

/// Passes the address, for a kernel that takes a pointer.
// SAFETY: the bytes refer to no window and no device communicator.
unsafe impl<T: Element> IntoArg<u64> for &DeviceBuffer<T> {
    fn into_arg(self) -> u64 {
        self.device_address()
    }
}

/// Passes address and length, for a kernel that takes `&[T]`.
// SAFETY: the bytes refer to no window and no device communicator.
unsafe impl<T: Element> IntoArg<Slice<T>> for &DeviceBuffer<T> {
    fn into_arg(self) -> Slice<T> {
        Slice::new(self.device_address(), self.len)
    }
}

impl<T> Clone for DeviceBuffer<T> {
    fn clone(&self) -> Self {
        Self { memory: Arc::clone(&self.memory), len: self.len, element: PhantomData }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let context = self.context.clone();
        let created_at = self.created_at;
        let moved =
            || Self { allocation: self.allocation.take(), context: context.clone(), created_at };
        if context.is_rank_lost() || !context.can_free_or_hold("device memory", created_at, moved) {
            return;
        }
        let Some(allocation) = self.allocation.take() else { return };
        self.context.bind_to_free();
        // SAFETY: the context is current, and its streams are idle.
        if let Err(error) = unsafe { allocation.free() } {
            tracing::warn!("{error}");
        }
    }
}

impl<T: Element> std::fmt::Debug for DeviceBuffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (name, address) = (T::NAME, self.device_address());
        write!(f, "DeviceBuffer<{name}>({address:#x}, {} elements)", self.len)
    }
}
