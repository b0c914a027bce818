//! Tensors of other libraries by DLPack: PyTorch's, JAX's, CuPy's.

use devcomm_types::{DataType, Element};

use super::context::Context;
use super::foreign::Foreign;
use super::slice::{DeviceSlice, Dynamic};
use crate::error::{Error, Result};
use crate::sys::dlpack::{CUDA, Description, Device, DlpackTensor, READ_ONLY, Type};

/// NCCL's types, and DLPack's (`DLDataTypeCode`, bits).
const TYPES: [(DataType, u8, u8); 12] = [
    (DataType::Int8, 0, 8),
    (DataType::Int32, 0, 32),
    (DataType::Int64, 0, 64),
    (DataType::Uint8, 1, 8),
    (DataType::Uint32, 1, 32),
    (DataType::Uint64, 1, 64),
    (DataType::Float16, 2, 16),
    (DataType::Float32, 2, 32),
    (DataType::Float64, 2, 64),
    (DataType::Bfloat16, 4, 16),
    (DataType::Float8e4m3, 10, 8),
    (DataType::Float8e5m2, 12, 8),
];

impl<T: Element> DeviceSlice<T> {
    /// Returns the elements of a tensor of another library, of any shape, in row-major order. The
    /// tensor is kept until this slice and the operations on it are dropped and the GPU no longer
    /// uses the memory.
    ///
    /// The work that writes the tensor must be done, or be ordered before later work by a stream:
    /// in Python, `tensor.__dlpack__(stream=...)` takes [`Stream::as_raw`](crate::Stream::as_raw).
    ///
    /// ```no_run
    /// # use devcomm_host::{Communicator, DeviceSlice, DlpackTensor, ReduceOp, Result, Stream};
    /// # fn f(comm: &Communicator, capsule: *mut std::ffi::c_void, stream: &Stream) -> Result<()> {
    /// // SAFETY: the pointer in a capsule `dltensor`, which was renamed to `used_dltensor`.
    /// let tensor = unsafe { DlpackTensor::from_raw(capsule)? };
    /// let tensor = DeviceSlice::<f32>::from_dlpack(comm.context(), tensor)?;
    /// comm.all_reduce(&tensor, &tensor, ReduceOp::Sum, stream) // in place
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a tensor in memory of the host or of another GPU, of another
    /// type than `T`, that is not contiguous, that may not be written to, or of another major
    /// version of DLPack. The tensor is given back then.
    pub fn from_dlpack(context: &Context, tensor: DlpackTensor) -> Result<Self> {
        let elements = Elements::of(context, &tensor)?;
        if elements.data_type != T::DATA_TYPE {
            let (found, wanted) = (elements.data_type, T::DATA_TYPE);
            return Err(Error::invalid(format!("a DLPack tensor of {found:?}, not {wanted:?}")));
        }
        Ok(elements.owned_by(context, tensor))
    }
}

impl DeviceSlice<Dynamic> {
    /// Does the same as [`from_dlpack`](DeviceSlice::from_dlpack), for elements of any of NCCL's
    /// types.
    ///
    /// # Errors
    ///
    /// The errors are those of [`from_dlpack`](DeviceSlice::from_dlpack).
    pub fn from_dlpack_dynamic(context: &Context, tensor: DlpackTensor) -> Result<Self> {
        Ok(Elements::of(context, &tensor)?.owned_by(context, tensor))
    }
}

impl<T> DeviceSlice<T> {
    /// Returns these elements as a tensor of one dimension, for another library, which may use the
    /// memory until it gives the tensor back. Until then what this slice keeps stays allocated;
    /// memory of [`from_raw_parts`](DeviceSlice::from_raw_parts) is the caller's.
    ///
    /// Any thread may give it back; the memory is then freed as if it were dropped there. The work
    /// that writes the elements must be done, or be ordered before the other library's by a stream
    /// or an event.
    #[must_use]
    pub fn to_dlpack(&self) -> DlpackTensor {
        self.export(false, ())
    }

    /// Does the same as [`to_dlpack`](Self::to_dlpack), with a version: for a library that asks for
    /// one, in Python by `max_version`.
    #[must_use]
    pub fn to_dlpack_versioned(&self) -> DlpackTensor {
        self.export(true, ())
    }

