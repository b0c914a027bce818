//! A shared library that `tensors.py` loads into a process of Python, and to which it hands
//! PyTorch's tensors. Errors are texts, which are never freed.

use std::ffi::{CString, c_char, c_void};
use std::ptr::{null, null_mut};

use devcomm_host::{
    Buffer, Context, DeviceSlice, DlpackTensor, Library, MultiGpu, OLDEST_VERSION, ReduceOp,
    Result, SymmetricBuffer,
};

/// Returns the path of NCCL, which torch has loaded before, or an error.
#[unsafe(no_mangle)]
pub extern "C" fn devcomm_nccl() -> *const c_char {
    text(library().map(|library| library.path().display().to_string()))
}

/// Sums the tensors in place, the `i`th of which is on GPU `i`. Takes them, and returns NULL or an
/// error.
///
/// # Safety
///
/// `tensors` has `n` tensors, as [`DlpackTensor::from_raw`] takes them, or if `versioned`
/// [`DlpackTensor::from_raw_versioned`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn devcomm_all_reduce(
    tensors: *const *mut c_void,
    n: usize,
    versioned: bool,
) -> *const c_char {
    // SAFETY: the caller passes an array of `n` tensors.
    let tensors = unsafe { std::slice::from_raw_parts(tensors, n) };
    let take = |&raw: &*mut c_void| match versioned {
        // SAFETY: the caller passes tensors without a version, which this function takes.
        false => unsafe { DlpackTensor::from_raw(raw) },
        // SAFETY: the caller passes tensors with a version, which this function takes.
        true => unsafe { DlpackTensor::from_raw_versioned(raw) },
    };
    // All are taken, also after one that is refused, and dropped at the end.
    let taken: Vec<Result<_>> = tensors.iter().map(take).collect();
    match taken.into_iter().collect::<Result<_>>().and_then(all_reduce) {
        Ok(()) => null(),
        Err(error) => text(Ok(error.to_string())),
    }
}

/// Returns a tensor of `len` f32, all 7, on GPU `gpu`, which the caller takes; NULL after an error,
/// which is printed.
#[unsafe(no_mangle)]
pub extern "C" fn devcomm_sevens(gpu: usize, len: usize, versioned: bool) -> *mut c_void {
    let tensor = sevens(gpu, len).map(|sevens| match versioned {
        false => sevens.to_dlpack(),
        true => sevens.to_dlpack_versioned(),
    });
    tensor.map_or_else(
        |error| {
            eprintln!("{error}");
            null_mut()
        },
        DlpackTensor::into_raw,
    )
}

fn library() -> Result<Library> {
    Library::open_at_least(None, OLDEST_VERSION)
}

fn all_reduce(tensors: Vec<DlpackTensor>) -> Result<()> {
    let gpus = MultiGpu::new(&library()?, &(0..tensors.len()).collect::<Vec<_>>())?;
    let slices = gpus.communicators().iter().zip(tensors).map(|(communicator, tensor)| {
        DeviceSlice::from_dlpack_dynamic(communicator.context(), tensor)
    });
    let slices = slices.collect::<Result<Vec<_>>>()?;
    gpus.all_reduce(&slices, &slices, ReduceOp::Sum)?;
    gpus.synchronize()
}

fn sevens(gpu: usize, len: usize) -> Result<DeviceSlice<f32>> {
    let memory = SymmetricBuffer::new(&library()?, &Context::new(gpu)?, len)?;
    memory.copy_from_host(&vec![7.0; len])?;
    Ok(memory.device_slice())
}

fn text(result: Result<String>) -> *const c_char {
    let text = result.unwrap_or_else(|error| format!("error: {error}"));
    CString::new(text).unwrap_or_default().into_raw()
}
