//! Driver functions for memory: size query, device memory, pinned host memory, copies and memsets.

use std::ffi::{c_uchar, c_uint, c_ushort, c_void};
use std::task::Poll;

use devcomm_sys::driver::{CUdeviceptr, CUresult, CUstream};

use super::stream::StreamOp;
use super::{CallContext, CudaError, CudaResult, call, call_until};
use crate::base::arguments::Arguments;
use crate::base::owner::Owner;
use crate::machine::core::Core;
use crate::memory::{Allocation, GpuSet};
use crate::race::OpAccess;

/// The memory of a simulated GPU in bytes: that of an H200, regardless of the host's memory.
pub(crate) const MEMORY: usize = 141 << 30;

pub(super) unsafe fn info(free: *mut usize, total: *mut usize) -> CUresult {
    call("cuMemGetInfo", |cx| {
        let used = cx.core.devices[cx.gpu()?].allocated.get();
        // SAFETY: the program passes a valid out pointer, as CUDA requires.
        unsafe {
            free.write(MEMORY.saturating_sub(used));
            total.write(MEMORY);
        }
        Ok(())
    })
}

/// Allocates memory that the current GPU can access.
pub(super) unsafe fn alloc(memory: *mut CUdeviceptr, bytes: usize) -> CUresult {
    call("cuMemAlloc", |cx| {
        let (gpu, core) = (cx.gpu()?, cx.core);
        if bytes == 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE.into());
        }
        let refused = |text| CudaError::new(CUresult::CUDA_ERROR_OUT_OF_MEMORY, text);
        let allocated = &core.devices[gpu].allocated;
        if bytes > MEMORY.saturating_sub(allocated.get()) {
            return Err(refused(format!("GPU {gpu} has fewer than {bytes} bytes left")));
        }
        let owner = Owner::Buffer { id: core.nccl.next_id(), rank: gpu };
        let gpus = std::iter::once(gpu as u32).collect();
        let allocation = Allocation::single(&core.memory, gpus, bytes, owner);
        let allocation = allocation.map_err(|error| refused(error.to_string()))?;
        allocated.set(allocated.get() + bytes);
        let address = allocation.part(0);
        core.device_memory.borrow_mut().insert(address.addr(), (gpu, allocation));
        // SAFETY: the program passes a valid out pointer, as CUDA requires.
        unsafe { memory.write(address as CUdeviceptr) };
        Ok(())
    })
}

pub(super) unsafe fn free(memory: CUdeviceptr) -> CUresult {
    const NAME: &str = "cuMemFree";
    call(NAME, |cx| {
        let (core, start) = (cx.core, memory as usize);
        let Some((gpu, freed)) = core.device_memory.borrow_mut().remove(&start) else {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE.into());
        };
        let bytes = freed.lens()[0];
        let what = || core.memory.owner(start).map_or_else(String::new, |own| own.to_string());
        core.check_unused(NAME, what, gpu, |word| (start..start + bytes).contains(&word))?;
        let allocated = &core.devices[gpu].allocated;
        allocated.set(allocated.get().saturating_sub(bytes));
        Ok(())
    })
}

/// Allocates pinned memory: every GPU can access it, at its host address.
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
        // SAFETY: the program passes a valid out pointer, as CUDA requires.
        unsafe { memory.write(address.cast()) };
        Ok(())
    })
}

pub(super) unsafe fn free_host(memory: *mut c_void) -> CUresult {
    const NAME: &str = "cuMemFreeHost";
    call(NAME, |cx| {
        let (core, start) = (cx.core, memory.addr());
        let freed = core.pinned.borrow_mut().remove(&start);
        let bytes = freed.as_ref().ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?.lens()[0];
        let is_given = |word| (start..start + bytes).contains(&word);
        (0..core.simulation().gpus).try_for_each(|gpu| {
            core.check_unused(NAME, || Owner::Pinned.to_string(), gpu, is_given)
        })
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
        // SAFETY: the program passes a valid out pointer, as CUDA requires.
        unsafe { device.write(memory as CUdeviceptr) };
        Ok(())
    })
}

