//! The CUDA driver API of a simulated machine.
//!
//! A function that uses the machine's state runs a closure on the machine's thread, through
//! [`call`] or [`call_until`]. The others run on the calling thread: those whose answer does not
//! change while the machine lives ([`query`]), and those that use only what belongs to the calling
//! thread, as its current context. Handles are never reused, so that a stale one is refused.
//!
//! # Safety
//!
//! The functions have the driver's contracts: output pointers are valid and host buffers have the
//! given size. Output pointers and pageable buffers are used only during the call. A stream uses
//! the pinned buffer of a copy after the call, until the copy has ended or the machine has failed.
//! The simulator itself owns pinned memory, and checks before each access that it is allocated.

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

use crate::base::simulation::Simulation;
use crate::machine::baton::{Client, Shared};
use crate::machine::core::Core;
use crate::machine::fault::{Effect, Entry};

/// A driver error, with its message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CudaError {
    pub(crate) code: CUresult,
    /// Replaces the driver's message for the code.
    pub(crate) text: Option<String>,
}

impl CudaError {
    pub(crate) fn new(code: CUresult, text: impl Into<String>) -> Self {
        Self { code, text: Some(text.into()) }
    }
}

impl From<CUresult> for CudaError {
    fn from(code: CUresult) -> Self {
        Self { code, text: None }
    }
}

pub(crate) type CudaResult<T> = Result<T, CudaError>;

/// The machine's state and the calling thread's context, for the closure of a driver call.
pub(crate) struct CallContext<'a> {
    pub(crate) core: &'a Core,
    /// The GPU whose context is current.
    current: Option<usize>,
    entry: Entry,
}

impl CallContext<'_> {
    /// Returns the GPU whose context is current; an error if a kernel has failed.
    pub(crate) fn gpu(&self) -> CudaResult<usize> {
        self.core.check()?;
        self.current.ok_or_else(|| CUresult::CUDA_ERROR_INVALID_CONTEXT.into())
    }

    /// Adds the arguments to the call's entry in the record of calls.
    fn note(&self, detail: impl FnOnce() -> String) {
        self.core.faults().detail(&self.entry, detail);
    }
}

/// Runs `body` on the machine's thread.
fn call(name: &'static str, body: impl Fn(&CallContext<'_>) -> CudaResult<()>) -> CUresult {
    call_until(name, &|cx| Poll::Ready(body(cx)))
}

/// The code of a query of work that is not done.
const NOT_READY: CUresult = CUresult::CUDA_ERROR_NOT_READY;

/// Polls `body` on the machine's thread until it is ready.
fn call_until(
    name: &'static str,
    body: &dyn Fn(&CallContext<'_>) -> Poll<CudaResult<()>>,
) -> CUresult {
    let outcome = Client::with(|client| {
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
                _ => body(&CallContext { core, current, entry: *entry }),
            };
            // A host thread may wait in a loop of queries that return at once. Every 256th query in
            // vain therefore blocks until something happens, or until the GPUs can do no more
            // (`HostState`), so that the machine sees that the thread waits.
            let host = &core.gpus.host;
            let poll = match poll {
                Poll::Ready(Err(error)) if error.code == NOT_READY && host.is_paused() => {
                    Poll::Pending
                }
                poll => poll,
            };
            let outcome = match (poll, core.deadlock()) {
                (Poll::Pending, Some(report)) => {
                    Err(CudaError::new(CUresult::CUDA_ERROR_LAUNCH_TIMEOUT, report))
                }
                (Poll::Pending, None) => return Poll::Pending,
                (Poll::Ready(outcome), _) => outcome,
            };
            let code = outcome.as_ref().err().map_or(0, |error| error.code as i32);
            if code == NOT_READY as i32 {
                host.asked_in_vain();
            }
            core.faults().leave(entry, code);
            if let Some(Effect::Later(code)) = entry.effect {
                core.fail_with(error_of(code).into());
            }
            Poll::Ready(outcome)
        })
    });
    code_of(outcome.flatten())
}

/// Answers a query whose answer is constant for the life of the machine. `body` runs on the calling
/// thread, which needs no turn: it does not wait for the machine's baton, which one host thread has
/// at a time.
fn query(name: &'static str, body: impl Fn(&Simulation) -> CudaResult<()>) -> CUresult {
    let answer = Client::with(|client| {
        let Shared { faults, simulation, .. } = &**client.shared();
        if faults.injects_into(name) {
            // `call` injects the fault.
            return None;
        }
        let entry = faults.enter(name, client.gpu.get());
        let answer = body(simulation);
        faults.leave(&entry, answer.as_ref().err().map_or(0, |error| error.code as i32));
        Some(answer)
    });
    match answer.flatten() {
        None => call(name, |cx| body(cx.core.simulation())),
        answer => code_of(answer),
    }
}

/// Returns the code that a call returns; `None` if the machine has ended.
fn code_of(outcome: Option<CudaResult<()>>) -> CUresult {
    match outcome {
        None => CUresult::CUDA_ERROR_DEINITIALIZED,
        Some(Ok(())) => CUresult::CUDA_SUCCESS,
        Some(Err(error)) => {
            let code = error.code;
            names::set_last_error(error);
            code
        }
    }
}

/// Returns the driver error with the code of an injected fault.
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

/// The driver's function table.
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
    cuCtxSynchronize: stream::synchronize_all,
    cuMemGetInfo_v2: memory::info,
    cuMemAlloc_v2: memory::alloc,
    cuMemFree_v2: memory::free,
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
    cuStreamGetCaptureInfo_v3: graph::capture_info,
    cuUserObjectCreate: graph::create_user_object,
    cuUserObjectRelease: graph::release_user_object,
    cuGraphRetainUserObject: graph::retain_user_object,
    cuGraphGetNodes: graph::nodes,
    cuGraphInstantiateWithFlags: graph::instantiate,
    cuGraphLaunch: graph::launch,
    cuGraphDestroy: graph::destroy,
    cuGraphExecDestroy: graph::destroy_exec,
    cuModuleLoad: function::load_file,
    cuModuleLoadDataEx: function::load_data,
    cuModuleUnload: function::unload,
    cuModuleGetFunction: function::from_module,
    cuFuncLoad: function::load,
    cuFuncGetAttribute: function::attribute,
    cuFuncSetAttribute: function::set_attribute,
    cuOccupancyMaxActiveBlocksPerMultiprocessor: function::occupancy,
    cuOccupancyMaxActiveClusters: function::cluster_occupancy,
    cuLaunchKernelEx: function::launch,
};
