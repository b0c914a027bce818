//! Arrays of Python: torch's tensors, numpy's arrays, devcomm's windows, and whatever describes its
//! memory on a GPU by `__cuda_array_interface__` or DLPack.

use std::sync::Arc;

use devcomm::{DataType, DeviceSlice, DlpackTensor, Dynamic};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyDict};

use crate::communicator::Comm;
use crate::errors::{CHECK_ERROR, exception, invalid, raise};
use crate::own::detached;
use crate::signals::waiting;
use crate::stream::{LEGACY, captures_current, handle_of, loaded, require_shared};
use crate::window::{PyWindow, Win, name_of};

/// The memory of an array, whose elements are consecutive in row-major order.
///
/// If there are elements, the address is not 0, it is aligned for them, and the last one ends below
/// 2^64; they have at most `isize::MAX` bytes.
pub struct Array {
    pub address: u64,
    pub len: usize,
    pub shape: Vec<usize>,
    pub data_type: DataType,
    pub place: Place,
    /// Whether the call writes the elements, and possibly reads them too.
    pub written: bool,
    /// The handle of another library's stream, if work on it may still write the array.
    pub written_on: Option<usize>,
}

/// Where an array is, and what keeps its memory beyond the caller's reference.
pub enum Place {
    /// An array in memory of the host that the caller's reference keeps.
    Host { writable: bool },
    /// An array in memory of this GPU that `owner` keeps.
    Gpu { ordinal: usize, writable: bool, owner: Owner },
    /// A window of devcomm's, which this keeps.
    Window(Arc<Win>),
    /// Memory of this GPU, which another library lends by DLPack.
    Dlpack { _tensor: Imported },
}

/// A tensor of another library's. It is given back when the GPU no longer uses it, for which the
/// drop waits without the GIL.
pub struct Imported(Option<DeviceSlice<Dynamic>>);

impl Drop for Imported {
    fn drop(&mut self) {
        let tensor = self.0.take();
        Python::attach(|py| detached(py, || drop(tensor)));
    }
}

/// The object that keeps memory of a GPU allocated.
pub enum Owner {
    /// A tensor of torch's. Torch reuses its memory for what later work of the current stream uses,
    /// and for nothing else while a graph has it that it was allocated for.
    Torch(Py<PyAny>),
    Other(Py<PyAny>),
}

/// The contents of numpy's `__array_interface__` or of numba's `__cuda_array_interface__`, which
/// have the same form.
struct Interface {
    address: u64,
    shape: Vec<usize>,
    data_type: DataType,
    writable: bool,
    /// The stream after whose work the values are there.
    stream: Option<usize>,
}

impl Array {
    /// Returns the memory of `array`, which the call reads, and which is called `name` in messages.
    ///
    /// Memory on the host is taken from tensors of torch's and numpy's arrays alone, which keep it:
    /// what another object's `__array_interface__` describes may be free again when that property
    /// returns, as with numpy's scalars.
    pub fn of(comm: &Comm, array: &Bound<'_, PyAny>, name: &str) -> PyResult<Self> {
        let py = array.py();
        if let Ok(window) = array.cast::<PyWindow>() {
            let window = window.get().get()?;
            let (address, shape, data_type) =
                (window.address(), vec![window.len], window.data_type);
            return Self::new(name, address, shape, data_type, Place::Window(window));
        }
        if TENSOR.is_of(array)? {
            return Self::of_torch(array, name)?.here(comm, name);
        }
        if NDARRAY.is_of(array)? {
            return Self::of_numpy(array, name);
        }
        if SCALAR.is_of(array)? {
            return Err(PyTypeError::new_err(format!(
                "{name} is a scalar of numpy, which has no memory of its own: a scalar cannot \
                 receive, nor be sent; use np.array(x)"
            )));
        }
        if let Some(interface) = array.getattr_opt(intern!(py, "__cuda_array_interface__"))? {
            let Interface { address, shape, data_type, writable, stream } =
                Interface::new(interface.cast()?, name)?;
            // In a simulated world `Operand::new` refuses the memory of any real GPU.
            let ordinal = match comm.gpu.simulated || shape.contains(&0) {
                true => comm.gpu.context.ordinal(),
                false => gpu_of(address, name)?,
            };
            let owner = Owner::Other(array.clone().unbind());
            let place = Place::Gpu { ordinal, writable, owner };
            let array = Self::new(name, address, shape, data_type, place)?;
            return Self { written_on: stream, ..array }.here(comm, name);
        }
        if array.hasattr(intern!(py, "__dlpack__"))? {
            return Self::of_dlpack(comm, array, name);
        }
        let class = array.get_type().name()?;
        Err(PyTypeError::new_err(format!(
            "{name} is of type {class}: expected a tensor of torch, an array of numpy (see \
             numpy.asarray), a devcomm.Window, or an object on the GPU with \
             __cuda_array_interface__ or __dlpack__"
        )))
    }

