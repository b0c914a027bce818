//! The streams of calls: torch's current stream, a stream of the caller's, or devcomm's own.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::iter::from_fn;
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, PoisonError};

use devcomm::cudarc::driver::sys::{
    CUresult, CUstreamCaptureMode, cuEventRecord, cuThreadExchangeStreamCaptureMode,
};
use devcomm::{Context, Event, Stream};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt};

use crate::array::Array;
use crate::debug;
use crate::errors::{exception, invalid, invalid_input};
use crate::own::detached;
use crate::signals::waiting;

/// `CU_STREAM_LEGACY`, another handle of the default stream.
pub const LEGACY: usize = 1;
/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: usize = 2;

/// What the calls on each stream use, by its handle, and the events after them, in their order.
type InFlight = HashMap<usize, VecDeque<(Event, Vec<Py<PyAny>>)>>;

fn locked<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A GPU and the streams that were used on it.
pub struct Gpu {
    pub context: Context,
    /// Streams of other libraries, by handle. They are kept, as a drop would wait for their work.
    streams: Mutex<HashMap<usize, Stream>>,
    /// The objects of Python's by which calls were given these streams, which keep them.
    given: Mutex<HashMap<usize, Py<PyAny>>>,
    /// The stream of calls outside of torch.
    own: Stream,
    pub simulated: bool,
    /// What calls use that the GPU has not done, and the events after them.
    in_flight: Mutex<InFlight>,
}

impl Gpu {
    pub fn new(context: &Context, simulated: bool) -> devcomm::Result<Self> {
        let own = context.stream()?;
        let (streams, given, in_flight) = Default::default();
        Ok(Self { context: context.clone(), streams, given, own, simulated, in_flight })
    }

    /// Returns the stream that a call asks for; `None`: torch's current one if torch uses GPUs
    /// here, or else devcomm's own.
    pub fn stream(&self, asked: Option<&Bound<'_, PyAny>>, py: Python<'_>) -> PyResult<Stream> {
        let raw = match asked {
            Some(asked) => {
                let raw = require_shared(handle_of(asked)?)?;
                if self.simulated {
                    let why = "simulated GPUs have no such stream";
                    return Err(invalid(format!("stream={asked}: {why}")));
                }
                let (index, own) = (intern!(py, "device_index"), self.context.ordinal());
                // Torch's streams name their GPU; the driver refuses others of another GPU.
                if let Some(gpu) = asked.getattr_opt(index)?
                    && gpu.extract::<usize>()? != own
                {
                    return Err(invalid(format!("stream={asked}: expected a stream of GPU {own}")));
                }
                if !asked.is_instance_of::<PyInt>() {
                    let given = || asked.clone().unbind();
                    locked(&self.given).entry(raw).or_insert_with(given);
                }
                Some(raw)
            }
            None if self.simulated => None,
            None => current_of_torch(py, self.context.ordinal())?,
        };
        let Some(raw) = raw else { return Ok(self.own.clone()) };
        if let Some(stream) = locked(&self.streams).get(&raw) {
            return Ok(stream.clone());
        }
        let stream = detached(py, || match raw {
            0 | LEGACY => self.context.default_stream(),
            // SAFETY: the handle is that of a stream of torch's, which lasts as long as the
            // process, or of an object that `given` keeps; the caller who has passed a number
            // promises the same. `require_shared` has refused that of each thread.
            raw => unsafe { Stream::from_raw(&self.context, raw as *mut c_void) },
        });
        let mut streams = locked(&self.streams);
        if let Some(first) = streams.get(&raw) {
            // Another thread was quicker; a drop would wait for the stream's work.
            std::mem::forget(stream);
            return Ok(first.clone());
        }
        streams.insert(raw, stream.clone());
        Ok(stream)
    }

