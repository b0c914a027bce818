//! Windows: memory that all ranks' kernels access, as arrays of Python.

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::sync::{Arc, OnceLock};

use devcomm::{Buffer, DataType, DeviceSlice, DlpackTensor, Dynamic, Element, Signal, Window};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::array::{Array, Place};
use crate::communicator::Comm;
use crate::debug;
use crate::errors::{invalid, invalid_input};
use crate::operand::{Operand, with_type};
use crate::own::Own;
use crate::signals::waiting;

/// A window of elements of any type.
pub struct Win {
    pub comm: Arc<Comm>,
    pub len: usize,
    pub data_type: DataType,
    /// The window of its type.
    typed: Box<dyn Any + Send + Sync>,
    pub slice: DeviceSlice<Dynamic>,
    /// Once another library may use the memory.
    exported: OnceLock<Arc<Exported>>,
}

/// Memory that other libraries may use, in streams that devcomm does not know: it is freed when all
/// work of the GPU is done. The window has one, and whatever else refers to the memory.
struct Exported {
    slice: DeviceSlice<Dynamic>,
}

impl Drop for Exported {
    fn drop(&mut self) {
        self.slice.context().drop_after_work(self.slice.clone());
    }
}

impl Drop for Win {
    fn drop(&mut self) {
        debug::dropped(self);
    }
}

impl Win {
    pub fn new(comm: &Arc<Comm>, len: usize, data_type: DataType) -> devcomm::Result<Arc<Self>> {
        let (typed, slice): (Box<dyn Any + Send + Sync>, _) = with_type!(data_type, T => {
            let window = comm.communicator.window::<T>(len)?;
            let slice = window.device_slice().into_dynamic();
            (Box::new(window), slice)
        });
        let (comm, exported) = (Arc::clone(comm), OnceLock::new());
        let window = Arc::new(Self { comm, len, data_type, typed, slice, exported });
        window.comm.add_window(&window);
        Ok(window)
    }

    pub fn typed<T: Element>(&self) -> devcomm::Result<&Window<T>> {
        self.typed.downcast_ref().ok_or_else(|| {
            let (found, expected) = (self.data_type, T::DATA_TYPE);
            invalid_input(format!("a window of {found:?}, expected {expected:?}"))
        })
    }

    /// Returns whether it is not closed.
    pub fn is_valid(&self) -> bool {
        with_type!(self.data_type, T => self.typed::<T>().is_ok_and(Window::is_valid))
    }

    pub fn address(&self) -> u64 {
        self.slice.device_address()
    }

    pub fn byte_len(&self) -> usize {
        self.slice.byte_len()
    }

    /// Returns a handle that keeps the memory for another library.
    fn export(&self) -> Own<Arc<Exported>> {
        let make = || Arc::new(Exported { slice: self.slice.clone() });
        Own::lasting(&self.comm.home, Arc::clone(self.exported.get_or_init(make)))
    }

    /// Copies the window to an array, if it is `written`, or the array to the window.
    fn copy(&self, py: Python<'_>, host: &Bound<'_, PyAny>, written: bool) -> PyResult<()> {
        let (comm, name) = (&self.comm, "the array");
        let array = Array { written, ..Array::of(comm, host, name)? };
        array.require_type(self.data_type, name)?;
        if array.len != self.len {
            let (found, len) = (array.len, self.len);
            return Err(invalid(format!("{found} elements for a window of {len}")));
        }
        let stream = comm.gpu.stream(None, py)?;
        comm.gpu.call(py, (&stream, None), &[&array], || {
            with_type!(self.data_type, T => {
                let window = self.typed::<T>()?;
                let operand = Operand::<T>::new(comm, &array, &stream)?;
                match written {
                    true => stream.copy(window, &operand.slice)?,
                    false => stream.copy(&operand.slice, window)?,
                }
                operand.finish(&stream)
            })
        })
    }
}

/// Memory of each rank that all ranks' kernels access. `communicator.window` makes it.
///
/// On GPUs it is an array for other libraries: `torch.from_dlpack(window)` is a tensor of one
/// dimension in this memory, without a copy. The memory lasts as long as the tensor, and then until
/// the GPU has done all work that any library has enqueued.
#[pyclass(name = "Window", module = "devcomm", frozen)]
pub struct PyWindow {
    own: Own<Arc<Win>>,
    len: usize,
    data_type: DataType,
    /// The memory for the libraries that have its address, and keep this.
    exported: OnceLock<Own<Arc<Exported>>>,
}

