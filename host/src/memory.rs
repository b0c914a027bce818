//! Device memory that NCCL can share between ranks.

use std::marker::PhantomData;

use devcomm_types::Element;

use crate::sys::nccl::Allocation;
use crate::{Context, Error, Library, Result};

/// `len` elements of device memory from `ncclMemAlloc`, zeroed.
///
/// The copies here first wait for this rank's streams, so they see what earlier launches wrote and disturb nothing that
/// runs on this GPU. They know nothing of other ranks: a peer whose kernel still writes this memory is for a barrier to
/// wait for.
///
/// Dropped, it waits for this rank's streams and frees the memory. If they do not come to rest within 10 s, or cannot (a
/// rank is lost, a deadline was missed), the memory stays allocated until the process ends.
///
/// NCCL: `ncclMemAlloc`, `ncclMemFree`.
#[doc(alias = "ncclMemAlloc")]
#[doc(alias = "ncclMemFree")]
pub struct Memory<T: Element> {
    /// `None` only while dropping.
    allocation: Option<Allocation>,
    address: u64,
    len: usize,
    context: Context,
    library: Library,
    element: PhantomData<T>,
}

impl<T: Element> Memory<T> {
    pub(crate) fn new(library: &Library, context: &Context, len: usize) -> Result<Self> {
        let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= isize::MAX as usize);
        let bytes = match bytes {
            None => {
                return Err(Error::invalid(format!("{len} elements of {} do not fit", T::NAME)));
            }
            Some(0) => return Err(Error::invalid("device memory of 0 elements was asked for")),
            Some(bytes) => bytes,
        };
        context.cuda().bind()?;
        let allocation = library.nccl().alloc(bytes)?;
        let memory = Self {
            address: allocation.address(),
            allocation: Some(allocation),
            len,
            context: context.clone(),
            library: library.clone(),
            element: PhantomData,
        };
        memory.fill(0)?;
        Ok(memory)
    }

    /// Number of elements; never 0.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Size in bytes.
    #[must_use]
    pub fn byte_len(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The device address of the first element; valid on this GPU while `self` lives.
    #[must_use]
    pub fn device_address(&self) -> u64 {
        self.address
    }

    /// Copies `data` to the first `data.len()` elements.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] if `data` is longer than the memory; what waiting for the streams gives; the driver's.
    pub fn copy_from_host(&self, data: &[T]) -> Result<()> {
        self.fits(data.len())?;
        self.context.settle()?;
        // SAFETY: Element promises plain data without padding, so its bytes are initialised.
        let bytes =
            unsafe { std::slice::from_raw_parts(data.as_ptr().cast::<u8>(), size_of_val(data)) };
        // SAFETY: the allocation has at least `data.len()` elements, and this rank's streams are idle.
        unsafe { self.context.cuda().copy_in(self.address, bytes) }
    }

    /// Copies the first `data.len()` elements to `data`.
    ///
    /// # Errors
    ///
    /// As [`copy_from_host`](Self::copy_from_host).
    pub fn copy_to_host(&self, data: &mut [T]) -> Result<()> {
        self.fits(data.len())?;
        self.context.settle()?;
        // SAFETY: Element promises that every bit pattern is valid, so any bytes may be written.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(data.as_mut_ptr().cast::<u8>(), size_of_val(data))
        };
        // SAFETY: the allocation has at least `data.len()` elements, and this rank's streams are idle.
        unsafe { self.context.cuda().copy_out(bytes, self.address) }
    }

    /// Sets every byte.
    ///
    /// # Errors
    ///
    /// What waiting for the streams gives; the driver's.
    pub fn fill(&self, byte: u8) -> Result<()> {
        self.context.settle()?;
        // SAFETY: the whole allocation, and this rank's streams are idle.
        unsafe { self.context.cuda().fill(self.address, byte, self.byte_len()) }
    }

    pub(crate) fn fits(&self, count: usize) -> Result<()> {
        if count > self.len {
            let (len, name) = (self.len, T::NAME);
            return Err(Error::invalid(format!("{count} elements of {name} in memory of {len}")));
        }
        Ok(())
    }

    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    pub(crate) fn allocation(&self) -> Result<&Allocation> {
        self.allocation.as_ref().ok_or_else(|| Error::invalid("the memory was freed"))
    }

    /// Gives up the memory without freeing it: something on a GPU may still use it.
    pub(crate) fn leak(&mut self) {
        self.allocation = None;
    }
}

impl<T: Element> Drop for Memory<T> {
    fn drop(&mut self) {
        let Some(allocation) = self.allocation.take() else { return };
        if self.context.health().is_lost() || !self.context.is_settled("device memory") {
            return;
        }
        let _ = self.context.cuda().bind();
        // SAFETY: this rank's streams are idle. A window over the memory is a `Window`, which ends it
        // first; that peers have finished with it is part of the contract of the launch that let them.
        if let Err(error) = unsafe { self.library.nccl().free(allocation) } {
            tracing::warn!("{error}");
        }
    }
}

impl<T: Element> std::fmt::Debug for Memory<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Memory<{}>({:#x}, {} elements)", T::NAME, self.address, self.len)
    }
}