impl CallContext<'_> {
    /// Returns a pointer to `bytes` bytes, checked to be accessible by the current GPU.
    fn device_memory(&self, address: CUdeviceptr, bytes: usize) -> CudaResult<*mut u8> {
        device_memory(self.core, self.gpu()?, address, bytes)
    }

    /// Returns whether host memory is pinned: GPUs can access it at its host address.
    fn is_pinned(&self, memory: *const c_void, bytes: usize) -> bool {
        self.gpu().is_ok_and(|gpu| self.core.memory.contains(gpu as u32, memory.addr(), bytes))
    }

    /// Enqueues a copy or memset.
    fn store(&self, to: CUdeviceptr, kind: StoreKind, stream: CUstream) -> CudaResult<()> {
        let (stream, store) = (self.stream(stream)?, Store::new(self.gpu()?, to, kind));
        store.check(self.core)?;
        self.core.enqueue(&stream, Box::new(store))
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
        let location = core.memory.describe(start, &Arguments::default());
        let text = format!("{bytes} bytes at {address:#x} are not memory of GPU {gpu}: {location}");
        return Err(CudaError::new(CUresult::CUDA_ERROR_INVALID_VALUE, text));
    }
    Ok(std::ptr::with_exposed_provenance_mut(start))
}

/// Copies from the host. With pageable memory it returns once the copy is done, as CUDA may do.
pub(super) unsafe fn copy_to_device(
    to: CUdeviceptr,
    from: *const c_void,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    call_until("cuMemcpyHtoDAsync", &|cx| {
        if cx.is_pinned(from, bytes) {
            let kind = StoreKind::Copy { from: from as CUdeviceptr, bytes };
            return Poll::Ready(cx.store(to, kind, stream));
        }
        cx.when_idle(stream, || {
            let to = cx.device_memory(to, bytes)?;
            // SAFETY: the program passes this many bytes; the target was checked; no kernel runs.
            unsafe { to.copy_from(from.cast(), bytes) };
            cx.core.gpus.progress();
            let (name, gpu) = ("a copy to the device", cx.gpu()?);
            cx.core.host_access(name, gpu, to.addr(), bytes, OpAccess::Write)
        })
    })
}

/// Copies to the host. With pageable memory it returns once the copy is done, as CUDA does.
pub(super) unsafe fn copy_to_host(
    to: *mut c_void,
    from: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    call_until("cuMemcpyDtoHAsync", &|cx| {
        if cx.is_pinned(to, bytes) {
            let kind = StoreKind::Copy { from, bytes };
            return Poll::Ready(cx.store(to as CUdeviceptr, kind, stream));
        }
        cx.when_idle(stream, || {
            let from = cx.device_memory(from, bytes)?;
            // SAFETY: the program passes host memory of this size, as CUDA requires.
            unsafe { to.cast::<u8>().copy_from(from, bytes) };
            let (name, gpu) = ("a copy to the host", cx.gpu()?);
            cx.core.host_access(name, gpu, from.addr(), bytes, OpAccess::Read)
        })
    })
}

/// The stream operation that copies or sets memory that the GPU can access. With weak memory a copy
/// writes its target some time after it has read its source.
struct Store {
    gpu: usize,
    to: CUdeviceptr,
    kind: StoreKind,
    under_way: Option<UnderWay>,
}

/// The state of a copy that has read its source.
struct UnderWay {
    data: Vec<u8>,
    /// The number of polls before the copy writes its target.
    polls: usize,
}

#[derive(Clone, Copy)]
enum StoreKind {
    /// A copy from memory that the GPU can access.
    Copy { from: CUdeviceptr, bytes: usize },
    /// A memset to `count` values of `size` bytes, one every `pitch` bytes.
    Fill { value: [u8; 4], size: usize, pitch: usize, count: usize },
}

impl Store {
    /// Returns the distance from the first written byte to the end of the last.
    fn extent(&self) -> usize {
        match self.kind {
            StoreKind::Copy { bytes, .. } => bytes,
            StoreKind::Fill { count: 0, .. } => 0,
            StoreKind::Fill { size, pitch, count, .. } => {
                (count - 1).saturating_mul(pitch).saturating_add(size)
            }
        }
    }

