//! Copies and fills in the order of a stream: after what was enqueued to it before, and before what
//! comes next.
//!
//! Both sides of a copy have the same length; [`Buffer::slice`] takes a part. Copies between the
//! host and the device return when they are done, so that the host's memory is the caller's again;
//! those of a [`PinnedBuffer`] do not wait. Copies on the device and fills are enqueued and may be
//! captured to a graph. Other streams are not waited for: where they use the same memory, order
//! them with events.

use devcomm_types::Element;

use super::capture::Capture;
use super::pinned::PinnedBuffer;
use super::slice::{Buffer, DeviceSlice, bytes_of, bytes_of_mut};
use super::stream::Stream;
use crate::error::{Error, Result};
use crate::sys::cuda::stream::StreamHandle;

impl Stream {
    /// Copies `from`, in the host's memory, to `to` on the device. Waits for the work before it in
    /// this stream, and returns when the copy is done.
    ///
    /// CUDA: `cuMemcpyHtoDAsync`, `cuStreamSynchronize`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for lengths that differ and for memory of another context;
    /// [`StateError::Capturing`](crate::StateError::Capturing); as
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
        let handle = self.waited(&to)?;
        // SAFETY: as many elements on both sides; the context is current; the slice lives.
        unsafe { handle.copy_to_device(to.device_address(), bytes_of(from)) }
    }

    /// Copies `from`, on the device, to `to` in the host's memory. Waits for the work before it in
    /// this stream, and returns when the copy is done.
    ///
    /// CUDA: `cuMemcpyDtoHAsync`, `cuStreamSynchronize`.
    ///
    /// # Errors
    ///
    /// As [`copy_to_device`](Self::copy_to_device).
    #[doc(alias = "cudaMemcpyAsync")]
    #[doc(alias = "memcpy_dtoh")]
    pub fn copy_to_host<T: Element>(
        &self,
        from: &impl Buffer<Element = T>,
        to: &mut [T],
    ) -> Result<()> {
        let from = from.device_slice();
        require_same_len(from.len(), to.len())?;
        let handle = self.waited(&from)?;
        // SAFETY: as many elements on both sides; the context is current; the slice lives.
        unsafe { handle.copy_to_host(bytes_of_mut(to), from.device_address()) }
    }

    /// Enqueues a copy of `from`, in pinned memory of the host, to `to` on the device. The buffer
    /// waits for it before it gives its elements to be written.
    ///
    /// CUDA: `cuMemcpyHtoDAsync`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for lengths that differ and for memory of another context;
    /// [`StateError::Capturing`](crate::StateError::Capturing);
    /// [`WorldError::RankLost`](crate::WorldError::RankLost); the driver's.
    #[doc(alias = "cudaMemcpyAsync")]
    pub fn copy_to_device_async<T: Element>(
        &self,
        from: &PinnedBuffer<T>,
        to: &impl Buffer<Element = T>,
    ) -> Result<()> {
        let to = to.device_slice();
        require_same_len(from.len(), to.len())?;
        self.copy_pinned(from, &to, |handle| {
            // SAFETY: as many elements on both sides; the context is current; the pinned memory is
            // written and freed after the event behind the copy, device memory when this stream is
            // idle.
            unsafe {
                let (target, source) = (to.device_address(), from.as_ptr().cast());
                handle.enqueue_copy_to_device(target, source, to.byte_len())
            }
        })
    }

    /// Enqueues a copy of `from`, on the device, to `to` in pinned memory of the host. The buffer
    /// waits for it before it gives its elements.
    ///
    /// CUDA: `cuMemcpyDtoHAsync`.
    ///
    /// # Errors
    ///
    /// As [`copy_to_device_async`](Self::copy_to_device_async).
    #[doc(alias = "cudaMemcpyAsync")]
    pub fn copy_to_host_async<T: Element>(
        &self,
        from: &impl Buffer<Element = T>,
        to: &mut PinnedBuffer<T>,
    ) -> Result<()> {
        let from = from.device_slice();
        require_same_len(from.len(), to.len())?;
        self.copy_pinned(to, &from, |handle| {
            // SAFETY: as above; the pinned memory is read after the event behind the copy, too.
            unsafe {
                let (target, source) = (to.as_ptr().cast(), from.device_address());
                handle.enqueue_copy_to_host(target, source, from.byte_len())
            }
        })
    }

    /// Enqueues a copy between pinned memory and the device, and an event behind it.
    fn copy_pinned<T: Element>(
        &self,
        pinned: &PinnedBuffer<T>,
        memory: &DeviceSlice<T>,
        copy: impl FnOnce(&StreamHandle) -> Result<()>,
    ) -> Result<()> {
        if !pinned.context().is(self.context()) {
            return Err(Error::invalid("the pinned memory is of another context than the stream"));
        }
        self.context().refuse_capturing("memory of the host is copied")?;
        let (handle, event) = (self.enqueues(&[memory])?, self.context().event_without_timing()?);
        copy(handle)?;
        if let Err(error) = self.record(&event) {
            // Nothing else says when the copy is done.
            handle.synchronize()?;
            return Err(error);
        }
        pinned.copied(event);
        Ok(())
    }

    /// Enqueues a copy of `from` to `to`, both on this stream's GPU.
    ///
    /// In a capture it is part of the graph, which keeps the memory.
    ///
    /// CUDA: `cuMemcpyDtoDAsync`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for lengths that differ, memory that overlaps and memory of another
    /// context; [`WorldError::RankLost`](crate::WorldError::RankLost); the driver's.
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
        if source.abs_diff(target) < to.byte_len() as u64 {
            let (len, name) = (to.len(), T::NAME);
            return Err(Error::invalid(format!(
                "a copy of {len} elements of {name} from {source:#x} to {target:#x}, which overlap"
            )));
        }
        let handle = self.enqueues(&[&from, &to])?;
        // SAFETY: both have the elements; they are freed, or closed with a graph, when this stream
        // is idle.
        unsafe { handle.copy(target, source, to.byte_len()) }
    }

    /// Enqueues a fill: every element of `buffer` becomes `value`.
    ///
    /// In a capture it is part of the graph, which keeps the memory.
    ///
    /// CUDA: `cuMemsetD8Async`, `cuMemsetD16Async`, `cuMemsetD32Async`; for elements of 8 bytes two
    /// `cuMemsetD2D32Async`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for memory of another context;
    /// [`WorldError::RankLost`](crate::WorldError::RankLost); the driver's.
    #[doc(alias = "cudaMemsetAsync")]
    #[doc(alias = "memset_zeros")]
    pub fn fill<T: Element>(&self, buffer: &impl Buffer<Element = T>, value: T) -> Result<()> {
        let buffer = buffer.device_slice();
        let handle = self.enqueues(&[&buffer])?;
        let value = bytes_of(std::slice::from_ref(&value));
        // SAFETY: the elements are aligned for their type; they are freed, or closed with a graph,
        // when this stream is idle.
        unsafe { handle.fill(buffer.device_address(), value, buffer.len()) }
    }

    /// The stream, when it has done all work and its context is current.
    fn waited<T>(&self, memory: &DeviceSlice<T>) -> Result<&StreamHandle> {
        self.require_own(memory)?;
        self.context().refuse_capturing("memory of the host is copied")?;
        self.synchronize()?;
        Ok(self.handle())
    }

    /// The stream, when its context is current. A graph that is being captured keeps `memory`.
    fn enqueues<T>(&self, memory: &[&DeviceSlice<T>]) -> Result<&StreamHandle> {
        let context = self.context();
        memory.iter().try_for_each(|memory| self.require_own(memory))?;
        context.health().check()?;
        context.cuda().bind()?;
        if let Some(Capture { keep, .. }) = context.capture().borrow_mut().as_mut() {
            keep.extend(memory.iter().filter_map(|memory| memory.keep()));
        }
        Ok(self.handle())
    }

    fn require_own<T>(&self, memory: &DeviceSlice<T>) -> Result<()> {
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