    fn new(
        name: &str,
        address: u64,
        shape: Vec<usize>,
        data_type: DataType,
        place: Place,
    ) -> PyResult<Self> {
        let size = data_type.size();
        let Some(len) = elements_of(&shape, size) else {
            return Err(invalid(format!(
                "{name} has the shape {shape:?}: so many elements of {data_type:?} have no memory"
            )));
        };
        let wrong = |what: String| {
            Err(invalid(format!("{name}, of shape {shape:?} and {data_type:?}, {what}")))
        };
        if len > 0 && address == 0 {
            return wrong("is at the address NULL, where nothing is".to_owned());
        }
        if address.checked_add((len * size) as u64).is_none() {
            return wrong(format!("begins at {address:#x} and ends beyond all addresses"));
        }
        if len > 0 && !address.is_multiple_of(size as u64) {
            return wrong(format!(
                "begins at {address:#x}, but must begin at a multiple of {size} bytes; copy it \
                 first (torch: clone(), numpy: copy())"
            ));
        }
        Ok(Self { address, len, shape, data_type, place, written: false, written_on: None })
    }

    fn of_torch(tensor: &Bound<'_, PyAny>, name: &str) -> PyResult<Self> {
        let py = tensor.py();
        let shape = extents(&tensor.getattr(intern!(py, "shape"))?, name)?;
        let place = if tensor.getattr(intern!(py, "is_cuda"))?.extract()? {
            let ordinal = tensor.call_method0(intern!(py, "get_device"))?.extract()?;
            let owner = Owner::Torch(tensor.clone().unbind());
            Place::Gpu { ordinal, writable: true, owner }
        } else if tensor.getattr(intern!(py, "is_cpu"))?.extract()? {
            Place::Host { writable: true }
        } else {
            let device = tensor.getattr(intern!(py, "device"))?;
            return Err(invalid(format!("{name} is on the device {device}")));
        };
        if !tensor.call_method0(intern!(py, "is_contiguous"))?.extract::<bool>()? {
            return Err(not_contiguous(name, &shape));
        }
        if tensor.call_method0(intern!(py, "is_neg"))?.extract()? {
            return Err(invalid(format!(
                "{name} is a negated view, in whose memory the numbers have the other sign; copy \
                 it first (resolve_neg())"
            )));
        }
        let data_type = type_of(&tensor.getattr(intern!(py, "dtype"))?, name)?;
        let address = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let array = Self::new(name, address, shape, data_type, place)?;
        // The storage may have been resized.
        let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
        let bytes: u64 = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
        let first: u64 = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
        // The end as an offset in the storage: no overflow, since the array ends below 2^64.
        let end = (array.len * data_type.size()) as u64 + array.address.saturating_sub(first);
        if array.len > 0 && (array.address < first || end > bytes) {
            let shape = &array.shape;
            return Err(invalid(format!(
                "{name}, of shape {shape:?}, is not within its storage, which has {bytes} bytes"
            )));
        }
        Ok(array)
    }

