//! Stream captures and CUDA graphs, in the driver's terms.

use std::ptr::null_mut;

use devcomm_sys::driver::{CUgraph, CUgraphExec, CUstreamCaptureMode, Driver};

use super::check;
use super::stream::StreamHandle;
use crate::error::{Error, Result};

impl StreamHandle {
    /// Begins a capture: the stream's work goes to a graph instead of the GPU. The mode is relaxed,
    /// so that any thread may make any call meanwhile: NCCL connects ranks at their first use,
    /// which may be in a capture.
    pub(crate) fn begin_capture(&self) -> Result<()> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is live.
        let begun = unsafe { self.driver().cuStreamBeginCapture_v2(self.raw(), mode) };
        check(self.driver(), "cuStreamBeginCapture", begun)
    }

    /// Ends the capture. What was captured cannot be run if a call in between was not allowed in a
    /// capture.
    pub(crate) fn end_capture(&self) -> Result<GraphHandle> {
        let (driver, mut raw) = (self.driver(), null_mut());
        // SAFETY: the stream is live; `raw` is live.
        let ended = unsafe { driver.cuStreamEndCapture(self.raw(), &raw mut raw) };
        check(driver, "cuStreamEndCapture", ended)?;
        if raw.is_null() {
            return Err(Error::invalid("the capture of a stream gave no graph"));
        }
        Ok(GraphHandle { driver, raw })
    }
}

/// A captured graph.
pub(crate) struct GraphHandle {
    driver: &'static Driver,
    raw: CUgraph,
}

impl GraphHandle {
    /// How many operations it has.
    pub(crate) fn len(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: the graph is live; without an array the driver gives the number.
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

/// A graph that can be launched.
pub(crate) struct GraphExecHandle {
    driver: &'static Driver,
    raw: CUgraphExec,
}

impl GraphExecHandle {
    /// Enqueues the graph.
    ///
    /// # Safety
    ///
    /// What its operations use stays allocated until the stream has completed them, and their own
    /// contracts hold.
    pub(crate) unsafe fn launch(&self, stream: &StreamHandle) -> Result<()> {
        // SAFETY: both are live; the caller vouches for the operations.
        let launched = unsafe { self.driver.cuGraphLaunch(self.raw, stream.raw()) };
        check(self.driver, "cuGraphLaunch", launched)
    }
}

impl Drop for GraphExecHandle {
    fn drop(&mut self) {
        // SAFETY: it is live and not used again; the driver waits for a launch that is running.
        let _ = unsafe { self.driver.cuGraphExecDestroy(self.raw) };
    }
}
