//! The streams of calls: torch's current stream, a stream of the caller's, or devcomm's own.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;

use devcomm::{Context, Stream};
use pyo3::intern;
use pyo3::prelude::*;

use crate::errors::{exception, invalid};
use crate::own::detached;

/// `CU_STREAM_LEGACY`, another handle of the default stream.
const LEGACY: usize = 1;

/// A GPU and the streams that were used on it.
pub struct Gpu {
    pub context: Context,
    /// Of other libraries, by handle: dropping one would wait for its work.
    streams: RefCell<HashMap<usize, Stream>>,
    /// For calls outside of torch.
    own: Stream,
    pub simulated: bool,
}

impl Gpu {
    pub fn new(context: &Context, simulated: bool) -> devcomm::Result<Self> {
        let own = context.stream()?;
        Ok(Self { context: context.clone(), streams: RefCell::default(), own, simulated })
    }

    /// The stream that a call asks for; `None`: torch's current one if torch uses GPUs here, or
    /// else devcomm's own.
    pub fn stream(&self, asked: Option<&Bound<'_, PyAny>>, py: Python<'_>) -> PyResult<Stream> {
        let raw = match asked {
            Some(asked) if self.simulated => {
                return Err(invalid(format!("stream={asked}: simulated GPUs have no such stream")));
            }
            Some(asked) => Some(handle_of(asked)?),
            None if self.simulated => None,
            None => current_of_torch(py, self.context.ordinal())?,
        };
        let Some(raw) = raw else { return Ok(self.own.clone()) };
        let mut streams = self.streams.borrow_mut();
        if let Some(stream) = streams.get(&raw) {
            return Ok(stream.clone());
        }
        let stream = detached(py, || match raw {
            0 | LEGACY => self.context.default_stream(),
            // SAFETY: the handle is that of a stream of torch's, which lasts as long as the
            // process, or the caller's, who promises the same.
            raw => unsafe { Stream::from_raw(&self.context, raw as *mut c_void) },
        });
        streams.insert(raw, stream.clone());
        Ok(stream)
    }

    /// As [`stream`](Self::stream), but devcomm's own instead of the default stream, which cannot
    /// be captured.
    pub fn capturable(&self, asked: Option<&Bound<'_, PyAny>>, py: Python<'_>) -> PyResult<Stream> {
        let stream = self.stream(asked, py)?;
        Ok(if stream.as_raw().is_null() { self.own.clone() } else { stream })
    }

    /// Waits until the stream's work is done.
    pub fn synchronize(&self, py: Python<'_>, asked: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let stream = self.stream(asked, py)?;
        detached(py, || stream.synchronize()).map_err(exception)
    }
}

/// The handle (`cudaStream_t`) of a stream of Python's: a number, torch's, or by the protocol
/// `__cuda_stream__`.
fn handle_of(stream: &Bound<'_, PyAny>) -> PyResult<usize> {
    if let Ok(handle) = stream.extract::<usize>() {
        return Ok(handle);
    }
    if let Ok(handle) = stream.getattr(intern!(stream.py(), "cuda_stream")) {
        return handle.extract();
    }
    if let Ok(method) = stream.getattr(intern!(stream.py(), "__cuda_stream__")) {
        let (_version, handle): (usize, usize) = method.call0()?.extract()?;
        return Ok(handle);
    }
    Err(invalid(format!(
        "stream={stream}: expected a torch.cuda.Stream, an object with __cuda_stream__, or the \
         handle of a stream as a number"
    )))
}

/// The handle of torch's current stream on a GPU, if torch is imported and is built for GPUs.
fn current_of_torch(py: Python<'_>, gpu: usize) -> PyResult<Option<usize>> {
    let modules = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?;
    let Ok(torch) = modules.get_item(intern!(py, "torch._C")) else { return Ok(None) };
    // Quicker than `torch.cuda.current_stream().cuda_stream`, which makes an object.
    let Ok(current) = torch.getattr(intern!(py, "_cuda_getCurrentRawStream")) else {
        return Ok(None);
    };
    current.call1((gpu,))?.extract().map(Some)
}
