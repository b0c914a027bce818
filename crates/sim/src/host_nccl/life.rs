//! The end of communicators, and pauses.

use std::ffi::{c_char, c_int};
use std::rc::Rc;
use std::task::Poll;

use devcomm_sys::nccl::{RawComm, SUCCESS};

use super::call::{Begun, Refusal, Refused, Wait, call, last_error, question, remember};
use super::comm::{Life, Member};
use crate::machine::core::Core;

/// NCCL: `NCCL_SUSPEND_MEM`.
const MEMORY: c_int = 1;

/// Waits until a rank's operations are done.
struct Quiet {
    member: Rc<Member>,
    /// Whether the communicator ends then.
    ends: bool,
}

impl Wait for Quiet {
    fn poll(&mut self, core: &Core) -> Poll<Refused<c_int>> {
        if core.check().is_ok() && (self.member.is_running() || self.ends && self.has_kernels(core))
        {
            return Poll::Pending;
        }
        if self.ends {
            self.member.end(core);
            return Poll::Ready(Ok(SUCCESS));
        }
        Poll::Ready(Ok(self.member.code()))
    }
}

impl Quiet {
    /// Whether kernels run on the rank's GPU: what a communicator has there is freed when none do.
    fn has_kernels(&self, core: &Core) -> bool {
        let streams = core.streams.borrow();
        let own = streams.values().filter(|stream| stream.gpu() == self.member.gpu);
        own.into_iter().any(|stream| stream.runs_kernel())
    }
}

/// What the rank has launched is done before it returns.
pub(super) unsafe extern "C" fn finalize(comm: RawComm) -> c_int {
    call("ncclCommFinalize", comm, |ask| {
        let member = ask.live(comm)?;
        member.life.set(Life::Finalized);
        if !member.settings.blocking {
            return Ok(Begun::Done(member.code()));
        }
        Ok(Begun::Waits(Box::new(Quiet { member, ends: false })))
    })
}

/// Does not wait for other ranks.
pub(super) unsafe extern "C" fn destroy(comm: RawComm) -> c_int {
    call("ncclCommDestroy", comm, |ask| {
        let member = ask.member(comm)?;
        Ok(Begun::Waits(Box::new(Quiet { member, ends: true })))
    })
}

/// Ends what the rank waits for, too, but no kernels, for which it waits. The other ranks hear
/// nothing of it.
pub(super) unsafe extern "C" fn abort(comm: RawComm) -> c_int {
    call("ncclCommAbort", comm, |ask| {
        let member = ask.member(comm)?;
        member.end(ask.core);
        ask.core.faults().release(member.gpu);
        Ok(Begun::Waits(Box::new(Quiet { member, ends: true })))
    })
}

/// Ends what is under way; the communicator can still be split and shrunk.
pub(super) unsafe extern "C" fn revoke(comm: RawComm, flags: c_int) -> c_int {
    call("ncclCommRevoke", comm, |ask| {
        ask.note(|| format!("flags {flags}"));
        let member = ask.live(comm)?;
        if flags != 0 {
            return Err(Refusal::argument(format!("flags {flags}")));
        }
        member.life.set(Life::Revoked);
        member.cut();
        Ok(Begun::Done(member.code()))
    })
}

pub(super) unsafe extern "C" fn suspend(comm: RawComm, flags: c_int) -> c_int {
    call("ncclCommSuspend", comm, |ask| {
        ask.note(|| format!("flags {flags}"));
        let member = ask.live(comm)?;
        if flags != MEMORY {
            return Err(Refusal::argument(format!("flags {flags}")));
        }
        if member.is_running() {
            return Err(Refusal::usage("streams still have operations of the communicator"));
        }
        member.is_suspended.set(true);
        Ok(Begun::Done(member.code()))
    })
}

pub(super) unsafe extern "C" fn resume(comm: RawComm) -> c_int {
    call("ncclCommResume", comm, |ask| {
        let member = ask.ready(comm)?;
        if !member.is_suspended.replace(false) {
            return Err(Refusal::usage("the communicator is not suspended"));
        }
        Ok(Begun::Done(member.code()))
    })
}

pub(super) unsafe extern "C" fn async_error(comm: RawComm, state: *mut c_int) -> c_int {
    question("ncclCommGetAsyncError", comm, |ask| {
        let member = ask.member(comm)?;
        let broken = ask.core.check().err().map(|refusal| Refusal::from(refusal).code);
        // SAFETY: the module's.
        unsafe { state.write(broken.unwrap_or_else(|| member.status(ask.core))) };
        Ok(())
    })
}

/// What failed in the background on a communicator, if something did; else what the calling thread
/// was refused last.
pub(super) unsafe extern "C" fn last(comm: RawComm) -> *const c_char {
    use crate::machine::baton::Client;
    let of_comm = Client::with(|client| {
        client.call("ncclGetLastError", |core, _| {
            let members = core.nccl.members.borrow();
            let member = members.get(&(comm as u64));
            Poll::Ready(member.and_then(|m| Some(m.error.borrow().as_ref()?.text.clone())))
        })
    });
    match of_comm.flatten().flatten() {
        Some(text) => remember(&text),
        None => last_error(),
    }
}
