//! How a function of NCCL's asks the machine's thread, and how it refuses.

use std::cell::{Cell, RefCell};
use std::ffi::{CString, c_char, c_int};
use std::rc::Rc;
use std::task::Poll;

use devcomm_sys::driver::CUresult;
use devcomm_sys::nccl::{RawComm, SUCCESS};

use super::comm::Member;
use crate::driver;
use crate::machine::baton::{Client, ClientId};
use crate::machine::core::Core;
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

/// An error of NCCL's, and what there is to say about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) code: c_int,
    pub(crate) text: String,
}

impl Refusal {
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

impl From<driver::Refusal> for Refusal {
    fn from(refusal: driver::Refusal) -> Self {
        let text = refusal.text.unwrap_or_else(|| format!("{:?}", refusal.code));
        Self::new(UNHANDLED_CUDA_ERROR, text)
    }
}

pub(crate) type Refused<T> = Result<T, Refusal>;

/// How far a call has come when it has begun.
pub(super) enum Begun {
    /// It is over, with [`SUCCESS`], or goes on in the background
    /// ([`IN_PROGRESS`](devcomm_sys::nccl::IN_PROGRESS)).
    Done(c_int),
    Waits(Box<dyn Wait>),
}

/// What a call waits for.
pub(crate) trait Wait {
    /// The code, when it is there.
    fn poll(&mut self, core: &Core) -> Poll<Refused<c_int>>;

    /// It will not come.
    fn give_up(&mut self, _core: &Core, _why: &Refusal) {}
}

/// What a function may use.
pub(super) struct Ask<'a> {
    pub(super) core: &'a Core,
    pub(super) client: ClientId,
    /// The GPU whose context is current.
    current: Option<usize>,
    entry: Entry,
}

impl Ask<'_> {
    /// Has the record of the call say what it was called with.
    pub(super) fn note(&self, detail: impl FnOnce() -> String) {
        self.core.faults().detail(&self.entry, detail);
    }

    /// Whether the call is to give NULL.
    pub(super) fn gives_null(&self) -> bool {
        self.entry.effect == Some(Effect::Null)
    }

    /// The GPU whose context is current, which still works.
    pub(super) fn gpu(&self) -> Refused<usize> {
        self.core.check()?;
        let none = driver::Refusal::new(CUresult::CUDA_ERROR_INVALID_CONTEXT, "no current GPU");
        self.current.ok_or_else(|| none.into())
    }

    /// The communicator's end that a handle names.
    pub(super) fn member(&self, comm: RawComm) -> Refused<Rc<Member>> {
        if comm.is_null() {
            return Err(Refusal::argument("the communicator is NULL"));
        }
        let known = self.core.nccl.members.borrow().get(&(comm as u64)).cloned();
        known.ok_or_else(|| Refusal::argument("no communicator, or one that has ended"))
    }
}

/// Answers a question.
pub(super) fn question(
    name: &'static str,
    comm: RawComm,
    answer: impl FnOnce(&Ask<'_>) -> Refused<()>,
) -> c_int {
    make(name, comm, false, Box::new(|ask| answer(ask).map(|()| Begun::Done(SUCCESS))))
}

/// Makes a call that belongs to the group that is open: if it fails, so does the group.
pub(super) fn call(
    name: &'static str,
    comm: RawComm,
    begin: impl FnOnce(&Ask<'_>) -> Refused<Begun>,
) -> c_int {
    make(name, comm, true, Box::new(begin))
}

/// What a call begins with.
type Begin<'a> = dyn FnOnce(&Ask<'_>) -> Refused<Begun> + 'a;

/// Has the machine's thread begin a call, and waits for what it waits for.
fn make(name: &'static str, comm: RawComm, is_grouped: bool, begin: Box<Begin<'_>>) -> c_int {
    let answered = Client::with(|client| {
        let (current, client_id) = (client.gpu.get(), client.id());
        let mut begin = Some(begin);
        let entry = Cell::new(None);
        client.call(name, |core, _| {
            let entered = entry.get().unwrap_or_else(|| {
                let member = core.nccl.members.borrow().get(&(comm as u64)).cloned();
                let gpu = member.map(|member| member.gpu).or(current);
                core.faults().enter(name, gpu)
            });
            entry.set(Some(entered));
            let polled = match entered.effect {
                Some(Effect::Fail(code)) => {
                    Poll::Ready(Err(Refusal::new(code, "it fails on request")))
                }
                Some(Effect::Hang) if core.faults().is_released(&entered) => {
                    Poll::Ready(Err(Refusal::new(INTERNAL_ERROR, "a communicator was aborted")))
                }
                Some(Effect::Hang) => Poll::Pending,
                _ => match begin.take() {
                    Some(begin) => {
                        let ask = Ask { core, client: client_id, current, entry: entered };
                        core.nccl.begun(core, client_id, begin(&ask))
                    }
                    None => core.nccl.poll_wait(core, client_id),
                },
            };
            let answered = match (polled, core.deadlock()) {
                (Poll::Ready(answered), _) => answered,
                (Poll::Pending, None) => return Poll::Pending,
                (Poll::Pending, Some(report)) => {
                    let why = Refusal::new(SYSTEM_ERROR, report);
                    core.nccl.give_up(core, client_id, &why);
                    Err(why)
                }
            };
            let code = answered.as_ref().map_or_else(|refusal| refusal.code, |code| *code);
            core.faults().leave(&entered, code);
            match (&answered, entered.effect) {
                (Err(refusal), _) if is_grouped => core.nccl.spoil_group(client_id, refusal),
                (Ok(_), Some(Effect::Later(code))) => core.nccl.fail_later(comm, code, name),
                _ => {}
            }
            Poll::Ready(answered)
        })
    });
    match answered.flatten() {
        Some(Ok(code)) => code,
        Some(Err(refusal)) => refuse(name, refusal),
        None => {
            let text = "the calling thread uses no simulated machine, or one that is gone";
            refuse(name, Refusal::new(UNHANDLED_CUDA_ERROR, text))
        }
    }
}

thread_local! {
    /// What `ncclGetLastError` tells this thread.
    static LAST: RefCell<CString> = RefCell::default();
}

/// Keeps the text for `ncclGetLastError`, and gives the code.
pub(super) fn refuse(name: &str, refusal: Refusal) -> c_int {
    remember(&format!("{name}: {}", refusal.text));
    refusal.code
}

/// The thread's last error is now this one. Gives the text, which is there until the next one.
pub(super) fn remember(text: &str) -> *const c_char {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    let _ = LAST.try_with(|last| last.replace(text));
    last_error()
}

/// The text of the thread's last error, empty if there was none.
pub(super) fn last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}
