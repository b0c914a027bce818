//! Stream-ordered copies and fills: they run after earlier work of the stream, before later work.
//!
//! Source and destination of a copy have the same length; [`Buffer::slice`] selects a part. Copies
//! between device memory and a host slice return when they are done, and the caller can use the
//! slice again. Copies of a [`PinnedBuffer`], copies on the device and fills are asynchronous.
//! Copies on the device and fills may be captured to a graph. No copy or fill waits for other
//! streams: if these use the same memory, order them with events.

use devcomm_types::Element;

use super::enqueues::{Enqueue, Target};
use super::pinned::PinnedBuffer;
use super::slice::{Buffer, DeviceSlice, bytes_of, bytes_of_mut};
use super::stream::Stream;
use crate::error::{Error, Result, StateError};
use crate::sys::cuda::stream::StreamHandle;

impl Stream {
    /// Copies `from`, in host memory, to `to` on the device. Waits for earlier work in this stream,
    /// and returns when the copy is done.
    ///
    /// CUDA: `cuMemcpyHtoDAsync`, `cuStreamSynchronize`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for lengths that differ and for memory of another context;
    /// [`StateError::Capturing`](crate::StateError::Capturing); the errors of
    /// [`synchronize`](Self::synchronize).
    #[doc(alias = "cudaMemcpyAsync")]
    #[doc(alias = "memcpy_htod")]
    pub fn copy_to_device<T: Element>(
        &self,
        from: &[T],
        to: &impl Buffer<Element = T>,
    ) -> Result<()> {
        let to = to.device_slice();
        require_same_len(from.len(), to.len())?;
        let (handle, _enqueue) = self.idle_handle(&to)?;
        // SAFETY: both have the same length; the context is current; the slices outlive the copy.
        unsafe { handle.copy_to_device(to.device_address(), bytes_of(from)) }
    }

    /// Copies `from`, on the device, to `to` in host memory. Waits for earlier work in this stream,
    /// and returns when the copy is done.
    ///
    /// CUDA: `cuMemcpyDtoHAsync`, `cuStreamSynchronize`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`copy_to_device`](Self::copy_to_device).
    #[doc(alias = "cudaMemcpyAsync")]
    #[doc(alias = "memcpy_dtoh")]
    pub fn copy_to_host<T: Element>(
        &self,
        from: &impl Buffer<Element = T>,
        to: &mut [T],
    ) -> Result<()> {
        let from = from.device_slice();
        require_same_len(from.len(), to.len())?;
        let (handle, _enqueue) = self.idle_handle(&from)?;
        // SAFETY: both have the same length; the context is current; the slices outlive the copy.
        unsafe { handle.copy_to_host(bytes_of_mut(to), from.device_address()) }
    }

    /// Enqueues a copy of `from`, in pinned host memory, to `to` on the device. Later accesses to
    /// the elements of `from` wait for the copy.
    ///
    /// CUDA: `cuMemcpyHtoDAsync`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for lengths that differ and for memory of another context;
    /// [`StateError::Capturing`](crate::StateError::Capturing);
    /// [`WorldError::RankLost`](crate::WorldError::RankLost); the driver's errors.
    #[doc(alias = "cudaMemcpyAsync")]
    pub fn copy_to_device_async<T: Element>(
        &self,
        from: &PinnedBuffer<T>,
        to: &impl Buffer<Element = T>,
    ) -> Result<()> {
        let to = to.device_slice();
        require_same_len(from.len(), to.len())?;
        self.copy_pinned(from, &to, |handle| {
            // SAFETY: both have the same length; the context is current; pinned memory is written
            // and freed only after the event that follows the copy, device memory is freed when
            // this stream is idle.
            unsafe {
                let (target, source) = (to.device_address(), from.as_ptr().cast());
                handle.enqueue_copy_to_device(target, source, to.byte_len())
            }
        })
    }

    /// Enqueues a copy of `from`, on the device, to `to` in pinned host memory. Later accesses to
    /// the elements of `to` wait for the copy.
    ///
    /// CUDA: `cuMemcpyDtoHAsync`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`copy_to_device_async`](Self::copy_to_device_async).
    #[doc(alias = "cudaMemcpyAsync")]
    pub fn copy_to_host_async<T: Element>(
        &self,
        from: &impl Buffer<Element = T>,
        to: &mut PinnedBuffer<T>,
    ) -> Result<()> {
        let from = from.device_slice();
        require_same_len(from.len(), to.len())?;
        self.copy_pinned(to, &from, |handle| {
            // SAFETY: both have the same length; the context is current; pinned memory is accessed
            // and freed only after the event that follows the copy.
            unsafe {
                let (target, source) = (to.as_ptr().cast(), from.device_address());
                handle.enqueue_copy_to_host(target, source, from.byte_len())
            }
        })
    }

