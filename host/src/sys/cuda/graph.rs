//! Stream capture and CUDA graphs.

use std::ffi::c_void;
use std::ptr::null_mut;

use devcomm_sys::driver::{
    CUgraph, CUgraphExec, CUresult, CUstreamCaptureMode, CUstreamCaptureStatus, Driver,
};

use super::check;
use super::stream::StreamHandle;
use crate::error::{DriverError, Error, Result};
use crate::sys::fork::Process;

impl StreamHandle {
    /// Begins a capture: the stream's work goes to a graph instead of the GPU. The mode is relaxed,
    /// because NCCL connects two ranks at their first communication, perhaps during the capture,
    /// with calls that other modes forbid.
    pub(crate) fn begin_capture(&self) -> Result<()> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is live.
        let begun = unsafe { self.driver().cuStreamBeginCapture_v2(self.raw(), mode) };
        check(self.driver(), "cuStreamBeginCapture", begun)
    }

    /// Returns the capture that the stream's work goes to, whichever code began it.
    pub(crate) fn capture(&self) -> Result<Option<CaptureInfo>> {
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let (mut id, mut graph) = (0, null_mut());
        // SAFETY: the stream is live; the results are live, and NULL is allowed for the others.
        let read = unsafe {
            self.driver().cuStreamGetCaptureInfo_v3(
                self.raw(),
                &raw mut status,
                &raw mut id,
                &raw mut graph,
                null_mut(),
                null_mut(),
                null_mut(),
            )
        };
        check(self.driver(), "cuStreamGetCaptureInfo", read)?;
        let is_captured = status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        Ok(is_captured.then(|| CaptureInfo { driver: self.driver(), id, graph }))
    }

    /// Returns whether a query of the stream would fail, and invalidate a capture: that of the
    /// stream or, for the default stream, of one that waits for it.
    pub(crate) fn refuses_queries(&self) -> bool {
        const IMPLICIT: u32 = CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT as u32;
        match self.capture() {
            Ok(capture) => capture.is_some(),
            Err(Error::Driver(DriverError::Failed { code, .. })) => code == IMPLICIT,
            Err(_) => false,
        }
    }

    /// Ends the capture. Fails if a call during the capture has invalidated it.
    pub(crate) fn end_capture(&self) -> Result<GraphHandle> {
        let (driver, mut raw) = (self.driver(), null_mut());
        // SAFETY: the stream is live; `raw` is live.
        let ended = unsafe { driver.cuStreamEndCapture(self.raw(), &raw mut raw) };
        check(driver, "cuStreamEndCapture", ended)?;
        if raw.is_null() {
            return Err(Error::invalid("cuStreamEndCapture returned no graph"));
        }
        Ok(GraphHandle { driver, raw, process: Process::current() })
    }
}

/// A capture in progress.
pub(crate) struct CaptureInfo {
    driver: &'static Driver,
    /// Differs from that of every other capture of the process.
    pub(crate) id: u64,
    /// The graph; NULL if the capture has been invalidated.
    graph: CUgraph,
}

impl CaptureInfo {
    /// Makes the graph own `value`: it is dropped, by a thread of the driver, after the graph and
    /// all executable graphs that were made of it are gone. Its destructor must not call the
    /// driver.
    pub(crate) fn give<T: Send + 'static>(&self, value: Box<T>) -> Result<()> {
        unsafe extern "C" fn destroy<T>(value: *mut c_void) {
            // SAFETY: `give` made it from a box, and the driver calls this once.
            drop(unsafe { Box::from_raw(value.cast::<T>()) });
        }
        /// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`, the only allowed flag.
        const NO_DESTRUCTOR_SYNC: u32 = 1;
        /// `CU_GRAPH_USER_OBJECT_MOVE`: the graph takes the one reference.
        const MOVE: u32 = 1;
        if self.graph.is_null() {
            return Err(Error::invalid("the capture of the stream has been invalidated"));
        }
        let (driver, value, mut object) = (self.driver, Box::into_raw(value), null_mut());
        // SAFETY: `destroy` takes the value, from any thread, as it is `Send`; `object` is live.
        let made = unsafe {
            let (value, destroy) = (value.cast(), Some(destroy::<T> as _));
            driver.cuUserObjectCreate(&raw mut object, value, destroy, 1, NO_DESTRUCTOR_SYNC)
        };
        if made != CUresult::CUDA_SUCCESS {
            // SAFETY: the driver has not taken it.
            drop(unsafe { Box::from_raw(value) });
        }
        check(driver, "cuUserObjectCreate", made)?;
        // SAFETY: both are live.
        let given = unsafe { driver.cuGraphRetainUserObject(self.graph, object, 1, MOVE) };
        if given != CUresult::CUDA_SUCCESS {
            // SAFETY: the reference is still this function's.
            let _ = unsafe { driver.cuUserObjectRelease(object, 1) };
        }
        check(driver, "cuGraphRetainUserObject", given)
    }
}

/// A captured graph.
pub(crate) struct GraphHandle {
    driver: &'static Driver,
    raw: CUgraph,
    process: Process,
}

// SAFETY: an opaque handle, which any thread may use, one at a time.
unsafe impl Send for GraphHandle {}

impl GraphHandle {
    /// Returns the number of its nodes.
    pub(crate) fn len(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: the graph is live; with a NULL array the driver writes the number only.
        let got = unsafe { self.driver.cuGraphGetNodes(self.raw, null_mut(), &raw mut count) };
        check(self.driver, "cuGraphGetNodes", got)?;
        Ok(count)
    }

    /// Instantiates it for launches.
    pub(crate) fn instantiate(&self) -> Result<GraphExecHandle> {
        let (driver, mut raw) = (self.driver, null_mut());
        // SAFETY: the graph is live; `raw` is live; no flags.
        let made = unsafe { driver.cuGraphInstantiateWithFlags(&raw mut raw, self.raw, 0) };
        check(driver, "cuGraphInstantiate", made)?;
        Ok(GraphExecHandle { driver, raw, process: self.process })
    }
}

impl Drop for GraphHandle {
    fn drop(&mut self) {
        if self.process.is_current() {
            // SAFETY: the graph is live and not used again.
            let _ = unsafe { self.driver.cuGraphDestroy(self.raw) };
        }
    }
}

/// An executable graph.
pub(crate) struct GraphExecHandle {
    driver: &'static Driver,
    raw: CUgraphExec,
    process: Process,
}

// SAFETY: an opaque handle, which any thread may use, one at a time.
unsafe impl Send for GraphExecHandle {}

impl GraphExecHandle {
    /// Enqueues the graph.
    ///
    /// # Safety
    ///
    /// The memory that its operations use stays allocated until they are done, and the contracts of
    /// the operations hold.
    pub(crate) unsafe fn launch(&self, stream: &StreamHandle) -> Result<()> {
        // SAFETY: both are live; the operations are the caller's contract.
        let launched = unsafe { self.driver.cuGraphLaunch(self.raw, stream.raw()) };
        check(self.driver, "cuGraphLaunch", launched)
    }
}

impl Drop for GraphExecHandle {
    fn drop(&mut self) {
        if self.process.is_current() {
            // SAFETY: it is live and not used again; the driver waits for a running launch.
            let _ = unsafe { self.driver.cuGraphExecDestroy(self.raw) };
        }
    }
}
