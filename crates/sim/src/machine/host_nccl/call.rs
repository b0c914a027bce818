//! Runs NCCL's host functions on the simulated machine's thread, and records their errors.

use std::cell::{Cell, RefCell};
use std::ffi::{CString, c_char, c_int};
use std::rc::Rc;
use std::task::Poll;

use devcomm_sys::driver::CUresult;
use devcomm_sys::nccl::{RawComm, SUCCESS};

use super::comm::RankComm;
use crate::base::ids::ClientId;
use crate::machine::baton::Client;
use crate::machine::core::Core;
use crate::machine::driver;
use crate::machine::fault::{Effect, Entry};

/// NCCL: `ncclUnhandledCudaError`.
pub(super) const UNHANDLED_CUDA_ERROR: c_int = 1;
/// NCCL: `ncclSystemError`.
pub(super) const SYSTEM_ERROR: c_int = 2;
/// NCCL: `ncclInternalError`.
pub(super) const INTERNAL_ERROR: c_int = 3;
/// NCCL: `ncclInvalidArgument`.
pub(super) const INVALID_ARGUMENT: c_int = 4;
/// NCCL: `ncclInvalidUsage`.
pub(super) const INVALID_USAGE: c_int = 5;

/// An NCCL error, with its message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NcclError {
    pub(crate) code: c_int,
    pub(crate) text: String,
}

impl NcclError {
    pub(super) fn new(code: c_int, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }

    pub(super) fn argument(text: impl Into<String>) -> Self {
        Self::new(INVALID_ARGUMENT, text)
    }

    pub(super) fn usage(text: impl Into<String>) -> Self {
        Self::new(INVALID_USAGE, text)
    }
}

impl From<driver::CudaError> for NcclError {
    fn from(error: driver::CudaError) -> Self {
        let text = error.text.unwrap_or_else(|| format!("{:?}", error.code));
        Self::new(UNHANDLED_CUDA_ERROR, text)
    }
}

pub(crate) type NcclResult<T> = Result<T, NcclError>;

/// The state of a call after it has begun.
pub(super) enum CallProgress {
    /// The call returns [`SUCCESS`], or [`IN_PROGRESS`](devcomm_sys::nccl::IN_PROGRESS) if it
    /// continues in the background.
    Done(c_int),
    Waits(Box<dyn PendingCall>),
}

/// A call that has not completed.
pub(crate) trait PendingCall {
    /// Returns the call's result, once it is known.
    fn poll(&mut self, core: &Core) -> Poll<NcclResult<c_int>>;

    /// Abandons the call.
    fn cancel(&mut self, _core: &Core, _why: &NcclError) {}
}

/// The machine's state and the calling thread's context, for the closure of an NCCL call.
pub(super) struct CallContext<'a> {
    pub(super) core: &'a Core,
    pub(super) client: ClientId,
    /// The GPU whose context is current.
    current: Option<usize>,
    entry: Entry,
}

impl CallContext<'_> {
    /// Adds the arguments to the call's entry in the record of calls.
    pub(super) fn note(&self, detail: impl FnOnce() -> String) {
        self.core.faults().detail(&self.entry, detail);
    }

    /// Returns whether an injected fault makes the call return NULL.
    pub(super) fn injects_null(&self) -> bool {
        self.entry.effect == Some(Effect::Null)
    }

    /// Returns the GPU whose context is current; an error if a kernel has failed.
    pub(super) fn gpu(&self) -> NcclResult<usize> {
        self.core.check()?;
        let none = driver::CudaError::new(CUresult::CUDA_ERROR_INVALID_CONTEXT, "no current GPU");
        self.current.ok_or_else(|| none.into())
    }

    /// Returns the rank's communicator with this handle.
    pub(super) fn rank_comm(&self, comm: RawComm) -> NcclResult<Rc<RankComm>> {
        if comm.is_null() {
            return Err(NcclError::argument("the communicator is NULL"));
        }
        let known = self.core.nccl.rank_comms.borrow().get(&(comm as u64)).cloned();
        known.ok_or_else(|| NcclError::argument("not a communicator, or one that was destroyed"))
    }
}

