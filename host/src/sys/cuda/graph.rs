//! Stream capture and CUDA graphs.

use std::ptr::null_mut;

use devcomm_sys::driver::{
    CUgraph, CUgraphExec, CUstreamCaptureMode, CUstreamCaptureStatus, Driver,
};

use super::check;
use super::stream::StreamHandle;
use crate::error::{Error, Result};

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

    /// Whether the stream is captured, by whomever.
    pub(crate) fn is_capturing(&self) -> Result<bool> {
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is live; `status` is live.
        let read = unsafe { self.driver().cuStreamIsCapturing(self.raw(), &raw mut status) };
        check(self.driver(), "cuStreamIsCapturing", read)?;
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
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
        Ok(GraphHandle { driver, raw })
    }
}

/// A captured graph.
pub(crate) struct GraphHandle {
    driver: &'static Driver,
    raw: CUgraph,
}

// SAFETY: an opaque handle, which any thread may use, one at a time.
unsafe impl Send for GraphHandle {}

impl GraphHandle {
    /// The number of its nodes.
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
        Ok(GraphExecHandle { driver, raw })
    }
}

impl Drop for GraphHandle {
    fn drop(&mut self) {
        // SAFETY: the graph is live and not used again.
        let _ = unsafe { self.driver.cuGraphDestroy(self.raw) };
    }
}

/// An executable graph.
pub(crate) struct GraphExecHandle {
    driver: &'static Driver,
    raw: CUgraphExec,
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
        // SAFETY: it is live and not used again; the driver waits for a running launch.
        let _ = unsafe { self.driver.cuGraphExecDestroy(self.raw) };
    }
}
