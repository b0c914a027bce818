//! Memory: pinned memory of the host, copies, fills.

use std::ffi::{c_uchar, c_uint, c_void};

use devcomm_sys::driver::{CUdeviceptr, CUresult};

use super::{Ask, Refusal, Refused, ask};
use crate::memory::{Allocation, GpuSet, Owner};

/// Bytes of a GPU's memory: as much as an H200 has, whatever this computer does.
pub(crate) const MEMORY: usize = 141 << 30;

pub(super) unsafe fn info(free: *mut usize, total: *mut usize) -> CUresult {
    ask("cuMemGetInfo", |ask| {
        let taken = ask.core.devices[ask.gpu()?].allocated.get();
        // SAFETY: the module's.
        unsafe {
            free.write(MEMORY.saturating_sub(taken));
            total.write(MEMORY);
        }
        Ok(())
    })
}

/// Every GPU reaches it, at the address that the host has.
pub(super) unsafe fn host_alloc(memory: *mut *mut c_void, bytes: usize, _: c_uint) -> CUresult {
    ask("cuMemHostAlloc", |ask| {
        ask.gpu()?;
        if bytes == 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE.into());
        }
        let everybody = GpuSet::all();
        let allocation = Allocation::single(&ask.core.memory, everybody, bytes, Owner::Pinned);
        let allocation = allocation
            .map_err(|error| Refusal::new(CUresult::CUDA_ERROR_OUT_OF_MEMORY, error.to_string()))?;
        let address = allocation.part(0);
        ask.core.pinned.borrow_mut().insert(address.addr(), allocation);
        // SAFETY: the module's.
        unsafe { memory.write(address.cast()) };
        Ok(())
    })
}

pub(super) unsafe fn free_host(memory: *mut c_void) -> CUresult {
    ask("cuMemFreeHost", |ask| match ask.core.pinned.borrow_mut().remove(&memory.addr()) {
        Some(_) => Ok(()),
        None => Err(CUresult::CUDA_ERROR_INVALID_VALUE.into()),
    })
}

pub(super) unsafe fn host_device_pointer(
    device: *mut CUdeviceptr,
    memory: *mut c_void,
    _flags: c_uint,
) -> CUresult {
    ask("cuMemHostGetDevicePointer", |ask| {
        if !ask.core.pinned.borrow().contains_key(&memory.addr()) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE.into());
        }
        // SAFETY: the module's.
        unsafe { device.write(memory as CUdeviceptr) };
        Ok(())
    })
}

impl Ask<'_> {
    /// Memory of `bytes` bytes that the current GPU reaches.
    fn device_memory(&self, address: CUdeviceptr, bytes: usize) -> Refused<*mut u8> {
        let gpu = self.gpu()?;
        let start = address as usize;
        if bytes > 0 && !self.core.memory.contains(gpu as u32, start, bytes) {
            let place = self.core.memory.describe(start);
            let text = format!("{bytes} bytes at {address:#x} are no memory of GPU {gpu}: {place}");
            return Err(Refusal::new(CUresult::CUDA_ERROR_INVALID_VALUE, text));
        }
        Ok(std::ptr::with_exposed_provenance_mut(start))
    }
}

/// Copies and fills take no time: the default stream has nothing that they would have to wait for.
pub(super) unsafe fn copy_in(to: CUdeviceptr, from: *const c_void, bytes: usize) -> CUresult {
    ask("cuMemcpyHtoD", |ask| {
        let to = ask.device_memory(to, bytes)?;
        // SAFETY: the module's; the target was checked, and no kernel runs while the host asks.
        unsafe { to.copy_from(from.cast(), bytes) };
        ask.core.gpus.progress();
        Ok(())
    })
}

pub(super) unsafe fn copy_out(to: *mut c_void, from: CUdeviceptr, bytes: usize) -> CUresult {
    ask("cuMemcpyDtoH", |ask| {
        let from = ask.device_memory(from, bytes)?;
        // SAFETY: as above.
        unsafe { to.cast::<u8>().copy_from(from, bytes) };
        Ok(())
    })
}

pub(super) unsafe fn fill(to: CUdeviceptr, byte: c_uchar, count: usize) -> CUresult {
    ask("cuMemsetD8", |ask| {
        let to = ask.device_memory(to, count)?;
        // SAFETY: as above.
        unsafe { to.write_bytes(byte, count) };
        ask.core.gpus.progress();
        Ok(())
    })
}
