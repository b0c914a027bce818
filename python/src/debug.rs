//! What `devcomm.debug` sees of calls, once it is enabled.

use devcomm::Stream;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::array::{Array, Owner, Place};
use crate::communicator::Comm;
use crate::errors::exception;
use crate::signals::attached;
use crate::stream::{Gpu, LEGACY};
use crate::window::Win;

/// The object whose methods are called.
static WATCH: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Lets the first object that is passed see the calls that follow.
#[pyfunction(name = "_watch")]
pub fn watch(py: Python<'_>, watcher: Py<PyAny>) {
    let _ = WATCH.set(py, watcher);
}

/// Reports that a call has enqueued work that uses these arrays.
pub fn called(py: Python<'_>, gpu: &Gpu, stream: &Stream, arrays: &[&Array]) -> PyResult<()> {
    let Some(watch) = WATCH.get(py) else { return Ok(()) };
    let is_torchs = |place: &_| match place {
        Place::Gpu { owner: Owner::Torch(_), .. } | Place::Window(_) => true,
        Place::Gpu { owner: Owner::Other(_), .. } | Place::Host { .. } | Place::Dlpack { .. } => {
            false
        }
    };
    let arrays = arrays.iter().filter(|array| array.len > 0 && is_torchs(&array.place));
    let arrays: Vec<_> = arrays.map(|array| (array.address, array.written)).collect();
    watch.call_method1(py, "called", (handle(gpu, stream), arrays))?;
    Ok(())
}

/// Reports that a call of this name has enqueued work on a stream in which ranks use each other's
/// parts of the window.
pub fn shared(py: Python<'_>, window: &Win, call: &str, stream: &Stream) -> PyResult<()> {
    let Some(watch) = WATCH.get(py) else { return Ok(()) };
    // The default stream cannot be captured.
    if !stream.is_default() && stream.is_capturing().map_err(exception)? {
        return Ok(());
    }
    let gpu = &window.comm.gpu;
    let (device, stream) = (gpu.context.ordinal(), handle(gpu, stream));
    let arguments = (key(&window.comm), window.address(), call, device, stream);
    watch.call_method1(py, "shared", arguments)?;
    Ok(())
}

/// Reports that the host has waited for a stream.
pub fn synchronized(py: Python<'_>, gpu: &Gpu, stream: &Stream) -> PyResult<()> {
    let Some(watch) = WATCH.get(py) else { return Ok(()) };
    watch.call_method1(py, "synchronized", (handle(gpu, stream),))?;
    Ok(())
}

/// Does `wait`, a barrier of all ranks of a communicator or of a world, and reports it.
pub fn barrier(
    py: Python<'_>,
    comm: Option<&Comm>,
    wait: impl FnOnce() -> PyResult<()>,
) -> PyResult<()> {
    let Some(watch) = WATCH.get(py) else { return wait() };
    let done = watch.call_method1(py, "arriving", (comm.map(key),))?;
    wait()?;
    watch.call_method1(py, "passed", (done,))?;
    Ok(())
}

/// Reports that a window is about to be freed.
pub fn dropped(window: &Win) {
    attached(|py| {
        let Some(watch) = WATCH.get(py) else { return };
        let dropped = watch.call_method1(py, "dropped", (key(&window.comm), window.address()));
        if let Err(error) = dropped {
            error.write_unraisable(py, None);
        }
    });
}

/// Returns the number by which torch knows a stream; `None` on simulated GPUs.
fn handle(gpu: &Gpu, stream: &Stream) -> Option<usize> {
    let handle = match stream.as_raw() as usize {
        LEGACY => 0,
        handle => handle,
    };
    (!gpu.simulated).then_some(handle)
}

fn key(comm: &Comm) -> usize {
    std::ptr::from_ref(comm) as usize
}
