//! Driver functions for devices and primary contexts.

use std::ffi::{c_char, c_int, c_uint};

use devcomm_sys::driver::{CUcontext, CUdevice, CUdevice_attribute, CUresult};

use super::{CudaResult, call, limits, query};
use crate::base::simulation::Simulation;
use crate::machine::baton::Client;
use crate::machine::{find, join};

/// The driver version of CUDA 13.0.
const DRIVER_VERSION: c_int = 13_000;

pub(super) unsafe fn init(_flags: c_uint) -> CUresult {
    CUresult::CUDA_SUCCESS
}

pub(super) unsafe fn driver_version(version: *mut c_int) -> CUresult {
    // SAFETY: the program passes a valid out pointer, as CUDA requires.
    unsafe { version.write(DRIVER_VERSION) };
    CUresult::CUDA_SUCCESS
}

pub(super) unsafe fn device_count(count: *mut c_int) -> CUresult {
    query("cuDeviceGetCount", |simulation| {
        // SAFETY: the program passes a valid out pointer, as CUDA requires.
        unsafe { count.write(simulation.gpus as c_int) };
        Ok(())
    })
}

/// Checks a device ordinal and returns the GPU's index.
fn device_index(simulation: &Simulation, device: c_int) -> CudaResult<usize> {
    let gpu = usize::try_from(device).ok().filter(|gpu| *gpu < simulation.gpus);
    gpu.ok_or_else(|| CUresult::CUDA_ERROR_INVALID_DEVICE.into())
}

pub(super) unsafe fn device(device: *mut CUdevice, ordinal: c_int) -> CUresult {
    query("cuDeviceGet", |simulation| {
        let gpu = device_index(simulation, ordinal)?;
        // SAFETY: the program passes a valid out pointer, as CUDA requires.
        unsafe { device.write(gpu as CUdevice) };
        Ok(())
    })
}

pub(super) unsafe fn device_attribute(
    value: *mut c_int,
    attribute: CUdevice_attribute,
    device: CUdevice,
) -> CUresult {
    use CUdevice_attribute as A;
    query("cuDeviceGetAttribute", |simulation| {
        let gpu = device_index(simulation, device)?;
        let number = match attribute {
            A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => simulation.compute_capability.0,
            A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => simulation.compute_capability.1,
            A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => simulation.multiprocessors_of(gpu),
            A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X => limits::GRID[0],
            A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y => limits::GRID[1],
            A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z => limits::GRID[2],
            A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X => limits::BLOCK[0],
            A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y => limits::BLOCK[1],
            A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z => limits::BLOCK[2],
            A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK => limits::BLOCK_THREADS,
            A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR => {
                simulation.multiprocessor_threads()
            }
            A::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK => limits::BLOCK_REGISTERS,
            A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK => limits::STATIC_SHARED,
            A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => limits::BLOCK_SHARED,
            A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED => 1,
            _ => 0,
        };
        // SAFETY: the program passes a valid out pointer, as CUDA requires.
        unsafe { value.write(number.cast_signed()) };
        Ok(())
    })
}

pub(super) unsafe fn device_name(name: *mut c_char, len: c_int, device: CUdevice) -> CUresult {
    const NAME: &std::ffi::CStr = c"simulated GPU";
    query("cuDeviceGetName", |simulation| {
        device_index(simulation, device)?;
        let bytes = NAME.to_bytes_with_nul();
        if (len as usize) < bytes.len() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE.into());
        }
        // SAFETY: the program passes a buffer of `len` bytes, as CUDA requires.
        unsafe { name.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    })
}

/// Returns the handle of a GPU's context. It encodes machine (from bit 24 on) and GPU (bits 4 to
/// 23, from 1), so that a thread that is attached to no machine can make it current.
fn handle(machine: u64, gpu: usize) -> CUcontext {
    ((machine << 24) | ((gpu as u64 + 1) << 4)) as CUcontext
}

fn decode_handle(context: CUcontext) -> (u64, Option<usize>) {
    let number = context as u64;
    (number >> 24, ((number >> 4) as usize & 0xf_ffff).checked_sub(1))
}

pub(super) unsafe fn retain(context: *mut CUcontext, device: CUdevice) -> CUresult {
    call("cuDevicePrimaryCtxRetain", |cx| {
        let gpu = device_index(cx.core.simulation(), device)?;
        let retained = &cx.core.devices[gpu].retained;
        retained.set(retained.get() + 1);
        // SAFETY: the program passes a valid out pointer, as CUDA requires.
        unsafe { context.write(handle(cx.core.number(), gpu)) };
        Ok(())
    })
}

pub(super) unsafe fn release(device: CUdevice) -> CUresult {
    call("cuDevicePrimaryCtxRelease", |cx| {
        let retained = &cx.core.devices[device_index(cx.core.simulation(), device)?].retained;
        match retained.get().checked_sub(1) {
            Some(remaining) => retained.set(remaining),
            None => return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT.into()),
        }
        Ok(())
    })
}

/// Attaches the thread to the context's machine, and makes the context current.
pub(super) unsafe fn set_current(context: CUcontext) -> CUresult {
    let (number, gpu) = decode_handle(context);
    if context.is_null() {
        Client::with(|client| client.gpu.set(None));
        return CUresult::CUDA_SUCCESS;
    }
    let (Some(machine), Some(gpu)) = (find(number), gpu) else {
        return CUresult::CUDA_ERROR_INVALID_CONTEXT;
    };
    join(&machine);
    Client::with(|client| client.gpu.set(Some(gpu)));
    CUresult::CUDA_SUCCESS
}
