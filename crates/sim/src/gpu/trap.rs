//! Turns an invalid memory access, a stack overflow or an endless computation of a kernel into an
//! error, instead of ending the process.
//!
//! Process-wide signal handlers check where the signal occurred. On the stack of a simulated
//! thread, they resume the coroutine in a function that records the error and returns. Other faults
//! go to the previous handler. The handlers exist only on Linux on x86-64 and aarch64.
//!
//! # Safety
//!
//! The handlers read only cells of the current thread and its GPUs (the context is a live thread's,
//! as [`hooks`](crate::gpu::hooks) explains) and the signal frame. They interrupt kernel code,
//! whose frames can be abandoned like those of an unfinished thread: for a fault, because the
//! simulator accesses no memory for a kernel while it borrows a cell; for the watchdog, because it
//! acts only after a long computation without a call into the simulator.

use std::time::Duration;

use crate::gpu::gpus::Gpus;

#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod linux;

/// The processor time after which a kernel that has made no call into the simulator is stopped.
pub(crate) const PATIENCE: Duration = Duration::from_secs(3);
/// The time between two checks; also the patience after a time limit below [`PATIENCE`].
const GRACE_PERIOD: Duration = Duration::from_millis(250);

/// Returns the number of consecutive checks without a call after which a kernel is stopped.
fn silent_checks(gpus: &Gpus) -> u32 {
    match gpus.settings.time_limit {
        Some(limit) if limit < PATIENCE => 1,
        _ => (PATIENCE.as_millis() / GRACE_PERIOD.as_millis()) as u32,
    }
}

/// Returns the processor time of this OS thread.
pub(crate) fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes to the struct; if it fails, the time is zero.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns the number of calls into the simulator. While it changes, the scheduler checks the
/// limits itself.
fn activity(gpus: &Gpus) -> u64 {
    gpus.switches.get() + gpus.accesses.get() + gpus.calls.get()
}

/// Installs the handlers, once per process.
pub(crate) fn install() {
    #[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
    linux::install();
}

/// Stops threads that compute for long, or past a time limit, without calls. Active until dropped.
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
            let _ = (limit, PATIENCE, GRACE_PERIOD, activity, silent_checks);
            Self {}
        }
    }
}
