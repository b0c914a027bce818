//! Driver functions for memory: pinned host memory, copies and fills.

use std::ffi::{c_uchar, c_uint, c_void};

use devcomm_sys::driver::{CUdeviceptr, CUresult};

use super::{CallContext, CudaError, CudaResult, call};
use crate::memory::{Allocation, GpuSet, Owner};

/// A GPU's memory in bytes: an H200's, regardless of the host's memory.
pub(crate) const MEMORY: usize = 141 << 30;

pub(super) unsafe fn info(free: *mut usize, total: *mut usize) -> CUresult {
    call("cuMemGetInfo", |cx| {
        let taken = cx.core.devices[cx.gpu()?].allocated.get();
        // SAFETY: the module's.
        unsafe {
            free.write(MEMORY.saturating_sub(taken));
            total.write(MEMORY);
        }
        Ok(())
    })
}

/// Every GPU can access it, at its host address.
pub(super) unsafe fn host_alloc(memory: *mut *mut c_void, bytes: usize, _: c_uint) -> CUresult {
    call("cuMemHostAlloc", |cx| {
        cx.gpu()?;
        if bytes == 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE.into());
        }
        let everybody = GpuSet::all();
        let allocation = Allocation::single(&cx.core.memory, everybody, bytes, Owner::Pinned);
        let allocation = allocation.map_err(|error| {
            CudaError::new(CUresult::CUDA_ERROR_OUT_OF_MEMORY, error.to_string())
        })?;
        let address = allocation.part(0);
        cx.core.pinned.borrow_mut().insert(address.addr(), allocation);
        // SAFETY: the module's.
        unsafe { memory.write(address.cast()) };
        Ok(())
    })
}

pub(super) unsafe fn free_host(memory: *mut c_void) -> CUresult {
    call("cuMemFreeHost", |cx| match cx.core.pinned.borrow_mut().remove(&memory.addr()) {
        Some(_) => Ok(()),
        None => Err(CUresult::CUDA_ERROR_INVALID_VALUE.into()),
    })
}

pub(super) unsafe fn host_device_pointer(
    device: *mut CUdeviceptr,
    memory: *mut c_void,
    _flags: c_uint,
) -> CUresult {
    call("cuMemHostGetDevicePointer", |cx| {
        if !cx.core.pinned.borrow().contains_key(&memory.addr()) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE.into());
        }
        // SAFETY: the module's.
        unsafe { device.write(memory as CUdeviceptr) };
        Ok(())
    })
}

impl CallContext<'_> {
    /// Checks that the current GPU can access `bytes` bytes at `address`.
    fn device_memory(&self, address: CUdeviceptr, bytes: usize) -> CudaResult<*mut u8> {
        let gpu = self.gpu()?;
        let start = address as usize;
        if bytes > 0 && !self.core.memory.contains(gpu as u32, start, bytes) {
            let place = self.core.memory.describe(start);
            let text = format!(
                "{bytes} bytes at {address:#x} are not accessible to GPU {gpu}: \
                               {place}"
            );
            return Err(CudaError::new(CUresult::CUDA_ERROR_INVALID_VALUE, text));
        }
        Ok(std::ptr::with_exposed_provenance_mut(start))
    }
}

/// Copies and fills complete at once: the default stream has no work to wait for.
pub(super) unsafe fn copy_in(to: CUdeviceptr, from: *const c_void, bytes: usize) -> CUresult {
    call("cuMemcpyHtoD", |cx| {
        let to = cx.device_memory(to, bytes)?;
        // SAFETY: the module's; the target was checked, and no kernel runs while the host asks.
        unsafe { to.copy_from(from.cast(), bytes) };
        cx.core.gpus.progress();
        Ok(())
    })
}

pub(super) unsafe fn copy_out(to: *mut c_void, from: CUdeviceptr, bytes: usize) -> CUresult {
    call("cuMemcpyDtoH", |cx| {
        let from = cx.device_memory(from, bytes)?;
        // SAFETY: as above.
        unsafe { to.cast::<u8>().copy_from(from, bytes) };
        Ok(())
    })
}

pub(super) unsafe fn fill(to: CUdeviceptr, byte: c_uchar, count: usize) -> CUresult {
    call("cuMemsetD8", |cx| {
        let to = cx.device_memory(to, count)?;
        // SAFETY: as above.
        unsafe { to.write_bytes(byte, count) };
        cx.core.gpus.progress();
        Ok(())
    })
}