    /// Fails if the GPU cannot access the memory.
    fn check(&self, core: &Core) -> CudaResult<*mut u8> {
        let to = device_memory(core, self.gpu, self.to, self.extent())?;
        if let StoreKind::Copy { from, bytes } = self.kind {
            device_memory(core, self.gpu, from, bytes)?;
        }
        Ok(to)
    }

    fn new(gpu: usize, to: CUdeviceptr, kind: StoreKind) -> Self {
        Self { gpu, to, kind, under_way: None }
    }

    /// Reads the source.
    fn begin(&self, core: &Core) -> CudaResult<UnderWay> {
        self.check(core)?;
        let polls = core.copy_delay();
        let StoreKind::Copy { from, bytes } = self.kind else {
            return Ok(UnderWay { data: Vec::new(), polls });
        };
        core.op_access("a copy", from as usize, bytes, OpAccess::Read)?;
        let mut data = Vec::with_capacity(bytes);
        // SAFETY: the source was just checked, and no kernel runs now; the vector has the capacity.
        unsafe {
            let from = std::ptr::with_exposed_provenance::<u8>(from as usize);
            from.copy_to_nonoverlapping(data.as_mut_ptr(), bytes);
            data.set_len(bytes);
        }
        Ok(UnderWay { data, polls })
    }

    /// Writes the target.
    fn land(&self, core: &Core, data: &[u8]) -> CudaResult<()> {
        let to = self.check(core)?;
        let name = match self.kind {
            StoreKind::Copy { .. } => "a copy",
            StoreKind::Fill { .. } => "a memset",
        };
        match self.kind {
            StoreKind::Fill { size, pitch, count, .. } if pitch != size => {
                for index in 0..count {
                    core.op_access(name, to.addr() + index * pitch, size, OpAccess::Write)?;
                }
            }
            _ => core.op_access(name, to.addr(), self.extent(), OpAccess::Write)?,
        }
        match self.kind {
            // SAFETY: the target was just checked, and no kernel runs now.
            StoreKind::Copy { .. } => unsafe {
                to.copy_from_nonoverlapping(data.as_ptr(), data.len());
            },
            // SAFETY: the target was just checked, and no kernel runs now.
            StoreKind::Fill { value, size: 1, pitch: 1, count } => unsafe {
                to.write_bytes(value[0], count);
            },
            StoreKind::Fill { value, size, pitch, count } => {
                for index in 0..count {
                    // SAFETY: the bytes are within the extent, which was just checked.
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
        let mut run = || {
            let under_way = match &mut self.under_way {
                Some(under_way) => under_way,
                None => self.under_way.insert(self.begin(core)?),
            };
            if let Some(polls) = under_way.polls.checked_sub(1) {
                under_way.polls = polls;
                core.op_progressed();
                return Ok(Poll::Pending);
            }
            let data = std::mem::take(&mut under_way.data);
            self.land(core, &data).map(Poll::Ready)
        };
        run().unwrap_or_else(|error: CudaError| {
            core.fail_operation(self.name(), error);
            Poll::Pending
        })
    }

    fn name(&self) -> String {
        match self.kind {
            StoreKind::Copy { .. } => "a copy".to_owned(),
            StoreKind::Fill { .. } => "a memset".to_owned(),
        }
    }

    fn duplicate(&self) -> Box<dyn StreamOp> {
        Box::new(Self::new(self.gpu, self.to, self.kind))
    }
}

fn enqueue(name: &'static str, to: CUdeviceptr, kind: StoreKind, stream: CUstream) -> CUresult {
    call(name, |cx| cx.store(to, kind, stream))
}

pub(super) unsafe fn copy(
    to: CUdeviceptr,
    from: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    enqueue("cuMemcpyDtoDAsync", to, StoreKind::Copy { from, bytes }, stream)
}

/// Returns a memset to `count` contiguous values.
fn fill<const N: usize>(value: [u8; N], count: usize) -> StoreKind {
    let mut bytes = [0; 4];
    bytes[..N].copy_from_slice(&value);
    StoreKind::Fill { value: bytes, size: N, pitch: N, count }
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

/// Fills one column of `height` rows: only a `width` of 1 is supported.
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
    let kind = StoreKind::Fill { value: value.to_ne_bytes(), size: 4, pitch, count: height };
    enqueue("cuMemsetD2D32Async", to, kind, stream)
}
