//! Streams and events.

use std::any::Any;
use std::ffi::c_uint;
use std::ptr::null_mut;

use cudarc::driver::sys::{self, CUresult};

use super::{PrimaryContext, RawStream, check, error};
use crate::Result;

impl PrimaryContext {
    /// Makes a stream that does not wait for the default stream.
    pub(crate) fn create_stream(&self) -> Result<StreamHandle> {
        self.bind()?;
        let mut raw = null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: the context is current; `raw` is live.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut raw, flags) })?;
        Ok(StreamHandle { raw, owner: Owner::Us })
    }

    /// Makes an event, with a time or without.
    pub(crate) fn create_event(&self, timed: bool) -> Result<EventHandle> {
        self.bind()?;
        let mut raw = null_mut();
        let flags = if timed {
            sys::CUevent_flags::CU_EVENT_DEFAULT
        } else {
            sys::CUevent_flags::CU_EVENT_DISABLE_TIMING
        };
        // SAFETY: the context is current; `raw` is live.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut raw, flags as c_uint) })?;
        Ok(EventHandle(raw))
    }
}

/// A live stream of the context it is used with.
pub(crate) struct StreamHandle {
    raw: RawStream,
    owner: Owner,
}

/// Who destroys a stream.
enum Owner {
    Us,
    /// Another part of the program; this keeps it alive, if there is something that does.
    Other {
        _keep: Option<Box<dyn Any>>,
    },
}

impl StreamHandle {
    /// A stream that another part of the program made.
    ///
    /// # Safety
    ///
    /// It is a stream of the context it will be used with, NULL for the default stream, and lives as long as the handle.
    pub(crate) unsafe fn foreign(raw: RawStream, keep: Option<Box<dyn Any>>) -> Self {
        Self { raw, owner: Owner::Other { _keep: keep } }
    }

    pub(crate) fn raw(&self) -> RawStream {
        self.raw
    }

    /// Whether all work is done.
    pub(crate) fn is_idle(&self) -> Result<bool> {
        // SAFETY: the stream is live.
        ready("cuStreamQuery", unsafe { sys::cuStreamQuery(self.raw) })
    }

    pub(crate) fn record(&self, event: &EventHandle) -> Result<()> {
        // SAFETY: both are live and of one context.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.0, self.raw) })
    }

    /// Later work of the stream waits for the event.
    pub(crate) fn wait_for(&self, event: &EventHandle) -> Result<()> {
        // SAFETY: both are live; the flags are 0, as they must be.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.raw, event.0, 0) })
    }
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        if matches!(self.owner, Owner::Us) {
            // SAFETY: the stream is live and not used again. The driver lets pending work finish.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

fn ready(operation: &'static str, result: CUresult) -> Result<bool> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(true),
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        failed => Err(error(operation, failed)),
    }
}

/// A live event.
pub(crate) struct EventHandle(sys::CUevent);

impl EventHandle {
    pub(crate) fn raw(&self) -> sys::CUevent {
        self.0
    }

    /// Whether the stream has passed it; true for one that was never recorded.
    pub(crate) fn is_reached(&self) -> Result<bool> {
        // SAFETY: the event is live.
        ready("cuEventQuery", unsafe { sys::cuEventQuery(self.0) })
    }

    /// Milliseconds from `start` to `self`. Both must have been recorded and reached.
    pub(crate) fn elapsed_ms(&self, start: &Self) -> Result<f32> {
        let mut milliseconds = 0.0;
        // SAFETY: both are live; `milliseconds` is a live float.
        let result = unsafe { sys::cuEventElapsedTime_v2(&raw mut milliseconds, start.0, self.0) };
        check("cuEventElapsedTime", result)?;
        Ok(milliseconds)
    }
}

impl Drop for EventHandle {
    fn drop(&mut self) {
        // SAFETY: the event is live and not used again. The driver waits for no work here.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}
