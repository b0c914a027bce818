//! The signal handlers and the watchdog's timer. The parent module explains why they are safe.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::time::Duration;

use corosensei::trap::TrapHandlerRegs;
use cuda_std::arch::CTX;
use libc::{SIGBUS, SIGSEGV, sigaction, siginfo_t, timer_t, ucontext_t};

use super::{GRACE_PERIOD, PATIENCE, activity, silent_checks};
use crate::base::error::Error;
use crate::gpu::nccl;
use crate::gpu::thread::{Thread, Wait};

const FAULTS: [c_int; 2] = [SIGSEGV, SIGBUS];

/// The previous handlers, in the order of [`FAULTS`].
static BEFORE: OnceLock<[sigaction; 2]> = OnceLock::new();

/// `si_code` of a fault without an address, as x86 reports for a non-canonical address.
const SI_KERNEL: c_int = 0x80;

type Handler = unsafe extern "C" fn(c_int, *mut siginfo_t, *mut c_void);

/// Returns the watchdog's signal: one of the last real-time signals, since libraries use the first
/// few.
fn tick_signal() -> c_int {
    libc::SIGRTMAX() - 5
}

pub(crate) fn install() {
    BEFORE.get_or_init(|| {
        handle(tick_signal(), on_tick);
        FAULTS.map(|signal| handle(signal, on_fault))
    });
}

/// Installs a handler; returns the previous one.
fn handle(signal: c_int, handler: Handler) -> sigaction {
    let mut before = MaybeUninit::<sigaction>::zeroed();
    // SAFETY: all zero is a valid action; the handlers are async-signal-safe. If the call fails,
    // `before` stays zero, the default action.
    unsafe {
        let mut action = MaybeUninit::<sigaction>::zeroed().assume_init();
        action.sa_sigaction = handler as *const () as usize;
        // The handler runs on the alternate signal stack that Rust sets up per thread, since a
        // coroutine's stack may be full.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        libc::sigaction(signal, &action, before.as_mut_ptr());
        before.assume_init()
    }
}

/// Resumes the interrupted simulated thread in `instead`; returns whether there is one.
fn leave_kernel(context: &mut ucontext_t, instead: impl FnOnce() + 'static) -> bool {
    if CTX.get().is_null() {
        return false;
    }
    let trap = Thread::current().trap.get();
    match trap.filter(|trap| trap.stack_ptr_in_bounds(stack_pointer(context))) {
        Some(trap) => {
            // SAFETY: the signal occurred on this coroutine's stack, as checked; `resume_at` sets
            // the registers as returned.
            resume_at(context, unsafe { trap.setup_trap_handler(instead) });
            true
        }
        None => false,
    }
}

unsafe extern "C" fn on_fault(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the system passes both to a handler with SA_SIGINFO, and SIGSEGV and SIGBUS carry an
    // address.
    let (code, address, context) =
        unsafe { ((*info).si_code, (*info).si_addr().addr(), &mut *context.cast::<ucontext_t>()) };
    let address = (code != SI_KERNEL).then_some(address);
    if leave_kernel(context, move || faulted(address)) {
        return;
    }
    let which = FAULTS.iter().position(|s| *s == signal);
    if let (Some(before), Some(which)) = (BEFORE.get(), which) {
        // SAFETY: the system has returned this action. When this handler returns, the access faults
        // again, and the previous handler runs.
        unsafe { libc::sigaction(signal, &before[which], std::ptr::null_mut()) };
    }
}

/// Runs on the faulting thread's stack instead of its kernel.
fn faulted(address: Option<usize>) {
    let thread = Thread::current();
    if address.is_some_and(|address| thread.in_guard(address)) {
        return thread.gpus().fail(thread.overflow_error());
    }
    let where_to = match address {
        Some(address) => format!("{address:#x}, {}", nccl::describe(thread, address)),
        None => "a non-canonical address, such as one of a rank outside the LSA team".into(),
    };
    let (gpus, kernel, thread) = (thread.gpus(), thread.kernel(), thread.id());
    gpus.fail(Error::Fault { kernel, thread, address, where_to });
}

