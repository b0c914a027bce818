//! CUDA streams and events.

use std::any::Any;
use std::ffi::c_uint;
use std::ptr::null_mut;

use devcomm_sys::driver::{CUevent, CUevent_flags, CUresult, CUstream_flags, Driver};

use super::{PrimaryContext, RawStream, check, error};
use crate::error::Result;
use crate::sys::fork::Process;

impl PrimaryContext {
    /// Makes a stream that does not wait for the default stream.
    pub(crate) fn create_stream(&self) -> Result<StreamHandle> {
        self.bind()?;
        let (driver, mut raw) = (self.driver, null_mut());
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: the context is current; `raw` is live.
        let made = unsafe { driver.cuStreamCreate(&raw mut raw, flags) };
        check(driver, "cuStreamCreate", made)?;
        Ok(StreamHandle { driver, raw, owner: Owner::ThisHandle(Process::current()) })
    }

    /// Makes an event, with timing or without.
    pub(crate) fn create_event(&self, timed: bool) -> Result<EventHandle> {
        self.bind()?;
        let (driver, mut raw) = (self.driver, null_mut());
        let flags = if timed {
            CUevent_flags::CU_EVENT_DEFAULT
        } else {
            CUevent_flags::CU_EVENT_DISABLE_TIMING
        };
        // SAFETY: the context is current; `raw` is live.
        let made = unsafe { driver.cuEventCreate(&raw mut raw, flags as c_uint) };
        check(driver, "cuEventCreate", made)?;
        Ok(EventHandle { driver, raw, process: Process::current() })
    }
}

/// A live stream.
pub(crate) struct StreamHandle {
    driver: &'static Driver,
    raw: RawStream,
    owner: Owner,
}

// SAFETY: an opaque handle, which any thread may use, several at a time.
unsafe impl Send for StreamHandle {}
// SAFETY: an opaque handle, which any thread may use, several at a time.
unsafe impl Sync for StreamHandle {}

/// The party that destroys a stream.
enum Owner {
    /// This handle, in the process that made it.
    ThisHandle(Process),
    /// Another part of the program; `_keep` keeps the stream alive, if set.
    Other { _keep: Option<Box<dyn Any + Send + Sync>> },
}

impl PrimaryContext {
    /// Returns a stream that another part of the program made.
    ///
    /// # Safety
    ///
    /// It is a stream of this context, NULL for the default stream, and lives as long as the
    /// handle.
    pub(crate) unsafe fn foreign_stream(
        &self,
        raw: RawStream,
        keep: Option<Box<dyn Any + Send + Sync>>,
    ) -> StreamHandle {
        StreamHandle { driver: self.driver, raw, owner: Owner::Other { _keep: keep } }
    }

    /// Returns the default stream, which lives as long as the context.
    pub(crate) fn default_stream(&self) -> StreamHandle {
        // SAFETY: NULL is the default stream.
        unsafe { self.foreign_stream(null_mut(), None) }
    }
}

impl StreamHandle {
    pub(super) fn driver(&self) -> &'static Driver {
        self.driver
    }

    pub(crate) fn raw(&self) -> RawStream {
        self.raw
    }

    /// Returns whether another part of the program destroys the stream, maybe before this handle
    /// is dropped.
    pub(crate) fn is_foreign(&self) -> bool {
        matches!(self.owner, Owner::Other { _keep: None }) && !self.raw.is_null()
    }

    /// Returns whether all work is done.
    pub(crate) fn is_idle(&self) -> Result<bool> {
        // SAFETY: the stream is live.
        let state = unsafe { self.driver.cuStreamQuery(self.raw) };
        ready(self.driver, "cuStreamQuery", state)
    }

    pub(crate) fn record(&self, event: &EventHandle) -> Result<()> {
        // SAFETY: both are live and of one context.
        let recorded = unsafe { self.driver.cuEventRecord(event.raw, self.raw) };
        check(self.driver, "cuEventRecord", recorded)
    }

    /// Makes later work of the stream wait for the event.
    pub(crate) fn wait_for(&self, event: &EventHandle) -> Result<()> {
        // SAFETY: both are live; the flags must be 0.
        let enqueued = unsafe { self.driver.cuStreamWaitEvent(self.raw, event.raw, 0) };
        check(self.driver, "cuStreamWaitEvent", enqueued)
    }
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        if matches!(self.owner, Owner::ThisHandle(process) if process.is_current()) {
            // SAFETY: the stream is live and not used again. The driver lets pending work finish.
            let _ = unsafe { self.driver.cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// Returns what a query of a stream or an event has found: whether its work is done.
fn ready(driver: &Driver, operation: &'static str, result: CUresult) -> Result<bool> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(true),
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        failed => Err(error(driver, operation, failed)),
    }
}

/// A live event.
pub(crate) struct EventHandle {
    driver: &'static Driver,
    raw: CUevent,
    process: Process,
}

// SAFETY: an opaque handle, which any thread may use, several at a time.
unsafe impl Send for EventHandle {}
// SAFETY: an opaque handle, which any thread may use, several at a time.
unsafe impl Sync for EventHandle {}

impl EventHandle {
    pub(crate) fn raw(&self) -> CUevent {
        self.raw
    }

    /// Returns whether the work before the event is done; true for one that was never recorded.
    pub(crate) fn is_reached(&self) -> Result<bool> {
        // SAFETY: the event is live.
        let state = unsafe { self.driver.cuEventQuery(self.raw) };
        ready(self.driver, "cuEventQuery", state)
    }

    /// Returns the milliseconds from `start` to `self`. Both must have been recorded and reached.
    pub(crate) fn elapsed_ms(&self, start: &Self) -> Result<f32> {
        let mut milliseconds = 0.0;
        // SAFETY: both are live; `milliseconds` is a live float.
        let result = unsafe {
            self.driver.cuEventElapsedTime_v2(&raw mut milliseconds, start.raw, self.raw)
        };
        check(self.driver, "cuEventElapsedTime", result)?;
        Ok(milliseconds)
    }
}

impl Drop for EventHandle {
    fn drop(&mut self) {
        if self.process.is_current() {
            // SAFETY: the event is live and not used again. The driver does not wait for it.
            let _ = unsafe { self.driver.cuEventDestroy_v2(self.raw) };
        }
    }
}