    /// Reads an array by numpy's own interface: a subclass may have another.
    fn of_numpy(array: &Bound<'_, PyAny>, name: &str) -> PyResult<Self> {
        let py = array.py();
        if MASKED.is_of(array)? {
            return Err(invalid(format!(
                "{name} is a masked array, whose masked elements would count; use filled(), or \
                 its data"
            )));
        }
        static GET: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let get = GET.get_or_try_init(py, || {
            let class = py.import("numpy")?.getattr("ndarray")?;
            let interface = class.getattr("__array_interface__")?;
            Ok::<_, PyErr>(interface.getattr("__get__")?.unbind())
        });
        let interface = get?.bind(py).call1((array,))?;
        let Interface { address, shape, data_type, writable, .. } =
            Interface::new(interface.cast()?, name)?;
        Self::new(name, address, shape, data_type, Place::Host { writable })
    }

    /// Reads an array by DLPack, from memory of a GPU.
    fn of_dlpack(comm: &Comm, array: &Bound<'_, PyAny>, name: &str) -> PyResult<Self> {
        let py = array.py();
        let arguments = PyDict::new(py);
        // The other library lets the default stream wait for the work that writes the array. During
        // a capture by torch it orders nothing (-1).
        let stream = (!captures_current(py)?).then_some(LEGACY);
        arguments.set_item(intern!(py, "stream"), stream.map_or(-1, |stream| stream as isize))?;
        let capsule = array.call_method(intern!(py, "__dlpack__"), (), Some(&arguments))?;
        let tensor = take_dlpack(capsule.cast()?)?;
        let context = &comm.gpu.context;
        let tensor = waiting(py, || DeviceSlice::from_dlpack_dynamic(context, tensor))?;
        let (address, len, data_type) = (tensor.device_address(), tensor.len(), tensor.data_type());
        let place = Place::Dlpack { _tensor: Imported(Some(tensor)) };
        let shape = match array.getattr_opt(intern!(py, "shape"))? {
            Some(shape) => extents(&shape, name)?,
            None => vec![len],
        };
        if elements_of(&shape, data_type.size()) != Some(len) {
            return Err(invalid(format!(
                "{name} has the shape {shape:?}, and by DLPack {len} elements"
            )));
        }
        let array = Self::new(name, address, shape, data_type, place)?;
        Ok(Self { written_on: stream, ..array })
    }

    /// Returns it, unless it is on a GPU that is not the communicator's.
    fn here(self, comm: &Comm, name: &str) -> PyResult<Self> {
        let own = comm.gpu.context.ordinal();
        if let Place::Gpu { ordinal, .. } = &self.place
            && *ordinal != own
            && !comm.gpu.simulated
        {
            let text = format!("tensor_device: {name} is on GPU {ordinal}, expected GPU {own}");
            return Err(raise(CHECK_ERROR, text));
        }
        Ok(self)
    }

    /// Returns it as an array that the call writes.
    pub fn written(self) -> Self {
        Self { written: true, ..self }
    }

    /// Returns the object that a call must keep until its work is done. A tensor of torch's needs
    /// that only if the call is not on torch's current stream (`is_current`): torch reuses the
    /// memory in the order of that stream.
    pub fn owner(&self, py: Python<'_>, is_current: bool) -> Option<Py<PyAny>> {
        match &self.place {
            Place::Gpu { owner: Owner::Other(owner), .. } => Some(owner.clone_ref(py)),
            Place::Gpu { owner: Owner::Torch(owner), .. } if !is_current => {
                Some(owner.clone_ref(py))
            }
            _ => None,
        }
    }

    /// Fails unless the elements are of this type.
    pub fn require_type(&self, data_type: DataType, name: &str) -> PyResult<()> {
        if self.data_type == data_type {
            return Ok(());
        }
        let found = self.data_type;
        Err(invalid(format!("{name} has elements of {found:?}, expected {data_type:?}")))
    }

    /// Returns it, unless its elements are of another type or its shape is another one.
    pub fn require(self, data_type: DataType, shape: &[usize], name: &str) -> PyResult<Self> {
        self.require_type(data_type, name)?;
        match self.shape == shape {
            true => Ok(self),
            false => {
                let found = &self.shape;
                Err(invalid(format!("{name} has the shape {found:?}, expected {shape:?}")))
            }
        }
    }
}