impl PyWindow {
    pub fn new(window: Arc<Win>) -> Self {
        let (len, data_type) = (window.len, window.data_type);
        let own = Own::new(&window.comm.home.clone(), window);
        Self { own, len, data_type, exported: OnceLock::new() }
    }

    pub fn get(&self) -> PyResult<Arc<Win>> {
        Ok(Arc::clone(&*self.own.get()?))
    }

    /// Returns the window, if it is in memory of a GPU, which other libraries can use.
    fn on_gpu(&self) -> PyResult<Arc<Win>> {
        let window = self.get()?;
        match window.comm.gpu.simulated {
            true => Err(PyBufferError::new_err(
                "simulated memory is of no other library: use copy_to and copy_from",
            )),
            false => Ok(window),
        }
    }
}

#[pymethods]
impl PyWindow {
    /// Returns the number of elements of this rank.
    fn __len__(&self) -> usize {
        self.len
    }

    /// Returns the elements' type, by torch's and numpy's name, such as "float32".
    #[getter]
    fn dtype(&self) -> &'static str {
        name_of(self.data_type)
    }

    /// Returns the number of elements, as a tuple.
    #[getter]
    fn shape(&self) -> (usize,) {
        (self.len,)
    }

    /// Copies the elements of an array of the same length to this rank's part of the window, on
    /// torch's current stream or devcomm's own. An array of the host has been read when this
    /// returns.
    fn copy_from(&self, py: Python<'_>, array: &Bound<'_, PyAny>) -> PyResult<()> {
        self.get()?.copy(py, array, false)
    }

    /// Copies the elements to an array of the same length; one of the host has them when this
    /// returns.
    fn copy_to(&self, py: Python<'_>, array: &Bound<'_, PyAny>) -> PyResult<()> {
        self.get()?.copy(py, array, true)
    }

    /// Puts elements into this window of the rank peer, from element at on, and then signals that
    /// rank, on a stream. The peer sees them after Communicator.wait_signal.
    ///
    /// source: a window, or a tensor within one, of this communicator. first, count: its part that
    /// is put; None: all that follows. index, context: as for Communicator.signal.
    #[pyo3(signature = (
        source, peer, at=0, *, first=0, count=None, index=0, context=0, stream=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn put_signal(
        &self,
        source: &Bound<'_, PyAny>,
        peer: usize,
        at: usize,
        first: usize,
        count: Option<usize>,
        index: u32,
        context: u32,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (py, window) = (source.py(), self.get()?);
        let (comm, name) = (&window.comm, "the source of a put");
        let array = Array::of(comm, source, name)?;
        array.require_type(window.data_type, name)?;
        if let Place::Host { .. } = array.place {
            return Err(invalid(format!(
                "{name} is on the host: expected a window, or part of one"
            )));
        }
        let (asked, stream) = (stream, comm.gpu.stream(stream, py)?);
        let end = count.map_or(array.len, |count| first.saturating_add(count));
        let to = Signal { peer, index, context };
        let put = || {
            with_type!(window.data_type, T => {
                let source = Operand::<T>::new(comm, &array, &stream)?;
                let part = source.slice.slice(first..end)?;
                comm.communicator.put_signal(&part, window.typed::<T>()?, at, to, &stream)
            })
        };
        comm.gpu.call(py, (&stream, asked), &[&array], put)?;
        debug::shared(py, &window, "put_signal", &stream)
    }

    /// DLPack: the memory as a tensor for another library. It does not wait for work that writes
    /// the window: use it on the same stream.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'_, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let _ = stream;
        let window = self.on_gpu()?;
        if copy == Some(true) {
            return Err(PyBufferError::new_err("a window exports its memory, and no copy"));
        }
        if let Some(wanted) = dl_device.filter(|wanted| *wanted != device_of(&window)) {
            return Err(PyBufferError::new_err(format!("the window is not on device {wanted:?}")));
        }
        let versioned = matches!(max_version, Some((1.., _)));
        let kept = (Own::new(&window.comm.home, Arc::clone(&window)), window.export());
        capsule(py, window.slice.to_dlpack_with(kept, versioned))
    }

    /// DLPack: the kind of the device, CUDA, and its ordinal.
    fn __dlpack_device__(&self) -> PyResult<(i32, i32)> {
        Ok(device_of(&*self.on_gpu()?))
    }

    /// Numba's interface, which cupy has too.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        use pyo3::exceptions::PyAttributeError;
        // Another class of exception would make `hasattr` fail instead of returning False.
        let as_missing = |error: PyErr| PyAttributeError::new_err(error.to_string());
        let window = self.on_gpu().map_err(as_missing)?;
        let typestr = typestr_of(self.data_type);
        let typestr = typestr.ok_or_else(|| PyAttributeError::new_err("numpy has no such type"))?;
        self.exported.get_or_init(|| window.export());
        let interface = PyDict::new(py);
        interface.set_item("shape", (self.len,))?;
        interface.set_item("typestr", typestr)?;
        interface.set_item("data", (window.address(), false))?;
        interface.set_item("strides", py.None())?;
        interface.set_item("version", 3)?;
        Ok(interface)
    }

    /// Ends the registration. Collective: no rank uses the window any more.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let window = self.get()?;
        waiting(py, || with_type!(window.data_type, T => window.typed::<T>()?.close()))?;
        drop(window);
        self.own.close(py)
    }

    fn __repr__(&self) -> String {
        format!("Window({} elements of {})", self.len, name_of(self.data_type))
    }
}

