//! Kernels of one's own, from the files that `devcomm ptx` writes, launched by name.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use devcomm::{DataType, DevCommResource, Kernels, LaunchConfig, ParamInfo, RawArg};
use devcomm_types::Slice;
use half::{bf16, f16};
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::array::{Array, Place};
use crate::communicator::{Comm, PyCommunicator, PyDevComm};
use crate::debug;
use crate::errors::invalid;
use crate::operand::with_type;
use crate::own::Own;
use crate::signals::waiting;
use crate::window::{PyWindow, Win};

/// An address that is not NULL, and aligned for every type, for slices without elements.
const NOWHERE: u64 = 256;

/// Kernels, and their communicator, which is dropped last, since its GPU keeps streams.
struct Inner {
    kernels: Kernels,
    comm: Arc<Comm>,
}

/// Kernels of a package of kernels, compiled by `devcomm ptx --all`, on the GPU of a communicator.
///
/// path: the folder that the command names, with a .ptx and a .json for each file of kernels; or
///     one .ptx or .cubin, with its .json beside it.
///
/// Simulated GPUs run no PTX: there, kernels are part of a program in Rust.
#[pyclass(name = "KernelSet", module = "devcomm", frozen)]
pub struct PyKernelSet {
    own: Own<Inner>,
}

#[pymethods]
impl PyKernelSet {
    #[new]
    fn new(py: Python<'_>, communicator: &PyCommunicator, path: PathBuf) -> PyResult<Self> {
        let comm = communicator.get()?;
        let files = files(&path)?;
        // SAFETY: they are launched by name only, and who calls `launch` vouches for the kernel.
        let load = || unsafe { Kernels::load_files(&comm.gpu.context, &files) };
        let kernels = waiting(py, load)?;
        Ok(Self { own: Own::new(&comm.home.clone(), Inner { kernels, comm }) })
    }

    /// Returns the names of the kernels; an instance of a generic one has its types in it:
    /// "sum_f32".
    #[getter]
    fn names(&self) -> PyResult<Vec<String>> {
        Ok(self.own.get()?.kernels.names().map(str::to_owned).collect())
    }

    /// Returns the names and types of a kernel's parameters, in order.
    fn params(&self, name: &str) -> PyResult<Vec<(String, String)>> {
        let params = params(&self.own.get()?.kernels, name)?;
        Ok(params.into_iter().map(|param| (param.name, param.type_name)).collect())
    }

    /// Launches the kernel on torch's current stream, or the given one.
    ///
    /// args: for a parameter DevComm a DevComm, for Window<T> a Window of that type, for &[T],
    ///     *const T and *mut T an array on the GPU of that type (&[T] of a type that arrays lack is
    ///     refused, and pointers take any array), for a number a number, for bool a bool, and for
    ///     any other type its bytes.
    /// grid, block: blocks, and threads of a block: a number, or up to three.
    /// shared: dynamic shared memory of a block, in bytes. cluster: blocks of a cluster.
    /// dependent: whether the kernel may begin before the previous one of the stream has ended.
    ///
    /// As in Rust, a launch that would hang or exceed the GPU is refused. What a kernel requires of
    /// its arguments is not checked here.
    #[pyo3(signature = (
        name, *args, grid, block, shared=0, cluster=None, dependent=false, stream=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn launch(
        &self,
        name: &str,
        args: &Bound<'_, PyTuple>,
        grid: Extents,
        block: Extents,
        shared: u32,
        cluster: Option<u32>,
        dependent: bool,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (py, inner) = (args.py(), self.own.get()?);
        let Inner { comm, kernels } = &*inner;
        let params = params(kernels, name)?;
        if params.len() != args.len() {
            let list: Vec<_> = params.iter().map(describe).collect();
            let (passed, list) = (args.len(), list.join(", "));
            return Err(invalid(format!("{name} takes ({list}), and got {passed} arguments")));
        }
        let values = params.iter().zip(args.iter());
        let values = values.map(|(param, arg)| Value::new(comm, param, &arg));
        let values = values.collect::<PyResult<Vec<_>>>()?;
        let (asked, stream) = (stream, comm.gpu.stream(stream, py)?);
        let mut config = LaunchConfig::new(grid.three(), block.three()).with_dynamic_shared(shared);
        config.cluster = cluster;
        config.dependent = dependent;
        let launch = || {
            let args = values.iter().map(Value::raw).collect::<devcomm::Result<Vec<_>>>()?;
            // SAFETY: each argument is of its parameter's type; the caller of Python promises the
            // kernel's contract. Memory on the GPU lasts as `Gpu::call` says.
            unsafe { kernels.on(&stream).launch_by_name(name, config, &args) }
        };
        let arrays: Vec<_> = values.iter().filter_map(Value::array).collect();
        comm.gpu.call(py, (&stream, asked), &arrays, launch)?;
        values.iter().try_for_each(|value| match value {
            Value::Window(window) => debug::shared(py, window, name, &stream),
            _ => Ok(()),
        })
    }

    /// Unloads them, when their last launch is done.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.own.close(py)
    }
}

/// One to three extents.
#[derive(FromPyObject)]
enum Extents {
    One(u32),
    Two((u32, u32)),
    Three((u32, u32, u32)),
}

impl Extents {
    fn three(&self) -> (u32, u32, u32) {
        match *self {
            Self::One(x) => (x, 1, 1),
            Self::Two((x, y)) => (x, y, 1),
            Self::Three(all) => all,
        }
    }
}

/// Returns the files to load: `path`, or every PTX of the folder.
fn files(path: &Path) -> PyResult<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path)? {
        files.extend(Some(entry?.path()).filter(|path| path.extension() == Some("ptx".as_ref())));
    }
    files.sort();
    if files.is_empty() {
        return Err(invalid(format!("{} has no .ptx: see `devcomm ptx --all`", path.display())));
    }
    Ok(files)
}

