//! Pinned (page-locked) host memory, for asynchronous copies.

use std::marker::PhantomData;

use devcomm_types::Element;
use parking_lot::Mutex;

use super::context::Context;
use super::event::Event;
use super::holds::CreationTime;
use super::memory::bytes_of;
use crate::error::{Result, StateError};
use crate::sys::cuda::memory::HostAllocation;

/// `len` elements in page-locked host memory, initially zero, for
/// [`Stream::copy_to_device_async`](crate::Stream::copy_to_device_async) and
/// [`Stream::copy_to_host_async`](crate::Stream::copy_to_host_async).
///
/// The program accesses the elements through [`as_slice`](Self::as_slice) and
/// [`as_mut_slice`](Self::as_mut_slice), which wait for the copies first. The memory is freed when
/// the context's streams are idle.
///
/// CUDA: `cuMemHostAlloc`, `cuMemFreeHost`.
#[doc(alias = "cudaMallocHost")]
#[doc(alias = "cudaHostAlloc")]
pub struct PinnedBuffer<T: Element> {
    /// `None` only while dropping.
    memory: Option<HostAllocation>,
    len: usize,
    copies: Mutex<Copies>,
    context: Context,
    created_at: CreationTime,
    element: PhantomData<T>,
}

/// The copies of a buffer.
#[derive(Default)]
struct Copies {
    /// Events recorded after copies that may still run.
    running: Vec<Event>,
    /// Whether it is unknown when a copy ends: the elements are not accessed any more, and the
    /// memory is not freed.
    unknown: bool,
}

impl Context {
    /// Allocates pinned host memory for `len` elements, zeroed.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](crate::Error::InvalidInput) for a length of 0;
    /// [`StateError::Capturing`](crate::StateError::Capturing); the driver's errors.
    pub fn pinned<T: Element>(&self, len: usize) -> Result<PinnedBuffer<T>> {
        let bytes = bytes_of::<T>("pinned memory", len)?;
        self.refuse_capturing("pinned memory is allocated")?;
        let memory = Some(self.cuda().alloc_host(bytes)?);
        let (copies, context, created_at) = (Mutex::default(), self.clone(), self.creation_time());
        Ok(PinnedBuffer { memory, len, copies, context, created_at, element: PhantomData })
    }
}

impl<T: Element> PinnedBuffer<T> {
    /// Returns the number of elements; never 0.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a buffer is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the elements, after waiting for the copies.
    ///
    /// # Errors
    ///
    /// The errors are those of [`Event::synchronize`]; [`StateError::UnknownCopy`].
    pub fn as_slice(&self) -> Result<&[T]> {
        self.wait()?;
        // SAFETY: the memory is zeroed or was written by copies, which are done; every bit pattern
        // is a valid `Element`. A copy that writes needs `&mut`, so none begins while this borrows.
        Ok(unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) })
    }

    /// Returns the elements, mutable, after waiting for the copies.
    ///
    /// # Errors
    ///
    /// The errors are those of [`Event::synchronize`]; [`StateError::UnknownCopy`].
    pub fn as_mut_slice(&mut self) -> Result<&mut [T]> {
        self.wait()?;
        // SAFETY: the memory is valid as in `as_slice`; no copy begins while the buffer is borrowed
        // mutably.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.len) })
    }

    pub(super) fn as_ptr(&self) -> *mut T {
        self.memory.as_ref().map_or(std::ptr::null_mut(), |memory| memory.address().cast())
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    /// Registers a copy that was enqueued; `event` is recorded after it, if it `is_recorded`.
    pub(super) fn add_copy(&self, event: Event, is_recorded: bool) {
        let mut copies = self.copies.lock();
        copies.running.retain(|copy| !matches!(copy.is_reached(), Ok(true)));
        if is_recorded {
            copies.running.push(event);
        } else {
            copies.unknown = true;
        }
    }

    fn wait(&self) -> Result<()> {
        let running = {
            let copies = self.copies.lock();
            if copies.unknown {
                return Err(StateError::UnknownCopy.into());
            }
            copies.running.clone()
        };
        running.iter().try_for_each(Event::synchronize)?;
        self.copies.lock().running.retain(|copy| !running.iter().any(|done| done.is(copy)));
        Ok(())
    }
}

impl<T: Element> Drop for PinnedBuffer<T> {
    fn drop(&mut self) {
        if self.copies.get_mut().unknown {
            tracing::warn!("pinned memory is left allocated: a copy may still use it");
            return;
        }
        let (context, created_at) = (self.context.clone(), self.created_at);
        let moved = || {
            let (memory, copies) = (self.memory.take(), std::mem::take(&mut self.copies));
            let (len, context) = (self.len, context.clone());
            Self { memory, copies, len, context, created_at, element: PhantomData }
        };
        if context.is_rank_lost() || !context.can_free_or_hold("pinned memory", created_at, moved) {
            return;
        }
        let Some(memory) = self.memory.take() else { return };
        self.context.bind_to_free();
        // SAFETY: the context is current, and its streams are idle: no copy uses the memory.
        if let Err(error) = unsafe { memory.free() } {
            tracing::warn!("{error}");
        }
    }
}

impl<T: Element> std::fmt::Debug for PinnedBuffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PinnedBuffer<{}>({} elements)", T::NAME, self.len)
    }
}
