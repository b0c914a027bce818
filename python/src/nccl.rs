//! Which NCCL the process uses.

use std::path::PathBuf;

use devcomm::Library;
use pyo3::prelude::*;

use crate::signals::waiting;

/// Loads an NCCL that devcomm's kernels can use, and returns its version and path. It is needed
/// where torch's own is too old, unless pip install nvidia-nccl-cu13==2.32.3 replaces that. Called
/// before `import torch`, it makes torch use the same library. Sets DEVCOMM_NCCL_HOME to its
/// folder.
///
/// path: the root of an NCCL installation, or the folder of its library. None: the first one that
/// is new enough, of DEVCOMM_NCCL_HOME, NCCL_HOME, this Python's packages, devcomm's cache and the
/// system; but if the process has loaded one, it is that one, or an error if that is too old, with
/// the command that renews it.
#[pyfunction]
#[pyo3(signature = (path=None))]
pub fn load_nccl(py: Python<'_>, path: Option<PathBuf>) -> PyResult<(String, String)> {
    let library = waiting(py, || Library::open(path.as_deref()))?;
    let path = library.path();
    // Global symbols: torch finds these functions before those of the library that it loads.
    let ctypes = py.import("ctypes")?;
    ctypes.call_method1("CDLL", (path.as_os_str(), ctypes.getattr("RTLD_GLOBAL")?))?;
    // A later `Library::open` finds this library, and not another one that is new enough for it.
    let variables = py.import("os")?.getattr("environ")?;
    let folder = path.parent().unwrap_or(path);
    variables.set_item("DEVCOMM_NCCL_HOME", folder.as_os_str())?;
    Ok((library.version().to_string(), path.display().to_string()))
}