fn params(kernels: &Kernels, name: &str) -> PyResult<Vec<ParamInfo>> {
    kernels.params(name).ok_or_else(|| {
        let names: Vec<_> = kernels.names().collect();
        invalid(format!("no kernel {name}; there are {}", names.join(", ")))
    })
}

fn describe(param: &ParamInfo) -> String {
    format!("{}: {}", param.name, param.type_name)
}

/// A value that fits a parameter.
enum Value {
    DevComm(Arc<DevCommResource>),
    Window(Arc<Win>),
    Address(Array),
    Slice(Array),
    Bytes(Vec<u8>),
}

impl Value {
    fn new(comm: &Comm, param: &ParamInfo, arg: &Bound<'_, PyAny>) -> PyResult<Self> {
        let ty = param.type_name.as_str();
        let inside = |before: &str, after| ty.strip_prefix(before)?.strip_suffix(after);
        let wrong = |what: &str| invalid(format!("{} takes {what}, got {arg}", describe(param)));
        if ty == "DevComm" {
            let dev_comm = arg.cast::<PyDevComm>().map_err(|_| wrong("a devcomm.DevComm"))?;
            return Ok(Self::DevComm(dev_comm.get().get()?));
        }
        if let Some(element) = inside("Window<", ">") {
            let window = arg.cast::<PyWindow>().map_err(|_| wrong("a devcomm.Window"))?;
            let window = window.get().get()?;
            require_element(param, element, window.data_type)?;
            return Ok(Self::Window(window));
        }
        let pointer = inside("*const ", "").or_else(|| inside("*mut ", ""));
        if let Some(element) = inside("&[", "]").or(pointer) {
            let (array, written) = (Array::of(comm, arg, &param.name)?, ty.starts_with("*mut"));
            match array.place {
                Place::Host { .. } => return Err(wrong("an array on the GPU")),
                Place::Gpu { writable: false, .. } if written => {
                    return Err(wrong("an array that may be written to"));
                }
                _ => {}
            }
            require_element(param, element, array.data_type)?;
            let array = Array { written, ..array };
            return Ok(if pointer.is_some() { Self::Address(array) } else { Self::Slice(array) });
        }
        macro_rules! bytes {
            ($type:ty) => {
                arg.extract::<$type>().map(|value| value.to_ne_bytes().to_vec())
            };
        }
        let bytes = match ty {
            "bool" => arg.extract::<bool>().map(|value| vec![u8::from(value)]),
            "u8" => bytes!(u8),
            "i8" => bytes!(i8),
            "u16" => bytes!(u16),
            "i16" => bytes!(i16),
            "u32" | "ResourceHandle" => bytes!(u32),
            "i32" => bytes!(i32),
            "u64" => bytes!(u64),
            "i64" => bytes!(i64),
            "usize" => bytes!(usize),
            "isize" => bytes!(isize),
            "f32" => bytes!(f32),
            "f64" => bytes!(f64),
            "f16" => arg.extract().map(|x| f16::from_f32(x).to_ne_bytes().to_vec()),
            "bf16" => arg.extract().map(|x| bf16::from_f32(x).to_ne_bytes().to_vec()),
            _ => match arg.cast::<PyBytes>() {
                Ok(bytes) if bytes.as_bytes().len() == param.size => Ok(bytes.as_bytes().to_vec()),
                _ => return Err(wrong(&format!("its {} bytes", param.size))),
            },
        };
        bytes.map(Self::Bytes).map_err(|error: PyErr| {
            let py = arg.py();
            let of_its_value = error.is_instance_of::<PyTypeError>(py)
                || error.is_instance_of::<PyValueError>(py)
                || error.is_instance_of::<PyOverflowError>(py);
            if of_its_value { wrong(&format!("such a number ({error})")) } else { error }
        })
    }

    fn array(&self) -> Option<&Array> {
        match self {
            Self::Address(array) | Self::Slice(array) => Some(array),
            Self::DevComm(_) | Self::Window(_) | Self::Bytes(_) => None,
        }
    }

    fn raw(&self) -> devcomm::Result<RawArg<'_>> {
        Ok(match self {
            Self::DevComm(dev_comm) => RawArg::new::<devcomm_types::DevComm, _>(&**dev_comm),
            Self::Window(window) => with_type!(window.data_type, T => {
                RawArg::new::<devcomm_types::Window<T>, _>(window.typed::<T>()?)
            }),
            Self::Address(array) => RawArg::new::<u64, _>(array.address),
            // A slice is an address and a number of elements, whatever their type.
            Self::Slice(Array { len: 0, .. }) => RawArg::new(Slice::<u8>::new(NOWHERE, 0)),
            Self::Slice(array) => RawArg::new(Slice::<u8>::new(array.address, array.len)),
            Self::Bytes(bytes) => RawArg::of_bytes(bytes),
        })
    }
}

/// Fails for elements of another type than the parameter's. A pointer to a type that arrays lack
/// may have any; the length of a slice of these is not known.
fn require_element(param: &ParamInfo, element: &str, found: DataType) -> PyResult<()> {
    let name = match element {
        "usize" => "u64",
        "isize" => "i64",
        element => element,
    };
    let name = if name.starts_with("F8") { name.to_lowercase() } else { name.to_owned() };
    match DataType::from_name(&name) {
        Some(wanted) if wanted != found => {
            Err(invalid(format!("{} takes elements of {element}, got {found:?}", describe(param))))
        }
        None if param.type_name.starts_with('&') => Err(invalid(format!(
            "{}: arrays have no elements of {element}; let the kernel take *const {element} and \
             their number",
            describe(param)
        ))),
        _ => Ok(()),
    }
}