    /// Lets a call's stream wait for the work in which other libraries write the arrays. If the
    /// stream is captured it does not: the program orders that work and the graph's replays.
    fn wait_for_writers(&self, stream: &Stream, arrays: &[&Array]) -> devcomm::Result<()> {
        for writer in arrays.iter().filter_map(|array| array.written_on) {
            let writer = if writer == LEGACY { null_mut() } else { writer as *mut c_void };
            // The default stream cannot be captured.
            let is_captured = !stream.is_default() && stream.is_capturing()?;
            if is_captured || writer == stream.as_raw() {
                continue;
            }
            let event = self.context.event_without_timing()?;
            // SAFETY: the event is of the GPU's context, which is current since the event was made.
            // The object that the caller passes keeps the stream that its interface names.
            let recorded = unsafe { cuEventRecord(event.as_raw().cast(), writer.cast()) };
            if recorded != CUresult::CUDA_SUCCESS {
                let why = format!("an array was written on the stream {writer:?}: {recorded:?}");
                return Err(invalid_input(why));
            }
            stream.wait_event(&event)?;
        }
        Ok(())
    }

    /// Calls `f`, which enqueues work that uses the arrays. The objects that own their memory are
    /// kept until the GPU has done it or, if the stream is captured, until the graph is gone; also
    /// if `f` fails, since it may have enqueued a part.
    ///
    /// The call's stream comes with what was asked for, as in [`stream`](Self::stream): torch frees
    /// the memory of its tensors as work of its current stream, and a graph of its own keeps what
    /// is allocated for it. What was allocated before must outlast the graph, as for torch's own
    /// operations.
    pub fn call<R>(
        &self,
        py: Python<'_>,
        (stream, asked): (&Stream, Option<&Bound<'_, PyAny>>),
        arrays: &[&Array],
        f: impl FnOnce() -> devcomm::Result<R>,
    ) -> PyResult<R> {
        // No other library has memory of simulated GPUs.
        let done = if self.simulated {
            waiting(py, f)?
        } else {
            let done = waiting(py, || self.wait_for_writers(stream, arrays).and_then(|()| f()));
            let kept = self.keep(py, stream, asked, arrays);
            done.and_then(|done| kept.map(|()| done))?
        };
        debug::called(py, self, stream, arrays).map(|()| done)
    }

    fn keep(
        &self,
        py: Python<'_>,
        stream: &Stream,
        asked: Option<&Bound<'_, PyAny>>,
        arrays: &[&Array],
    ) -> PyResult<()> {
        let owners = arrays.iter().filter_map(|array| array.owner(py, asked.is_none()));
        let owners: Vec<_> = owners.collect();
        self.drop_done(stream);
        if owners.is_empty() {
            return Ok(());
        }
        // The default stream cannot be captured. A capture of another one takes the owners.
        let owners = match stream.is_default() {
            true => Some(owners),
            false => stream.give_to_capture(owners).map_err(exception)?,
        };
        let Some(owners) = owners else { return Ok(()) };
        let event = self.context.event_without_timing();
        match event.and_then(|event| stream.record(&event).map(|()| event)) {
            Ok(event) => {
                let mut in_flight = locked(&self.in_flight);
                in_flight.entry(stream.as_raw() as usize).or_default().push_back((event, owners));
            }
            // The GPU has failed, and may still use their memory.
            Err(error) => {
                std::mem::forget(owners);
                return Err(exception(error));
            }
        }
        Ok(())
    }

    /// Drops what calls used that the GPU has done; later if the stream of this call is captured,
    /// since a destructor might call the driver, which would invalidate the capture.
    fn drop_done(&self, stream: &Stream) {
        let is_empty = locked(&self.in_flight).values().all(VecDeque::is_empty);
        if is_empty || !stream.is_default() && stream.is_capturing().unwrap_or(true) {
            return;
        }
        let is_done = |(event, _): &mut (Event, _)| event.is_reached().unwrap_or(false);
        let done: Vec<_> = beside_captures(|| {
            let mut in_flight = locked(&self.in_flight);
            let next = |queue: &mut VecDeque<_>| queue.pop_front_if(is_done);
            let of_each = in_flight.values_mut().flat_map(|queue| from_fn(move || next(queue)));
            of_each.collect()
        });
        // Their destructors may call devcomm, so the lock is released.
        drop(done);
    }

    /// Does the same as [`stream`](Self::stream), but returns devcomm's own stream instead of the
    /// default stream, which cannot be captured.
    pub fn capturable(&self, asked: Option<&Bound<'_, PyAny>>, py: Python<'_>) -> PyResult<Stream> {
        let stream = self.stream(asked, py)?;
        Ok(if stream.is_default() { self.own.clone() } else { stream })
    }

    /// Waits until the stream's work is done.
    pub fn synchronize(&self, py: Python<'_>, asked: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let stream = self.stream(asked, py)?;
        waiting(py, || stream.synchronize())?;
        debug::synchronized(py, self, &stream)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let in_flight = std::mem::take(&mut *locked(&self.in_flight));
        if in_flight.values().any(|queue| !queue.is_empty()) {
            self.context.drop_after_work(in_flight);
        }
    }
}

/// Calls `f`, in which the driver allows queries of events although another thread, or another
/// library on this one, captures a stream: by default a query would invalidate the capture.
fn beside_captures<R>(f: impl FnOnce() -> R) -> R {
    let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the place is live. The driver exchanges the mode of this thread for what is there,
    // and so the second call restores it.
    let mut exchange = || unsafe { cuThreadExchangeStreamCaptureMode(&raw mut mode) };
    let _ = exchange();
    let result = f();
    let _ = exchange();
    result
}

/// Returns the handle (`cudaStream_t`) of a stream of Python's: a number, torch's, or by the
/// protocol `__cuda_stream__`.
pub fn handle_of(stream: &Bound<'_, PyAny>) -> PyResult<usize> {
    let py = stream.py();
    if stream.hasattr(intern!(py, "__index__"))? {
        return stream.extract();
    }
    if let Some(handle) = stream.getattr_opt(intern!(py, "cuda_stream"))? {
        return handle.extract();
    }
    if let Some(method) = stream.getattr_opt(intern!(py, "__cuda_stream__"))? {
        let (_version, handle): (usize, usize) = method.call0()?.extract()?;
        return Ok(handle);
    }
    Err(invalid(format!(
        "stream={stream}: expected a torch.cuda.Stream, an object with __cuda_stream__, or the \
         handle of a stream as a number"
    )))
}

/// Returns the handle of a stream.
///
/// # Errors
///
/// For that of a stream that is another one on each thread.
pub fn require_shared(handle: usize) -> PyResult<usize> {
    match handle {
        PER_THREAD => Err(invalid(
            "the default stream per thread (handle 2) is another stream on each thread, and is \
             not supported; use a stream that the program has made, or the default stream",
        )),
        handle => Ok(handle),
    }
}

/// Returns a module of Python's, if it is loaded.
pub fn loaded<'py>(py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    let modules = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?;
    modules.cast::<PyDict>()?.get_item(name)
}

/// Returns the handle of torch's current stream on a GPU, if torch is imported and is built for
/// GPUs.
fn current_of_torch(py: Python<'_>, gpu: usize) -> PyResult<Option<usize>> {
    let Some(torch) = loaded(py, "torch._C")? else { return Ok(None) };
    // Quicker than `torch.cuda.current_stream().cuda_stream`, which makes an object.
    match torch.getattr_opt(intern!(py, "_cuda_getCurrentRawStream"))? {
        Some(current) => current.call1((gpu,))?.extract().map(Some),
        None => Ok(None),
    }
}

/// Returns whether torch, if it uses GPUs here, captures its current stream.
pub fn captures_current(py: Python<'_>) -> PyResult<bool> {
    let Some(torch) = loaded(py, "torch.cuda")? else { return Ok(false) };
    let uses_gpus: bool = torch.call_method0(intern!(py, "is_initialized"))?.extract()?;
    if !uses_gpus {
        return Ok(false);
    }
    torch.call_method0(intern!(py, "is_current_stream_capturing"))?.extract()
}
