//! Finalizes, destroys, aborts, revokes, suspends and resumes communicators; reports their errors.

use std::ffi::{c_char, c_int};
use std::rc::Rc;
use std::task::Poll;

use devcomm_sys::nccl::{IN_PROGRESS, RawComm, SUCCESS};

use super::call::{
    CallContext, CallProgress, NcclError, NcclResult, PendingCall, call, last_error, run,
    set_last_error,
};
use super::comm::{Lifecycle, RankComm};
use crate::machine::core::Core;

/// NCCL: `NCCL_SUSPEND_MEM`.
const SUSPEND_MEM: c_int = 1;

/// A query of a communicator that is in progress: a thread that asks again and again waits.
struct VainQuery;

impl PendingCall for VainQuery {
    fn poll(&mut self, core: &Core) -> Poll<NcclResult<c_int>> {
        let host = &core.gpus.host;
        if host.is_paused() {
            return Poll::Pending;
        }
        host.asked_in_vain();
        Poll::Ready(Ok(SUCCESS))
    }
}

/// Waits until a rank's operations are complete.
struct Drain {
    rank_comm: Rc<RankComm>,
    /// Whether to destroy the communicator afterwards.
    destroys: bool,
}

impl PendingCall for Drain {
    fn poll(&mut self, core: &Core) -> Poll<NcclResult<c_int>> {
        if core.check().is_ok()
            && (self.rank_comm.is_running() || self.destroys && self.has_kernels(core))
        {
            return Poll::Pending;
        }
        if self.destroys {
            self.rank_comm.end(core);
            return Poll::Ready(Ok(SUCCESS));
        }
        Poll::Ready(Ok(self.rank_comm.code()))
    }
}

impl Drain {
    /// Returns whether kernels run on the rank's GPU: they may use the communicator until they end.
    fn has_kernels(&self, core: &Core) -> bool {
        let streams = core.streams.borrow();
        let own = streams.values().filter(|stream| stream.gpu() == self.rank_comm.gpu);
        own.into_iter().any(|stream| stream.runs_kernel())
    }
}

/// Finalizes the communicator; if it is blocking, waits for the rank's operations.
pub(super) unsafe extern "C" fn finalize(comm: RawComm) -> c_int {
    call("ncclCommFinalize", comm, |cx| {
        let rank_comm = cx.live(comm)?;
        rank_comm.life.set(Lifecycle::Finalized);
        if !rank_comm.settings.blocking {
            return Ok(CallProgress::Done(rank_comm.code()));
        }
        Ok(CallProgress::Waits(Box::new(Drain { rank_comm, destroys: false })))
    })
}

/// Destroys the communicator. Does not wait for other ranks.
pub(super) unsafe extern "C" fn destroy(comm: RawComm) -> c_int {
    call("ncclCommDestroy", comm, |cx| {
        let rank_comm = cx.rank_comm(comm)?;
        Ok(CallProgress::Waits(Box::new(Drain { rank_comm, destroys: true })))
    })
}

/// Cancels the rank's operations and waits for kernels to end. Other ranks are not notified.
pub(super) unsafe extern "C" fn abort(comm: RawComm) -> c_int {
    call("ncclCommAbort", comm, |cx| {
        let rank_comm = cx.rank_comm(comm)?;
        rank_comm.end(cx.core);
        cx.core.faults().release(rank_comm.gpu);
        Ok(CallProgress::Waits(Box::new(Drain { rank_comm, destroys: true })))
    })
}

/// Cancels operations and calls in progress; the communicator can still be split and shrunk.
pub(super) unsafe extern "C" fn revoke(comm: RawComm, flags: c_int) -> c_int {
    call("ncclCommRevoke", comm, |cx| {
        cx.note(|| format!("flags {flags}"));
        let rank_comm = cx.rank_comm(comm)?;
        if flags != 0 {
            return Err(NcclError::argument(format!("flags {flags}")));
        }
        let life = rank_comm.life.replace(Lifecycle::Revoked);
        if life != Lifecycle::Live {
            rank_comm.life.set(life);
            return Err(NcclError::usage(format!("the communicator is {life:?}").to_lowercase()));
        }
        rank_comm.stop(cx.core, "the communicator was revoked during the call");
        cx.core.faults().release(rank_comm.gpu);
        Ok(CallProgress::Done(rank_comm.code()))
    })
}

pub(super) unsafe extern "C" fn suspend(comm: RawComm, flags: c_int) -> c_int {
    call("ncclCommSuspend", comm, |cx| {
        cx.note(|| format!("flags {flags}"));
        let rank_comm = cx.live(comm)?;
        if flags != SUSPEND_MEM {
            return Err(NcclError::argument(format!("flags {flags}")));
        }
        if rank_comm.is_running() {
            return Err(NcclError::usage("the communicator still has operations on streams"));
        }
        rank_comm.is_suspended.set(true);
        Ok(CallProgress::Done(rank_comm.code()))
    })
}

pub(super) unsafe extern "C" fn resume(comm: RawComm) -> c_int {
    call("ncclCommResume", comm, |cx| {
        let rank_comm = cx.ready(comm)?;
        if !rank_comm.is_suspended.replace(false) {
            return Err(NcclError::usage("the communicator is not suspended"));
        }
        Ok(CallProgress::Done(rank_comm.code()))
    })
}

pub(super) unsafe extern "C" fn async_error(comm: RawComm, state: *mut c_int) -> c_int {
    let mut text = None;
    let begin = |cx: &CallContext<'_>| {
        let rank_comm = cx.rank_comm(comm)?;
        let broken = cx.core.check().err().map(NcclError::from);
        let code = broken.as_ref().map_or_else(|| rank_comm.status(cx.core), |error| error.code);
        text = broken.as_ref().or(rank_comm.error.borrow().as_ref()).map(|e| e.text.clone());
        // SAFETY: the program passes a valid out pointer, as NCCL requires.
        unsafe { state.write(code) };
        Ok(match code {
            IN_PROGRESS => CallProgress::Waits(Box::new(VainQuery)),
            _ => CallProgress::Done(SUCCESS),
        })
    };
    let returned = run("ncclCommGetAsyncError", comm, false, Box::new(begin));
    if let Some(text) = text {
        set_last_error(&text);
    }
    returned
}

/// Returns the communicator's asynchronous error, if any; else the calling thread's last error.
pub(super) unsafe extern "C" fn last(comm: RawComm) -> *const c_char {
    use crate::machine::baton::Client;
    let of_comm = Client::with(|client| {
        client.call("ncclGetLastError", |core, _| {
            let rank_comms = core.nccl.rank_comms.borrow();
            let rank_comm = rank_comms.get(&(comm as u64));
            Poll::Ready(rank_comm.and_then(|c| Some(c.error.borrow().as_ref()?.text.clone())))
        })
    });
    match of_comm.flatten().flatten() {
        Some(text) => set_last_error(&text),
        None => last_error(),
    }
}