    /// Enqueues a copy between pinned memory and the device, and records an event after it.
    fn copy_pinned<T: Element>(
        &self,
        pinned: &PinnedBuffer<T>,
        memory: &DeviceSlice<T>,
        copy: impl FnOnce(&StreamHandle) -> Result<()>,
    ) -> Result<()> {
        if !pinned.context().is(self.context()) {
            return Err(Error::invalid("the pinned memory is of another context than the stream"));
        }
        self.context().refuse_capturing("host memory is copied")?;
        let (handle, enqueue) = self.checked_handle(&[memory])?;
        if enqueue.target != Target::Gpu {
            return Err(StateError::Capturing { what: "host memory is copied" }.into());
        }
        let event = self.context().event_without_timing()?;
        copy(handle)?;
        let recorded = self.record(&event);
        // Without the event, only a wait for the stream ensures that the copy is done. If that
        // fails, too, the end of the copy is unknown, which `pinned` remembers.
        if recorded.is_ok() || handle.synchronize().is_err() {
            pinned.add_copy(event, recorded.is_ok());
        }
        recorded
    }

    /// Enqueues a copy of `from` to `to`, both on this stream's GPU.
    ///
    /// In a capture it is part of the graph, which keeps the memory allocated.
    ///
    /// CUDA: `cuMemcpyDtoDAsync`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for lengths that differ, memory that overlaps and memory of another
    /// context; [`WorldError::RankLost`](crate::WorldError::RankLost); the driver's errors.
    #[doc(alias = "cudaMemcpyAsync")]
    #[doc(alias = "memcpy_dtod")]
    pub fn copy<T: Element>(
        &self,
        from: &impl Buffer<Element = T>,
        to: &impl Buffer<Element = T>,
    ) -> Result<()> {
        let (from, to) = (from.device_slice(), to.device_slice());
        require_same_len(from.len(), to.len())?;
        let (source, target) = (from.device_address(), to.device_address());
        if from.overlaps(&to) {
            let (len, name) = (to.len(), T::NAME);
            return Err(Error::invalid(format!(
                "a copy of {len} elements of {name} from {source:#x} to {target:#x}, which overlap"
            )));
        }
        let (handle, _enqueue) = self.checked_handle(&[&from, &to])?;
        // SAFETY: both have the same length; the memory is freed, directly or with a graph, when
        // this stream is idle.
        unsafe { handle.copy(target, source, to.byte_len()) }
    }

    /// Enqueues a fill: every element of `buffer` becomes `value`.
    ///
    /// In a capture it is part of the graph, which keeps the memory allocated.
    ///
    /// CUDA: `cuMemsetD8Async`, `cuMemsetD16Async`, `cuMemsetD32Async`; for elements of 8 bytes two
    /// `cuMemsetD2D32Async`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for memory of another context;
    /// [`WorldError::RankLost`](crate::WorldError::RankLost); the driver's errors.
    #[doc(alias = "cudaMemsetAsync")]
    #[doc(alias = "memset_zeros")]
    pub fn fill<T: Element>(&self, buffer: &impl Buffer<Element = T>, value: T) -> Result<()> {
        let buffer = buffer.device_slice();
        let (handle, _enqueue) = self.checked_handle(&[&buffer])?;
        let value = bytes_of(std::slice::from_ref(&value));
        // SAFETY: the elements are aligned for their type; the memory is freed, directly or with a
        // graph, when this stream is idle.
        unsafe { handle.fill(buffer.device_address(), value, buffer.len()) }
    }

    /// Waits for the stream's work; returns its handle and a guard: while it lives, no other thread
    /// begins a capture. Makes the context current.
    fn idle_handle<T>(&self, memory: &DeviceSlice<T>) -> Result<(&StreamHandle, Enqueue<'_>)> {
        self.require_same_context(memory)?;
        self.context().refuse_capturing("host memory is copied")?;
        // By polling: the driver's wait for the copy would not return if a kernel before it waits
        // for a lost rank.
        self.synchronize()?;
        Ok((self.handle(), self.begin_enqueue("a copy")?))
    }

    /// Returns the handle, after checks, and the guard of this call. Makes the context current; an
    /// open capture keeps `memory` alive.
    fn checked_handle<T>(
        &self,
        memory: &[&DeviceSlice<T>],
    ) -> Result<(&StreamHandle, Enqueue<'_>)> {
        let context = self.context();
        memory.iter().try_for_each(|memory| self.require_same_context(memory))?;
        context.check_health()?;
        let enqueue = self.begin_enqueue("a copy or fill")?;
        context.cuda().bind()?;
        if enqueue.target == Target::Graph {
            let kept = memory.iter().filter_map(|memory| memory.keep_alive());
            context.with_capture(|capture| capture.kept.extend(kept));
        }
        Ok((self.handle(), enqueue))
    }

    fn require_same_context<T>(&self, memory: &DeviceSlice<T>) -> Result<()> {
        if !memory.context().is(self.context()) {
            return Err(Error::invalid("the memory is of another context than the stream"));
        }
        Ok(())
    }
}

fn require_same_len(from: usize, to: usize) -> Result<()> {
    if from != to {
        return Err(Error::invalid(format!(
            "lengths must match: a copy of {from} elements to memory of {to}"
        )));
    }
    Ok(())
}