unsafe extern "C" fn on_tick(_: c_int, _: *mut siginfo_t, context: *mut c_void) {
    if CTX.get().is_null() {
        return;
    }
    let gpus = Thread::current().gpus();
    let now = activity(gpus);
    let silent = if gpus.last_activity.replace(now) == now { gpus.silent.get() + 1 } else { 0 };
    gpus.silent.set(silent);
    if silent >= silent_checks(gpus) {
        // SAFETY: the system passes the context to a handler with SA_SIGINFO.
        leave_kernel(unsafe { &mut *context.cast() }, interrupted);
    }
}

/// Runs on the interrupted thread's stack instead of its kernel.
fn interrupted() {
    let thread = Thread::current();
    thread.wait.set(Wait::Running);
    thread.gpus().interrupted.set(true);
}

/// A timer that signals when the calling thread has used some processor time, and then at
/// intervals.
pub(crate) struct Timer(timer_t);

impl Timer {
    pub(crate) fn new(limit: Duration) -> Option<Self> {
        let first = if limit < PATIENCE { limit.max(GRACE_PERIOD) } else { GRACE_PERIOD };
        let mut timer = MaybeUninit::<timer_t>::uninit();
        // SAFETY: all zero is a valid event. The timer counts this thread's processor time and
        // signals this thread.
        let timer = unsafe {
            let mut event = MaybeUninit::<libc::sigevent>::zeroed().assume_init();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = tick_signal();
            event.sigev_notify_thread_id = libc::gettid();
            let clock = libc::CLOCK_THREAD_CPUTIME_ID;
            if libc::timer_create(clock, &mut event, timer.as_mut_ptr()) != 0 {
                return None;
            }
            Self(timer.assume_init())
        };
        let times =
            libc::itimerspec { it_value: timespec(first), it_interval: timespec(GRACE_PERIOD) };
        // SAFETY: this object owns the timer. If setting it fails, there is no watchdog.
        unsafe { libc::timer_settime(timer.0, 0, &times, std::ptr::null_mut()) };
        Some(timer)
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        // SAFETY: this object owns the timer. A pending signal finds no simulated thread.
        unsafe { libc::timer_delete(self.0) };
    }
}

fn timespec(time: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: time.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: time.subsec_nanos().into(),
    }
}

#[cfg(target_arch = "x86_64")]
fn stack_pointer(context: &ucontext_t) -> usize {
    context.uc_mcontext.gregs[libc::REG_RSP as usize] as usize
}

#[cfg(target_arch = "x86_64")]
fn resume_at(context: &mut ucontext_t, registers: TrapHandlerRegs) {
    let TrapHandlerRegs { rip, rsp, rbp, rdi, rsi } = registers;
    let values = [
        (libc::REG_RIP, rip),
        (libc::REG_RSP, rsp),
        (libc::REG_RBP, rbp),
        (libc::REG_RDI, rdi),
        (libc::REG_RSI, rsi),
    ];
    for (register, value) in values {
        context.uc_mcontext.gregs[register as usize] = value as i64;
    }
}

#[cfg(target_arch = "aarch64")]
fn stack_pointer(context: &ucontext_t) -> usize {
    context.uc_mcontext.sp as usize
}

#[cfg(target_arch = "aarch64")]
fn resume_at(context: &mut ucontext_t, registers: TrapHandlerRegs) {
    let TrapHandlerRegs { pc, sp, x0, x1, x29, lr } = registers;
    context.uc_mcontext.pc = pc;
    context.uc_mcontext.sp = sp;
    for (register, value) in [(0, x0), (1, x1), (29, x29), (30, lr)] {
        context.uc_mcontext.regs[register] = value;
    }
}