/// Runs a call that is not part of a group.
pub(super) fn call_ungrouped(
    name: &'static str,
    comm: RawComm,
    body: impl FnOnce(&CallContext<'_>) -> NcclResult<()>,
) -> c_int {
    run(name, comm, false, Box::new(|cx| body(cx).map(|()| CallProgress::Done(SUCCESS))))
}

/// Runs a call that is part of the open group, if any: an error fails the group.
pub(super) fn call(
    name: &'static str,
    comm: RawComm,
    begin: impl FnOnce(&CallContext<'_>) -> NcclResult<CallProgress>,
) -> c_int {
    run(name, comm, true, Box::new(begin))
}

/// The closure that begins a call.
type Begin<'a> = dyn FnOnce(&CallContext<'_>) -> NcclResult<CallProgress> + 'a;

/// Runs a call on the machine's thread, and waits for its result.
pub(super) fn run(
    name: &'static str,
    comm: RawComm,
    is_grouped: bool,
    begin: Box<Begin<'_>>,
) -> c_int {
    let outcome = Client::with(|client| {
        let (current, client_id) = (client.gpu.get(), client.id());
        let mut begin = Some(begin);
        let entered = Cell::new(None);
        client.call(name, |core, _| {
            let entry = entered.get().unwrap_or_else(|| {
                let rank_comm = core.nccl.rank_comms.borrow().get(&(comm as u64)).cloned();
                let gpu = rank_comm.map(|rank_comm| rank_comm.gpu).or(current);
                core.faults().enter(name, gpu)
            });
            entered.set(Some(entry));
            let polled = match entry.effect {
                Some(Effect::Fail(code)) => {
                    Poll::Ready(Err(NcclError::new(code, "injected fault")))
                }
                Some(Effect::Hang) if core.faults().is_released(&entry) => {
                    Poll::Ready(Err(NcclError::new(INTERNAL_ERROR, "a communicator was aborted")))
                }
                Some(Effect::Hang) => Poll::Pending,
                _ => match begin.take() {
                    Some(begin) => {
                        let cx = CallContext { core, client: client_id, current, entry };
                        core.nccl.register_call(core, client_id, begin(&cx))
                    }
                    None => core.nccl.poll_wait(core, client_id),
                },
            };
            let outcome = match (polled, core.deadlock()) {
                (Poll::Ready(outcome), _) => outcome,
                (Poll::Pending, None) => return Poll::Pending,
                (Poll::Pending, Some(report)) => {
                    let why = NcclError::new(SYSTEM_ERROR, report);
                    core.nccl.cancel(core, client_id, &why);
                    Err(why)
                }
            };
            let code = outcome.as_ref().map_or_else(|error| error.code, |code| *code);
            core.faults().leave(&entry, code);
            match (&outcome, entry.effect) {
                (Err(error), _) if is_grouped => core.nccl.fail_group(client_id, error),
                (Ok(_), Some(Effect::Later(code))) => core.nccl.fail_later(core, comm, code, name),
                _ => {}
            }
            Poll::Ready(outcome)
        })
    });
    match outcome.flatten() {
        Some(Ok(code)) => code,
        Some(Err(error)) => record_error(name, error),
        None => {
            let text = "the calling thread is attached to no simulated machine, or to one that \
                       has ended";
            record_error(name, NcclError::new(UNHANDLED_CUDA_ERROR, text))
        }
    }
}

thread_local! {
    /// The calling thread's message for `ncclGetLastError`.
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Sets the message for `ncclGetLastError` and returns the error's code.
pub(super) fn record_error(name: &str, error: NcclError) -> c_int {
    set_last_error(&format!("{name}: {}", error.text));
    error.code
}

/// Sets the thread's last error message, valid until the next one.
pub(super) fn set_last_error(text: &str) -> *const c_char {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    let _ = LAST_ERROR.try_with(|last| last.replace(text));
    last_error()
}

/// Returns the thread's last error message, empty if there is none.
pub(super) fn last_error() -> *const c_char {
    LAST_ERROR.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}
