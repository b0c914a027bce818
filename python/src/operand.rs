//! Arrays as operands: those on the GPU as they are, those of the host by copies.

use devcomm::{Buffer, DeviceSlice, Element, Result, Stream};

use crate::array::{Array, Place};
use crate::communicator::Comm;
use crate::errors::invalid_input;

/// Calls `$body` with the type `$name` that a [`DataType`] is.
macro_rules! with_type {
    ($data_type:expr, $name:ident => $body:expr) => {{
        use devcomm::DataType as D;
        macro_rules! with {
            ($type:ty) => {{
                type $name = $type;
                $body
            }};
        }
        match $data_type {
            D::Int8 => with!(i8),
            D::Uint8 => with!(u8),
            D::Int32 => with!(i32),
            D::Uint32 => with!(u32),
            D::Int64 => with!(i64),
            D::Uint64 => with!(u64),
            D::Float16 => with!(half::f16),
            D::Float32 => with!(f32),
            D::Float64 => with!(f64),
            D::Bfloat16 => with!(half::bf16),
            D::Float8e4m3 => with!(devcomm::F8E4M3),
            D::Float8e5m2 => with!(devcomm::F8E5M2),
        }
    }};
}
pub(crate) use with_type;

/// Elements on the GPU during a call.
pub struct Operand<T: Element> {
    pub slice: DeviceSlice<T>,
    /// Where the elements are copied to afterwards.
    back: Option<u64>,
}

impl<T: Element> Operand<T> {
    /// Returns the elements of an array of this type; those of an array of the host are copied to
    /// the GPU, and if it is [written](Array::written), [`finish`](Self::finish) copies them back.
    ///
    /// The caller's reference keeps the array.
    pub fn new(comm: &Comm, array: &Array, stream: &Stream) -> Result<Self> {
        debug_assert_eq!(array.data_type, T::DATA_TYPE);
        let (address, len) = (array.address, array.len);
        if let Place::Host { writable: false } | Place::Gpu { writable: false, .. } = &array.place
            && array.written
        {
            return Err(invalid_input("an array to write to is read-only"));
        }
        match &array.place {
            Place::Host { .. } => {}
            // The array may be the unsigned numbers of a window of signed ones.
            Place::Window(window) => return Ok(window.slice.clone().into_typed()?.into()),
            Place::Gpu { .. } if comm.gpu.simulated => {
                return Err(invalid_input("a tensor of a real GPU in a simulated world"));
            }
            Place::Gpu { .. } | Place::Dlpack { .. } => {
                return Ok(Self::on_gpu(comm, address, len));
            }
        }
        // Memory has at least an element. The slice keeps it.
        let copy = comm.communicator.mem_alloc::<T>(len.max(1))?;
        let slice = copy.slice(..len)?;
        stream.copy_to_device(elements::<T>(address, len), &slice)?;
        let back = array.written.then_some(address);
        Ok(Self { slice, back })
    }

    /// Returns the elements at an address: as part of a window of the communicator's if they are in
    /// one, since kernels reach the peers' parts of it only then.
    fn on_gpu(comm: &Comm, address: u64, len: usize) -> Self {
        let bytes = (len * size_of::<T>()) as u64;
        for window in comm.windows() {
            let Some(offset) = address.checked_sub(window.address()) else { continue };
            let inside = offset + bytes <= window.byte_len() as u64;
            let aligned = offset.is_multiple_of(size_of::<T>() as u64);
            if let (true, true, Ok(window)) = (inside, aligned, window.typed::<T>()) {
                let first = offset as usize / size_of::<T>();
                if let Ok(slice) = window.slice(first..first + len) {
                    return slice.into();
                }
            }
        }
        // SAFETY: memory of the context's GPU, aligned for its elements, as the array's interface
        // says. It stays allocated until the work on the stream is done: the caller's reference
        // keeps it during the call, and afterwards `Gpu::call` does, or torch's allocator.
        unsafe { DeviceSlice::from_raw_parts(&comm.gpu.context, address, len) }.into()
    }

    /// Copies the elements back to an array of the host, after waiting for the stream.
    pub fn finish(self, stream: &Stream) -> Result<()> {
        match self.back {
            None => Ok(()),
            Some(address) => {
                let len = self.slice.len();
                stream.copy_to_host(&self.slice, elements_mut::<T>(address, len))
            }
        }
    }
}

impl<T: Element> From<DeviceSlice<T>> for Operand<T> {
    fn from(slice: DeviceSlice<T>) -> Self {
        Self { slice, back: None }
    }
}

/// Returns the elements of an array of the host.
fn elements<'a, T: Element>(address: u64, len: usize) -> &'a [T] {
    if len == 0 {
        return &[];
    }
    // SAFETY: the array's interface says that there are as many elements, of a type of which any
    // bits are a value. The caller in Python holds a reference, and nothing writes them during the
    // call.
    unsafe { std::slice::from_raw_parts(address as *const T, len) }
}

/// Returns the elements of a writable array of the host.
fn elements_mut<'a, T: Element>(address: u64, len: usize) -> &'a mut [T] {
    if len == 0 {
        return &mut [];
    }
    // SAFETY: as for `elements`; the array is writable, and nothing else uses it during the call.
    unsafe { std::slice::from_raw_parts_mut(address as *mut T, len) }
}
