//! Driver functions for memory: pinned host memory, copies and fills.

use std::ffi::{c_uchar, c_uint, c_ushort, c_void};
use std::task::Poll;

use devcomm_sys::driver::{CUdeviceptr, CUresult, CUstream};

use super::stream::StreamOp;
use super::{CallContext, CudaError, CudaResult, call, call_until};
use crate::machine::core::Core;
use crate::memory::{Allocation, GpuSet, Owner};

/// A GPU's memory in bytes: an H200's, regardless of the host's memory.
pub(crate) const MEMORY: usize = 141 << 30;

pub(super) unsafe fn info(free: *mut usize, total: *mut usize) -> CUresult {
    call("cuMemGetInfo", |cx| {
        let taken = cx.core.devices[cx.gpu()?].allocated.get();
        // SAFETY: the module's contract.
        unsafe {
            free.write(MEMORY.saturating_sub(taken));
            total.write(MEMORY);
        }
        Ok(())
    })
}

/// Pinned memory: every GPU can access it, at its host address.
pub(super) unsafe fn host_alloc(memory: *mut *mut c_void, bytes: usize, _: c_uint) -> CUresult {
    call("cuMemHostAlloc", |cx| {
        cx.gpu()?;
        if bytes == 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE.into());
        }
        let gpus = GpuSet::all();
        let allocation = Allocation::single(&cx.core.memory, gpus, bytes, Owner::Pinned);
        let allocation = allocation.map_err(|error| {
            CudaError::new(CUresult::CUDA_ERROR_OUT_OF_MEMORY, error.to_string())
        })?;
        let address = allocation.part(0);
        cx.core.pinned.borrow_mut().insert(address.addr(), allocation);
        // SAFETY: the module's contract.
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
        // SAFETY: the module's contract.
        unsafe { device.write(memory as CUdeviceptr) };
        Ok(())
    })
}

impl CallContext<'_> {
    /// Memory of `bytes` bytes that the current GPU reaches.
    fn device_memory(&self, address: CUdeviceptr, bytes: usize) -> CudaResult<*mut u8> {
        device_memory(self.core, self.gpu()?, address, bytes)
    }

    /// Whether memory of the host is pinned: GPUs reach it at the host's address.
    fn is_pinned(&self, memory: *const c_void, bytes: usize) -> bool {
        self.gpu().is_ok_and(|gpu| self.core.memory.contains(gpu as u32, memory.addr(), bytes))
    }

    /// Enqueues a store.
    fn store(&self, to: CUdeviceptr, what: Stored, stream: CUstream) -> CudaResult<()> {
        let (stream, store) = (self.stream(stream)?, Store { gpu: self.gpu()?, to, what });
        store.check(self.core)?;
        self.core.enqueue(&stream, Box::new(store));
        Ok(())
    }
}

fn device_memory(
    core: &Core,
    gpu: usize,
    address: CUdeviceptr,
    bytes: usize,
) -> CudaResult<*mut u8> {
    let start = address as usize;
    if bytes > 0 && !core.memory.contains(gpu as u32, start, bytes) {
        let place = core.memory.describe(start);
        let text = format!("{bytes} bytes at {address:#x} are not memory of GPU {gpu}: {place}");
        return Err(CudaError::new(CUresult::CUDA_ERROR_INVALID_VALUE, text));
    }
    Ok(std::ptr::with_exposed_provenance_mut(start))
}

/// With pageable memory it returns once the copy is done, as on a GPU.
pub(super) unsafe fn copy_to_device(
    to: CUdeviceptr,
    from: *const c_void,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    call_until("cuMemcpyHtoDAsync", &|cx| {
        if cx.is_pinned(from, bytes) {
            let what = Stored::Copy { from: from as CUdeviceptr, bytes };
            return Poll::Ready(cx.store(to, what, stream));
        }
        cx.when_idle(stream, || {
            let to = cx.device_memory(to, bytes)?;
            // SAFETY: the module's contract; the target was checked, and no kernel runs while the host asks.
            unsafe { to.copy_from(from.cast(), bytes) };
            cx.core.gpus.progress();
            Ok(())
        })
    })
}

/// As [`copy_to_device`].
pub(super) unsafe fn copy_to_host(
    to: *mut c_void,
    from: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    call_until("cuMemcpyDtoHAsync", &|cx| {
        if cx.is_pinned(to, bytes) {
            let what = Stored::Copy { from, bytes };
            return Poll::Ready(cx.store(to as CUdeviceptr, what, stream));
        }
        cx.when_idle(stream, || {
            let from = cx.device_memory(from, bytes)?;
            // SAFETY: as above.
            unsafe { to.cast::<u8>().copy_from(from, bytes) };
            Ok(())
        })
    })
}

