//! DLPack's structs, and the ownership of tensors that libraries exchange by them.
//!
//! Layouts and constants are those of `dlpack.h` 1.1 (<https://dmlc.github.io/dlpack>), ABI 1 and
//! the ABI before it.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use crate::error::{Error, Result};

/// The ABI of versioned tensors that this crate makes and takes (`DLPACK_MAJOR_VERSION`).
pub(crate) const MAJOR: u32 = 1;
/// Memory of a CUDA device (`kDLCUDA`).
pub(crate) const CUDA: i32 = 2;
/// Nobody may write to the tensor (`DLPACK_FLAG_BITMASK_READ_ONLY`).
pub(crate) const READ_ONLY: u64 = 1;

/// `DLDevice`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    pub(crate) kind: i32,
    pub(crate) id: i32,
}

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Type {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    n_dimensions: i32,
    data_type: Type,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Managed {
    tensor: Tensor,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// `DLManagedTensorVersioned`. The fields before `flags` are the same in all versions.
#[repr(C)]
struct ManagedVersioned {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: Tensor,
}

/// The contents of a tensor's struct.
pub(crate) struct Description<'a> {
    pub(crate) address: u64,
    pub(crate) device: Device,
    pub(crate) data_type: Type,
    pub(crate) shape: &'a [i64],
    /// The strides in elements; `None` for consecutive elements in row-major order.
    pub(crate) strides: Option<&'a [i64]>,
    pub(crate) flags: u64,
}

/// A tensor that one library hands to another by [DLPack](https://dmlc.github.io/dlpack): memory of
/// a device, with a shape, an element type, and a function that gives it back. Dropping this calls
/// that function.
///
/// [`DeviceSlice::from_dlpack`](crate::DeviceSlice::from_dlpack) and
/// [`to_dlpack`](crate::DeviceSlice::to_dlpack) use it. In Python a tensor travels in a capsule of
/// the name [`capsule_name`](Self::capsule_name), whose pointer is that of
/// [`from_raw`](Self::from_raw) and [`into_raw`](Self::into_raw). The code that takes the tensor
/// out of a capsule renames the capsule to `used_` with that name, so that it does not give the
/// memory back.
///
/// DLPack: `DLManagedTensor`, or `DLManagedTensorVersioned`.
#[doc(alias = "DLManagedTensor")]
#[doc(alias = "DLManagedTensorVersioned")]
#[derive(Debug)]
pub struct DlpackTensor(Pointer);

#[derive(Clone, Copy, Debug)]
enum Pointer {
    Unversioned(NonNull<Managed>),
    Versioned(NonNull<ManagedVersioned>),
}

// SAFETY: `from_raw` asks for a deleter that any thread may call, and this crate's own are so; the
// rest of the struct is plain data.
unsafe impl Send for DlpackTensor {}
// SAFETY: through a reference the struct is only read.
unsafe impl Sync for DlpackTensor {}

impl DlpackTensor {
    /// Takes a tensor that another library exported, without a version: the pointer of a capsule
    /// `dltensor`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for NULL.
    ///
    /// # Safety
    ///
    /// `tensor` is a `DLManagedTensor` that its owner hands over. It describes memory that is
    /// allocated until its deleter is called, which any thread may do; on a simulated machine,
    /// memory of that machine.
    pub unsafe fn from_raw(tensor: *mut c_void) -> Result<Self> {
        Ok(Self(Pointer::Unversioned(not_null(tensor)?)))
    }

    /// Does the same as [`from_raw`](Self::from_raw), for a tensor with a version: the pointer of a
    /// capsule `dltensor_versioned`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`from_raw`](Self::from_raw).
    ///
    /// # Safety
    ///
    /// The contract is that of [`from_raw`](Self::from_raw), for a `DLManagedTensorVersioned`.
    pub unsafe fn from_raw_versioned(tensor: *mut c_void) -> Result<Self> {
        Ok(Self(Pointer::Versioned(not_null(tensor)?)))
    }

    /// Hands the tensor over: a `DLManagedTensorVersioned` if [`is_versioned`](Self::is_versioned),
    /// otherwise a `DLManagedTensor`. The code that takes it calls its deleter.
    #[must_use = "the memory is never freed if nobody takes the tensor"]
    pub fn into_raw(self) -> *mut c_void {
        let raw = match self.0 {
            Pointer::Unversioned(tensor) => tensor.as_ptr().cast(),
            Pointer::Versioned(tensor) => tensor.as_ptr().cast(),
        };
        std::mem::forget(self);
        raw
    }

    /// Returns whether the struct has a version: then it is a `DLManagedTensorVersioned`.
    #[must_use]
    pub fn is_versioned(&self) -> bool {
        matches!(self.0, Pointer::Versioned(_))
    }

    /// Returns the name of a Python capsule with this tensor.
    #[must_use]
    pub fn capsule_name(&self) -> &'static CStr {
        if self.is_versioned() { c"dltensor_versioned" } else { c"dltensor" }
    }

    /// Reads the struct.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a struct of another major version, or an invalid one.
    pub(crate) fn describe(&self) -> Result<Description<'_>> {
        let (tensor, flags) = match self.0 {
            // SAFETY: the struct lives until the deleter is called, in `drop`.
            Pointer::Unversioned(managed) => (unsafe { managed.as_ref() }.tensor, 0),
            Pointer::Versioned(managed) => {
                // SAFETY: these fields are the same in all versions; as above.
                let (major, minor) =
                    unsafe { ((*managed.as_ptr()).major, (*managed.as_ptr()).minor) };
                if major != MAJOR {
                    return Err(Error::invalid(format!(
                        "a tensor of DLPack {major}.{minor}; this crate takes {MAJOR}.x"
                    )));
                }
                // SAFETY: a struct of this major version has this layout; as above.
                let managed = unsafe { managed.as_ref() };
                (managed.tensor, managed.flags)
            }
        };
        let n = usize::try_from(tensor.n_dimensions).map_err(|_| {
            Error::invalid(format!("a DLPack tensor of {} dimensions", tensor.n_dimensions))
        })?;
        let numbers = |first: *const i64| {
            if n == 0 || first.is_null() {
                return None;
            }
            // SAFETY: the struct's owner promises `n` numbers, which live as long as the struct.
            Some(unsafe { std::slice::from_raw_parts(first, n) })
        };
        let (shape, strides) = (numbers(tensor.shape), numbers(tensor.strides));
        if n > 0 && shape.is_none() {
            return Err(Error::invalid("a DLPack tensor without a shape"));
        }
        let address = (tensor.data.addr() as u64).checked_add(tensor.byte_offset);
        Ok(Description {
            address: address
                .ok_or_else(|| Error::invalid("a DLPack tensor beyond all addresses"))?,
            device: tensor.device,
            data_type: tensor.data_type,
            shape: shape.unwrap_or_default(),
            strides,
            flags,
        })
    }

    /// Returns a tensor of one dimension at `address`. `kept` is dropped by the thread that gives
    /// it back.
    pub(crate) fn new(
        address: u64,
        len: i64,
        device: Device,
        data_type: Type,
        versioned: bool,
        kept: impl Send + 'static,
    ) -> Self {
        let export = leak(Export { shape: [len], strides: [1], _kept: Box::new(kept) });
        // SAFETY: `export` lives until the deleter is called.
        let (shape, strides) =
            unsafe { (&raw const (*export.as_ptr()).shape, &raw const (*export.as_ptr()).strides) };
        let (shape, strides) = (shape.cast(), strides.cast());
        let data = std::ptr::without_provenance_mut(address as usize);
        let (n_dimensions, byte_offset) = (1, 0);
        let tensor = Tensor { data, device, n_dimensions, data_type, shape, strides, byte_offset };
        let manager = export.as_ptr().cast();
        Self(if versioned {
            let (major, minor, flags) = (MAJOR, 1, 0);
            let deleter = Some(delete_versioned as unsafe extern "C" fn(_));
            let managed = ManagedVersioned { major, minor, manager, deleter, flags, tensor };
            Pointer::Versioned(leak(managed))
        } else {
            Pointer::Unversioned(leak(Managed { tensor, manager, deleter: Some(delete) }))
        })
    }
}