fn device_of(window: &Win) -> (i32, i32) {
    /// `kDLCUDA`
    const CUDA: i32 = 2;
    (CUDA, i32::try_from(window.comm.gpu.context.ordinal()).unwrap_or(i32::MAX))
}

/// Returns a capsule with a tensor, which gives the tensor back if nobody takes it.
fn capsule(py: Python<'_>, tensor: DlpackTensor) -> PyResult<Bound<'_, PyCapsule>> {
    unsafe extern "C" fn give_back(capsule: *mut pyo3::ffi::PyObject) {
        type Take = unsafe fn(*mut c_void) -> devcomm::Result<DlpackTensor>;
        let names: [(&CStr, Take); 2] = [
            (c"dltensor", DlpackTensor::from_raw),
            (c"dltensor_versioned", DlpackTensor::from_raw_versioned),
        ];
        for (name, take) in names {
            // SAFETY: Python passes a live capsule; one with this name has the tensor, since who
            // takes it renames the capsule.
            unsafe {
                if pyo3::ffi::PyCapsule_IsValid(capsule, name.as_ptr()) != 0 {
                    drop(take(pyo3::ffi::PyCapsule_GetPointer(capsule, name.as_ptr())));
                }
            }
        }
    }
    let name = tensor.capsule_name();
    let pointer = tensor.into_raw();
    // SAFETY: the pointer is not NULL, the name is static, the destructor is for such capsules.
    unsafe {
        let capsule = pyo3::ffi::PyCapsule_New(pointer, name.as_ptr(), Some(give_back));
        Ok(Bound::from_owned_ptr_or_err(py, capsule)?.cast_into_unchecked())
    }
}

/// Returns torch's name of a type, which is numpy's where that has the type.
pub fn name_of(data_type: DataType) -> &'static str {
    match data_type {
        DataType::Int8 => "int8",
        DataType::Uint8 => "uint8",
        DataType::Int32 => "int32",
        DataType::Uint32 => "uint32",
        DataType::Int64 => "int64",
        DataType::Uint64 => "uint64",
        DataType::Float16 => "float16",
        DataType::Float32 => "float32",
        DataType::Float64 => "float64",
        DataType::Bfloat16 => "bfloat16",
        DataType::Float8e4m3 => "float8_e4m3fn",
        DataType::Float8e5m2 => "float8_e5m2",
    }
}

fn typestr_of(data_type: DataType) -> Option<&'static str> {
    Some(match data_type {
        DataType::Int8 => "|i1",
        DataType::Uint8 => "|u1",
        DataType::Int32 => "<i4",
        DataType::Uint32 => "<u4",
        DataType::Int64 => "<i8",
        DataType::Uint64 => "<u8",
        DataType::Float16 => "<f2",
        DataType::Float32 => "<f4",
        DataType::Float64 => "<f8",
        DataType::Bfloat16 | DataType::Float8e4m3 | DataType::Float8e5m2 => return None,
    })
}