/// A stream's store to memory that its GPU reaches.
#[derive(Clone, Copy)]
struct Store {
    gpu: usize,
    to: CUdeviceptr,
    what: Stored,
}

#[derive(Clone, Copy)]
enum Stored {
    /// From memory that the GPU reaches.
    Copy { from: CUdeviceptr, bytes: usize },
    /// `count` values of `size` bytes, one every `pitch` bytes.
    Fill { value: [u8; 4], size: usize, pitch: usize, count: usize },
}

impl Store {
    /// Bytes from the first to the last that it writes.
    fn extent(&self) -> usize {
        match self.what {
            Stored::Copy { bytes, .. } => bytes,
            Stored::Fill { count: 0, .. } => 0,
            Stored::Fill { size, pitch, count, .. } => {
                (count - 1).saturating_mul(pitch).saturating_add(size)
            }
        }
    }

    /// Fails if the GPU cannot access the memory.
    fn check(&self, core: &Core) -> CudaResult<*mut u8> {
        let to = device_memory(core, self.gpu, self.to, self.extent())?;
        if let Stored::Copy { from, bytes } = self.what {
            device_memory(core, self.gpu, from, bytes)?;
        }
        Ok(to)
    }

    fn run(&self, core: &Core) -> CudaResult<()> {
        let to = self.check(core)?;
        match self.what {
            // SAFETY: both ends were checked just now, and no kernel runs meanwhile.
            Stored::Copy { from, bytes } => unsafe {
                to.copy_from(std::ptr::with_exposed_provenance(from as usize), bytes);
            },
            // SAFETY: as above.
            Stored::Fill { value, size: 1, pitch: 1, count } => unsafe {
                to.write_bytes(value[0], count);
            },
            Stored::Fill { value, size, pitch, count } => {
                for index in 0..count {
                    // SAFETY: within the extent, which was checked just now.
                    unsafe { to.add(index * pitch).copy_from(value.as_ptr(), size) };
                }
            }
        }
        core.gpus.progress();
        Ok(())
    }
}

impl StreamOp for Store {
    fn poll(&mut self, core: &Core) -> Poll<()> {
        match self.run(core) {
            Ok(()) => Poll::Ready(()),
            Err(error) => {
                core.fail_with(error);
                Poll::Pending
            }
        }
    }

    fn describe(&self, _core: &Core) -> String {
        match self.what {
            Stored::Copy { .. } => "a copy is next".to_owned(),
            Stored::Fill { .. } => "a fill is next".to_owned(),
        }
    }

    fn duplicate(&self) -> Box<dyn StreamOp> {
        Box::new(*self)
    }
}

fn enqueue(name: &'static str, to: CUdeviceptr, what: Stored, stream: CUstream) -> CUresult {
    call(name, |cx| cx.store(to, what, stream))
}

pub(super) unsafe fn copy(
    to: CUdeviceptr,
    from: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    enqueue("cuMemcpyDtoDAsync", to, Stored::Copy { from, bytes }, stream)
}

/// `count` values one after the other.
fn fill<const N: usize>(value: [u8; N], count: usize) -> Stored {
    let mut bytes = [0; 4];
    bytes[..N].copy_from_slice(&value);
    Stored::Fill { value: bytes, size: N, pitch: N, count }
}

pub(super) unsafe fn fill_8(
    to: CUdeviceptr,
    value: c_uchar,
    count: usize,
    stream: CUstream,
) -> CUresult {
    enqueue("cuMemsetD8Async", to, fill([value], count), stream)
}

pub(super) unsafe fn fill_16(
    to: CUdeviceptr,
    value: c_ushort,
    count: usize,
    stream: CUstream,
) -> CUresult {
    enqueue("cuMemsetD16Async", to, fill(value.to_ne_bytes(), count), stream)
}

pub(super) unsafe fn fill_32(
    to: CUdeviceptr,
    value: c_uint,
    count: usize,
    stream: CUstream,
) -> CUresult {
    enqueue("cuMemsetD32Async", to, fill(value.to_ne_bytes(), count), stream)
}

/// A column: rows (`height`) of one value. Wider rows are not supported.
pub(super) unsafe fn fill_32_strided(
    to: CUdeviceptr,
    pitch: usize,
    value: c_uint,
    width: usize,
    height: usize,
    stream: CUstream,
) -> CUresult {
    if width != 1 {
        return CUresult::CUDA_ERROR_NOT_SUPPORTED;
    }
    let what = Stored::Fill { value: value.to_ne_bytes(), size: 4, pitch, count: height };
    enqueue("cuMemsetD2D32Async", to, what, stream)
}
