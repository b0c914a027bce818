//! Ways out of a kernel that does not come back by itself: it touched memory that is not there,
//! used up its stack, or computes for ever. It ends with a report instead of taking the process
//! with it.
//!
//! Process-wide signal handlers look at where the signal hit. On the stack of the simulated thread
//! that runs on this OS thread, they let the coroutine go on in a function that records the error
//! and returns. Faults anywhere else go to the handler that was there before. On machines other
//! than Linux on x86-64 and aarch64 there is none of this.
//!
//! # Safety
//!
//! The handlers read only cells of the current thread and its run (the argument of
//! [`hooks`](crate::hooks) holds: the context is a live thread's) and the kernel's signal frame.
//! The interrupted code is the kernel's own, so that it can be given up like the frames of an
//! abandoned thread: for a fault, because the simulator touches no memory that a kernel names while
//! it borrows a cell; for the watchdog, because it strikes after a long time of computing without a
//! call into the simulator.

use std::time::Duration;

use crate::gpus::Gpus;

#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod linux;

/// What a kernel may do without a call into the simulator once its time is over, in time of the
/// processor.
const PATIENCE: Duration = Duration::from_millis(250);

/// Processor time of this OS thread: other work on the machine does not count.
pub(crate) fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock writes to the struct; should it fail, no time passes.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Calls into the simulator so far: while it changes, the kernel can be stopped by itself.
fn activity(gpus: &Gpus) -> u64 {
    gpus.switches.get() + gpus.accesses.get() + gpus.calls.get()
}

/// Installs the handlers, once in a process.
pub(crate) fn install() {
    #[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
    linux::install();
}

/// Stops threads that compute on, without a call, behind a time limit. It lasts until it is
/// dropped.
pub(crate) struct Watchdog {
    #[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
    _timer: Option<linux::Timer>,
}

impl Watchdog {
    pub(crate) fn new(limit: Option<Duration>) -> Self {
        #[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
        return Self { _timer: limit.and_then(linux::Timer::new) };
        #[cfg(not(all(
            target_os = "linux",
            any(target_arch = "x86_64", target_arch = "aarch64")
        )))]
        {
            let _ = (limit, PATIENCE, activity);
            Self {}
        }
    }
}
