//! Arrays of Python: torch's tensors, numpy's arrays, devcomm's windows, and whatever describes its
//! memory by `__cuda_array_interface__`, `__array_interface__` or DLPack.

use std::rc::Rc;

use devcomm::{DataType, DeviceSlice, DlpackTensor, Dynamic};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::communicator::Comm;
use crate::errors::{exception, invalid};
use crate::own::detached;
use crate::window::{PyWindow, Win};

/// The memory of an array, whose elements are consecutive in row-major order.
pub struct Array {
    pub address: u64,
    pub len: usize,
    pub shape: Vec<usize>,
    pub data_type: DataType,
    pub place: Place,
}

/// Where an array is, and what keeps its memory beyond the caller's reference.
pub enum Place {
    Host { writable: bool },
    Gpu(usize),
    Window(Rc<Win>),
    Dlpack { _tensor: DeviceSlice<Dynamic> },
}

impl Array {
    /// The memory of `array`, which is called `name` in messages.
    pub fn of(comm: &Comm, array: &Bound<'_, PyAny>, name: &str) -> PyResult<Self> {
        let found = Self::described(comm, array, name)?;
        if found.len > 0 && !found.address.is_multiple_of(found.data_type.size() as u64) {
            let (address, data_type) = (found.address, found.data_type);
            return Err(invalid(format!("{name}, of {data_type:?}, begins at {address:#x}")));
        }
        Ok(found)
    }

    fn described(comm: &Comm, array: &Bound<'_, PyAny>, name: &str) -> PyResult<Self> {
        let py = array.py();
        if let Ok(window) = array.cast::<PyWindow>() {
            let window = window.get().own().get()?;
            let (address, len, data_type) = (window.address(), window.len, window.data_type);
            let place = Place::Window(window);
            return Ok(Self { address, len, shape: vec![len], data_type, place });
        }
        if let Ok(contiguous) = array.getattr(intern!(py, "is_contiguous"))
            && array.hasattr(intern!(py, "data_ptr"))?
        {
            return Self::of_torch(array, contiguous.call0()?.extract()?, name);
        }
        if let Ok(interface) = array.getattr(intern!(py, "__cuda_array_interface__")) {
            // Which GPU it is on, its address tells the driver.
            let place = Place::Gpu(comm.gpu.context.ordinal());
            return Self::of_interface(interface.cast()?, place, name);
        }
        if let Ok(interface) = array.getattr(intern!(py, "__array_interface__")) {
            return Self::of_interface(interface.cast()?, Place::Host { writable: true }, name);
        }
        if array.hasattr(intern!(py, "__dlpack__"))? {
            return Self::of_dlpack(comm, array);
        }
        let class = array.get_type().name()?;
        Err(PyTypeError::new_err(format!(
            "{name} is of type {class}: expected a tensor of torch, an array of numpy, a \
             devcomm.Window, or an object with __cuda_array_interface__ or __dlpack__"
        )))
    }

    fn of_torch(tensor: &Bound<'_, PyAny>, contiguous: bool, name: &str) -> PyResult<Self> {
        let py = tensor.py();
        let shape: Vec<usize> = tensor.getattr(intern!(py, "shape"))?.extract()?;
        if !contiguous {
            return Err(not_contiguous(name, &shape));
        }
        let device = tensor.getattr(intern!(py, "device"))?;
        let kind = device.getattr(intern!(py, "type"))?;
        let place = match kind.extract::<&str>()? {
            "cpu" => Place::Host { writable: true },
            "cuda" => Place::Gpu(device.getattr(intern!(py, "index"))?.extract()?),
            kind => return Err(invalid(format!("{name} is on a device of type {kind}"))),
        };
        let data_type = type_of(&tensor.getattr(intern!(py, "dtype"))?, name)?;
        let address = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
        Ok(Self { address, len: shape.iter().product(), shape, data_type, place })
    }

    /// By numpy's or numba's interface, which have the same form.
    fn of_interface(interface: &Bound<'_, PyDict>, place: Place, name: &str) -> PyResult<Self> {
        let get = |key: &str| interface.get_item(key);
        let required = |key: &str| {
            get(key)?.ok_or_else(|| invalid(format!("{name} has an interface without {key:?}")))
        };
        let shape: Vec<usize> = required("shape")?.extract()?;
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
        let strides = get("strides")?.filter(|strides| !strides.is_none());
        if let Some(strides) = strides {
            let strides: Vec<isize> = strides.extract()?;
            if !is_row_major(&shape, &strides, data_type.size()) {
                return Err(not_contiguous(name, &shape));
            }
        }
        let (address, read_only): (u64, bool) = required("data")?.extract()?;
        let place = match place {
            Place::Host { .. } => Place::Host { writable: !read_only },
            place => place,
        };
        Ok(Self { address, len: shape.iter().product(), shape, data_type, place })
    }

    /// By DLPack, from memory of a GPU. The tensor is given back when the GPU no longer uses it,
    /// for which the end of the call waits.
    fn of_dlpack(comm: &Comm, array: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = array.py();
        let arguments = PyDict::new(py);
        // The caller's stream orders the work that writes it.
        arguments.set_item(intern!(py, "stream"), -1)?;
        let capsule = array.call_method(intern!(py, "__dlpack__"), (), Some(&arguments))?;
        let tensor = take_dlpack(capsule.cast()?)?;
        let context = &comm.gpu.context;
        let tensor = detached(py, || DeviceSlice::from_dlpack_dynamic(context, tensor));
        let tensor = tensor.map_err(exception)?;
        let (address, len, data_type) = (tensor.device_address(), tensor.len(), tensor.data_type());
        let shape = array.getattr(intern!(py, "shape")).and_then(|shape| shape.extract());
        let place = Place::Dlpack { _tensor: tensor };
        Ok(Self { address, len, shape: shape.unwrap_or(vec![len]), data_type, place })
    }

    /// Fails unless the elements are of this type.
    pub fn require_type(&self, data_type: DataType, name: &str) -> PyResult<()> {
        if self.data_type == data_type {
            return Ok(());
        }
        let found = self.data_type;
        Err(invalid(format!("{name} has elements of {found:?}, expected {data_type:?}")))
    }
}

/// The element type that `dtype` names: one of torch's or numpy's, or a name such as `"bf16"`.
pub fn type_of(dtype: &Bound<'_, PyAny>, name: &str) -> PyResult<DataType> {
    // A class of numpy's, `numpy.float32`, has its name; an instance prints it.
    let text = match dtype.getattr(intern!(dtype.py(), "__name__")) {
        Ok(name) => name.extract::<String>()?,
        Err(_) => dtype.str()?.extract()?,
    };
    DataType::from_name(&text).ok_or_else(|| no_type(name, &text))
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

fn is_row_major(shape: &[usize], strides: &[isize], size: usize) -> bool {
    let mut expected = size as isize;
    shape.contains(&0)
        || shape.iter().zip(strides).rev().all(|(&extent, &stride)| {
            // The stride of a single element has no meaning.
            let consecutive = extent == 1 || stride == expected;
            expected *= extent as isize;
            consecutive
        })
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