/// Calls the deleter.
impl Drop for DlpackTensor {
    fn drop(&mut self) {
        // SAFETY: the struct is live, was handed to this crate, and is not used after this.
        unsafe {
            match self.0 {
                Pointer::Unversioned(tensor) => {
                    if let Some(deleter) = (*tensor.as_ptr()).deleter {
                        deleter(tensor.as_ptr());
                    }
                }
                Pointer::Versioned(tensor) => {
                    if let Some(deleter) = (*tensor.as_ptr()).deleter {
                        deleter(tensor.as_ptr());
                    }
                }
            }
        }
    }
}

/// What an exported tensor's struct points to.
struct Export {
    shape: [i64; 1],
    strides: [i64; 1],
    _kept: Box<dyn Send>,
}

unsafe extern "C" fn delete(tensor: *mut Managed) {
    // SAFETY: made by `DlpackTensor::new`; the deleter is called once.
    drop(unsafe { (Box::from_raw((*tensor).manager.cast::<Export>()), Box::from_raw(tensor)) });
}

unsafe extern "C" fn delete_versioned(tensor: *mut ManagedVersioned) {
    // SAFETY: the consumer calls this once, with the tensor that `Box::into_raw` gave.
    drop(unsafe { (Box::from_raw((*tensor).manager.cast::<Export>()), Box::from_raw(tensor)) });
}

fn leak<T>(value: T) -> NonNull<T> {
    NonNull::from(Box::leak(Box::new(value)))
}

fn not_null<T>(tensor: *mut c_void) -> Result<NonNull<T>> {
    NonNull::new(tensor.cast()).ok_or_else(|| Error::invalid("a DLPack tensor at NULL"))
}