/// Returns a new tensor that `method`, `new_empty` or `new_zeros`, makes where the tensor `a` is,
/// as work of the stream that a call asks for.
///
/// # Errors
///
/// If `a` is no tensor of torch's.
pub fn new_tensor<'py>(
    a: &Bound<'py, PyAny>,
    method: &str,
    shape: [usize; 2],
    data_type: DataType,
    asked: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = a.py();
    if !TENSOR.is_of(a)? {
        return Err(invalid("c is left out: a must then be a tensor of torch's"));
    }
    let stream = asked.map(handle_of).transpose()?;
    let arguments = (a, method, shape, name_of(data_type), stream);
    py.import("devcomm._torch")?.call_method1("new_tensor", arguments)
}

/// Returns the element type that `dtype` names: one of torch's or numpy's, or a name such as
/// `"bf16"`.
pub fn type_of(dtype: &Bound<'_, PyAny>, name: &str) -> PyResult<DataType> {
    // The class `numpy.float32` has a `__name__`; a dtype of numpy's or torch's prints its name.
    let text = match dtype.getattr_opt(intern!(dtype.py(), "__name__"))? {
        Some(name) => name.extract::<String>()?,
        None => dtype.str()?.extract()?,
    };
    DataType::from_name(&text).ok_or_else(|| no_type(name, &text))
}

/// Returns the GPU that has the memory at an address, which an interface does not name.
fn gpu_of(address: u64, name: &str) -> PyResult<usize> {
    use devcomm::cudarc::driver::sys::{CUpointer_attribute, CUresult, cuPointerGetAttribute};
    let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    let mut ordinal = -1_i32;
    // SAFETY: the attribute is an `int`. The driver is loaded, since the communicator has a GPU; it
    // looks the address up, and does not access the memory.
    let found = unsafe { cuPointerGetAttribute((&raw mut ordinal).cast(), attribute, address) };
    match usize::try_from(ordinal) {
        Ok(ordinal) if found == CUresult::CUDA_SUCCESS => Ok(ordinal),
        _ => Err(invalid(format!("{name} is at {address:#x}, which is no memory of a GPU"))),
    }
}

/// Takes the tensor out of a capsule.
fn take_dlpack(capsule: &Bound<'_, PyCapsule>) -> PyResult<DlpackTensor> {
    let names =
        [(c"dltensor_versioned", c"used_dltensor_versioned"), (c"dltensor", c"used_dltensor")];
    for (name, used) in names {
        if !capsule.is_valid_checked(Some(name)) {
            continue;
        }
        let pointer = capsule.pointer_checked(Some(name))?.as_ptr();
        // SAFETY: the capsule is live; the name is static.
        if unsafe { pyo3::ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) } != 0 {
            return Err(PyErr::fetch(capsule.py()));
        }
        // SAFETY: a capsule of this name has such a tensor, which nobody else takes any more.
        let tensor = unsafe {
            match name == c"dltensor" {
                true => DlpackTensor::from_raw(pointer),
                false => DlpackTensor::from_raw_versioned(pointer),
            }
        };
        return tensor.map_err(exception);
    }
    Err(invalid("the capsule of __dlpack__ has no tensor, or somebody has taken it"))
}

