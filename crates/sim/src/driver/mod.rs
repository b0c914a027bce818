//! The CUDA driver of a simulated machine.
//!
//! Each function asks the machine's thread, by way of [`ask`]. Handles are numbers that no object
//! had before, so that one that is gone is refused, not followed.
//!
//! # Safety
//!
//! The functions have the driver's contracts: pointers for results are valid, memory of the host
//! has the bytes. They are used while the caller waits for its answer.

mod context;
pub(crate) mod event;
pub(crate) mod function;
pub(crate) mod graph;
mod limits;
mod memory;
mod names;
pub(crate) mod stream;
mod tensor_map;

use std::task::Poll;

use devcomm_sys::driver::{CUresult, Driver};

pub(crate) use self::memory::MEMORY;

use crate::machine::baton::Client;
use crate::machine::core::Core;
use crate::machine::fault::{Effect, Entry};

/// An error of the driver's, and what there is to say about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) code: CUresult,
    /// Instead of the driver's text for the code.
    pub(crate) text: Option<String>,
}

impl Refusal {
    pub(crate) fn new(code: CUresult, text: impl Into<String>) -> Self {
        Self { code, text: Some(text.into()) }
    }
}

impl From<CUresult> for Refusal {
    fn from(code: CUresult) -> Self {
        Self { code, text: None }
    }
}

pub(crate) type Refused<T> = Result<T, Refusal>;

/// What a function may use.
pub(crate) struct Ask<'a> {
    pub(crate) core: &'a Core,
    /// The GPU whose context is current.
    current: Option<usize>,
    entry: Entry,
}

impl Ask<'_> {
    /// The GPU whose context is current, which still works.
    pub(crate) fn gpu(&self) -> Refused<usize> {
        self.core.check()?;
        self.current.ok_or_else(|| CUresult::CUDA_ERROR_INVALID_CONTEXT.into())
    }

    /// Has the record of the call say what it was called with.
    fn note(&self, detail: impl FnOnce() -> String) {
        self.core.faults().detail(&self.entry, detail);
    }
}

/// Has the machine's thread answer.
fn ask(name: &'static str, answer: impl Fn(&Ask<'_>) -> Refused<()>) -> CUresult {
    ask_until(name, &|ask| Poll::Ready(answer(ask)))
}

/// The same, until it has an answer.
fn ask_until(name: &'static str, answer: &dyn Fn(&Ask<'_>) -> Poll<Refused<()>>) -> CUresult {
    let answered = Client::with(|client| {
        let current = client.gpu.get();
        let mut entry = None;
        client.call(name, |core, _| {
            let entry = entry.get_or_insert_with(|| core.faults().enter(name, current));
            let poll = match entry.effect {
                Some(Effect::Fail(code)) => Poll::Ready(Err(error_of(code).into())),
                Some(Effect::Hang) if core.faults().is_released(entry) => {
                    Poll::Ready(Err(CUresult::CUDA_ERROR_LAUNCH_TIMEOUT.into()))
                }
                Some(Effect::Hang) => Poll::Pending,
                _ => answer(&Ask { core, current, entry: *entry }),
            };
            let answered = match (poll, core.deadlock()) {
                (Poll::Pending, Some(report)) => {
                    Err(Refusal::new(CUresult::CUDA_ERROR_LAUNCH_TIMEOUT, report))
                }
                (Poll::Pending, None) => return Poll::Pending,
                (Poll::Ready(answered), _) => answered,
            };
            let code = answered.as_ref().err().map_or(0, |refusal| refusal.code as i32);
            core.faults().leave(entry, code);
            if let Some(Effect::Later(code)) = entry.effect {
                core.fail_with(error_of(code).into());
            }
            Poll::Ready(answered)
        })
    });
    match answered.flatten() {
        None => CUresult::CUDA_ERROR_DEINITIALIZED,
        Some(Ok(())) => CUresult::CUDA_SUCCESS,
        Some(Err(refusal)) => {
            let code = refusal.code;
            names::remember(refusal);
            code
        }
    }
}

/// The driver's error of a number that a test has chosen.
fn error_of(code: i32) -> CUresult {
    use CUresult as E;
    const KNOWN: [CUresult; 10] = [
        E::CUDA_ERROR_INVALID_VALUE,
        E::CUDA_ERROR_OUT_OF_MEMORY,
        E::CUDA_ERROR_INVALID_CONTEXT,
        E::CUDA_ERROR_INVALID_HANDLE,
        E::CUDA_ERROR_NOT_READY,
        E::CUDA_ERROR_ILLEGAL_ADDRESS,
        E::CUDA_ERROR_LAUNCH_TIMEOUT,
        E::CUDA_ERROR_LAUNCH_FAILED,
        E::CUDA_ERROR_NOT_SUPPORTED,
        E::CUDA_ERROR_ECC_UNCORRECTABLE,
    ];
    KNOWN.into_iter().find(|known| *known as i32 == code).unwrap_or(E::CUDA_ERROR_UNKNOWN)
}

/// The table.
pub(crate) static DRIVER: Driver = Driver {
    cuGetErrorName: names::error_name,
    cuGetErrorString: names::error_string,
    cuInit: context::init,
    cuDriverGetVersion: context::driver_version,
    cuDeviceGetCount: context::device_count,
    cuDeviceGet: context::device,
    cuDeviceGetAttribute: context::device_attribute,
    cuDeviceGetName: context::device_name,
    cuDevicePrimaryCtxRetain: context::retain,
    cuDevicePrimaryCtxRelease_v2: context::release,
    cuCtxSetCurrent: context::set_current,
    cuMemGetInfo_v2: memory::info,
    cuMemHostAlloc: memory::host_alloc,
    cuMemFreeHost: memory::free_host,
    cuMemHostGetDevicePointer_v2: memory::host_device_pointer,
    cuMemcpyHtoDAsync_v2: memory::copy_to_device,
    cuMemcpyDtoHAsync_v2: memory::copy_to_host,
    cuMemcpyDtoDAsync_v2: memory::copy,
    cuMemsetD8Async: memory::fill_8,
    cuMemsetD16Async: memory::fill_16,
    cuMemsetD32Async: memory::fill_32,
    cuMemsetD2D32Async: memory::fill_32_strided,
    cuTensorMapEncodeTiled: tensor_map::encode_tiled,
    cuStreamCreate: stream::create,
    cuStreamDestroy_v2: stream::destroy,
    cuStreamQuery: stream::query,
    cuStreamSynchronize: stream::synchronize,
    cuStreamWaitEvent: event::wait,
    cuEventCreate: event::create,
    cuEventDestroy_v2: event::destroy,
    cuEventRecord: event::record,
    cuEventQuery: event::query,
    cuEventElapsedTime_v2: event::elapsed_time,
    cuStreamBeginCapture_v2: graph::begin_capture,
    cuStreamEndCapture: graph::end_capture,
    cuGraphGetNodes: graph::nodes,
    cuGraphInstantiateWithFlags: graph::instantiate,
    cuGraphLaunch: graph::launch,
    cuGraphDestroy: graph::destroy,
    cuGraphExecDestroy: graph::destroy_exec,
    cuModuleLoad: function::load_file,
    cuModuleLoadDataEx: function::load_data,
    cuModuleUnload: function::unload,
    cuModuleGetFunction: function::of_module,
    cuFuncLoad: function::load,
    cuFuncGetAttribute: function::attribute,
    cuFuncSetAttribute: function::set_attribute,
    cuOccupancyMaxActiveBlocksPerMultiprocessor: function::occupancy,
    cuLaunchKernelEx: function::launch,
};