    /// Does the same as [`to_dlpack_versioned`](Self::to_dlpack_versioned), or as
    /// [`to_dlpack`](Self::to_dlpack). `with` is dropped when the tensor is given back, by the
    /// thread that gives it back: it holds what must live while the other library uses the memory.
    #[must_use]
    pub fn to_dlpack_with(&self, with: impl Send + 'static, versioned: bool) -> DlpackTensor {
        self.export(versioned, with)
    }

    fn export(&self, versioned: bool, with: impl Send + 'static) -> DlpackTensor {
        // CUDA's ordinals are ints, and the table has all of NCCL's types.
        let id = i32::try_from(self.context().ordinal()).unwrap_or(i32::MAX);
        let known = TYPES.iter().find(|known| known.0 == self.data_type());
        let &(_, code, bits) = known.unwrap_or(&TYPES[0]);
        let data_type = Type { code, bits, lanes: 1 };
        let (address, len) = (self.device_address(), self.len() as i64);
        let device = Device { kind: CUDA, id };
        DlpackTensor::new(address, len, device, data_type, versioned, (with, self.keep_alive()))
    }
}

/// Where the elements of a tensor are.
struct Elements {
    address: u64,
    len: usize,
    data_type: DataType,
}

impl Elements {
    /// Returns where a tensor's elements are; fails for a tensor that cannot be a [`DeviceSlice`]
    /// of the context.
    fn of(context: &Context, tensor: &DlpackTensor) -> Result<Self> {
        let Description { address, device, data_type, shape, strides, flags } =
            tensor.describe()?;
        let own = context.ordinal();
        match device.kind {
            CUDA if usize::try_from(device.id) == Ok(own) => {}
            CUDA => {
                let id = device.id;
                return Err(Error::invalid(format!("a DLPack tensor of GPU {id}, not GPU {own}")));
            }
            kind => {
                return Err(Error::invalid(format!(
                    "a DLPack tensor of a device of kind {kind}; GPU {own} takes kind {CUDA} \
                     (kDLCUDA)"
                )));
            }
        }
        let Type { code, bits, lanes } = data_type;
        let same = |known: &&(DataType, u8, u8)| (known.1, known.2, 1) == (code, bits, lanes);
        let Some(&(data_type, ..)) = TYPES.iter().find(same) else {
            return Err(Error::invalid(format!(
                "a DLPack tensor of a type that NCCL does not have: code {code}, {bits} bits, \
                 {lanes} lanes"
            )));
        };
        if flags & READ_ONLY != 0 {
            return Err(Error::invalid("a DLPack tensor that may not be written to"));
        }
        let len = row_major(shape, strides)?;
        if len > isize::MAX as usize / data_type.size() {
            return Err(Error::invalid(format!("a DLPack tensor of the shape {shape:?}")));
        }
        if !address.is_multiple_of(data_type.size() as u64) || (address == 0 && len > 0) {
            return Err(Error::invalid(format!(
                "a DLPack tensor of {data_type:?} at {address:#x}"
            )));
        }
        Ok(Self { address, len, data_type })
    }

    fn owned_by<T>(self, context: &Context, tensor: DlpackTensor) -> DeviceSlice<T> {
        let owner = Foreign::new(context, tensor, "a DLPack tensor");
        DeviceSlice::of_type(context, self.address, self.len, self.data_type, owner)
    }
}

/// Returns the number of elements of a tensor, which must be contiguous in row-major order.
fn row_major(shape: &[i64], strides: Option<&[i64]>) -> Result<usize> {
    let mut len = 1_usize;
    for &extent in shape {
        let extent = usize::try_from(extent).ok();
        let product = extent.and_then(|extent| len.checked_mul(extent));
        len = product
            .filter(|len| *len <= isize::MAX as usize)
            .ok_or_else(|| Error::invalid(format!("a DLPack tensor of the shape {shape:?}")))?;
    }
    let Some(strides) = strides.filter(|_| len > 0) else { return Ok(len) };
    let mut expected = 1;
    for (&extent, &stride) in shape.iter().zip(strides).rev() {
        // The stride of a single element has no meaning.
        if extent != 1 && stride != expected {
            return Err(Error::invalid(format!(
                "a DLPack tensor that is not contiguous in row-major order: shape {shape:?}, \
                 strides {strides:?}; copy it first (torch: contiguous())"
            )));
        }
        // At most `len`: no extent is 0.
        expected *= extent;
    }
    Ok(len)
}