impl Interface {
    fn new(interface: &Bound<'_, PyDict>, name: &str) -> PyResult<Self> {
        let get = |key: &str| Ok::<_, PyErr>(interface.get_item(key)?.filter(|it| !it.is_none()));
        let required = |key: &str| {
            get(key)?.ok_or_else(|| invalid(format!("{name} has an interface without {key:?}")))
        };
        let shape = extents(&required("shape")?, name)?;
        let text = required("typestr")?.extract::<String>()?;
        let data_type = match text.trim_start_matches(['<', '|', '=']) {
            "i1" => DataType::Int8,
            "u1" => DataType::Uint8,
            "i4" => DataType::Int32,
            "u4" => DataType::Uint32,
            "i8" => DataType::Int64,
            "u8" => DataType::Uint64,
            "f2" => DataType::Float16,
            "f4" => DataType::Float32,
            "f8" => DataType::Float64,
            _ => return Err(no_type(name, &text)),
        };
        if get("mask")?.is_some() {
            return Err(invalid(format!("{name} has a mask, and all of its elements would count")));
        }
        if let Some(strides) = get("strides")? {
            let strides: Vec<isize> = strides.extract()?;
            if !is_row_major(&shape, &strides, data_type.size()) {
                return Err(not_contiguous(name, &shape));
            }
        }
        let data = required("data")?;
        let (address, read_only): (u64, bool) = data.extract().map_err(|error: PyErr| {
            match error.is_instance_of::<PyOverflowError>(data.py()) {
                true => invalid(format!("{name} has data at {data}, which is no address")),
                false => error,
            }
        })?;
        let stream = match get("stream")?.map(|stream| stream.extract()).transpose()? {
            Some(0) => {
                return Err(invalid(format!(
                    "{name} has the stream 0 in its interface, which may be either default stream"
                )));
            }
            stream => stream.map(require_shared).transpose()?,
        };
        Ok(Self { address, shape, data_type, writable: !read_only, stream })
    }
}

/// A class of another library.
struct Class {
    module: &'static str,
    name: &'static str,
    /// The class, once its module is loaded.
    class: PyOnceLock<Py<PyAny>>,
}

static TENSOR: Class = Class::new("torch", "Tensor");
static NDARRAY: Class = Class::new("numpy", "ndarray");
static SCALAR: Class = Class::new("numpy", "generic");
static MASKED: Class = Class::new("numpy.ma", "MaskedArray");

impl Class {
    const fn new(module: &'static str, name: &'static str) -> Self {
        Self { module, name, class: PyOnceLock::new() }
    }

    /// Returns whether an object is of the class: it is not if the module is not loaded.
    fn is_of(&self, object: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = object.py();
        if let Some(class) = self.class.get(py) {
            return object.is_instance(class.bind(py));
        }
        let Some(module) = loaded(py, self.module)? else { return Ok(false) };
        // A module whose import has not ended may lack the class.
        let Some(class) = module.getattr_opt(self.name)? else { return Ok(false) };
        object.is_instance(self.class.get_or_init(py, || class.unbind()).bind(py))
    }
}

/// Returns the extents of a shape.
fn extents(shape: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<usize>> {
    shape.extract().map_err(|error: PyErr| {
        match error.is_instance_of::<PyOverflowError>(shape.py()) {
            true => invalid(format!("{name} has the shape {shape}, which no array has")),
            false => error,
        }
    })
}

/// Returns the number of elements; `None` if they have more bytes than memory can have.
fn elements_of(shape: &[usize], size: usize) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    let len = shape.iter().try_fold(1_usize, |len, extent| len.checked_mul(*extent))?;
    len.checked_mul(size).filter(|bytes| isize::try_from(*bytes).is_ok()).map(|_| len)
}

/// Returns whether elements of `size` bytes are consecutive. Extents whose product saturates here
/// are refused by [`elements_of`] later.
fn is_row_major(shape: &[usize], strides: &[isize], size: usize) -> bool {
    let mut expected = size as isize;
    let is_consecutive = |(&extent, &stride): (&usize, &isize)| {
        // The stride of a single element has no meaning.
        let is_consecutive = extent == 1 || stride == expected;
        expected = expected.saturating_mul(isize::try_from(extent).unwrap_or(isize::MAX));
        is_consecutive
    };
    shape.len() == strides.len()
        && (shape.contains(&0) || shape.iter().zip(strides).rev().all(is_consecutive))
}

fn not_contiguous(name: &str, shape: &[usize]) -> PyErr {
    invalid(format!(
        "{name}, of shape {shape:?}, is not contiguous in row-major order; copy it first (torch: \
         contiguous(), numpy: ascontiguousarray())"
    ))
}

fn no_type(name: &str, text: &str) -> PyErr {
    invalid(format!(
        "{name} has elements of type {text}, which NCCL does not have: it has integers of 8, 32 \
         and 64 bits, and floats of 8, 16 (also bfloat16), 32 and 64"
    ))
}
