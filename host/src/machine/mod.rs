//! The machine that the crate runs on: real GPUs, or the simulator.
//!
//! It provides the two tables of C functions that [`sys`](crate::sys) calls (driver and NCCL), and
//! clocks, sleeps, threads and waits. With real GPUs, these are the operating system's. A simulated
//! machine runs one host thread at a time and has a virtual clock: a thread that blocks in the
//! operating system, not in the machine's functions, stops all others.

mod call_lock;
mod interrupt;
mod shared;
#[cfg(feature = "simulator")]
mod simulated;
mod threads;
pub(crate) mod variables;

use std::cell::RefCell;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

#[cfg(feature = "simulator")]
use devcomm_sim::EventCount;
use devcomm_sys::driver::{CUDA, CUfunction, CUmodule, CUstream, Driver};
use devcomm_sys::nccl::Functions;
use devcomm_types::HostBody;

pub(crate) use self::call_lock::{CallLock, Held};
pub use self::interrupt::interruptible;
pub(crate) use self::interrupt::uninterrupted;
pub(crate) use self::interrupt::{check as check_interrupt, interval as interrupt_interval};
pub(crate) use self::shared::Shared;
#[cfg(feature = "simulator")]
use self::simulated::Simulated;
pub(crate) use self::threads::{message, start_thread};
use crate::error::{DriverError, Result, StateError};

/// The environment variable that selects the simulator: `4`, or `4,team=2,seed=7`.
pub(crate) const VARIABLE: &str = "DEVCOMM_SIMULATE";

/// A poll that notices its deadline at least this much too late was itself stopped, with its
/// process or thread: its time begins again.
const STOPPED: Duration = Duration::from_secs(1);

/// What wakes a poll on a simulated machine. With real GPUs, a poll repeats after a pause.
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "simulator"), expect(dead_code, reason = "read by the simulator only"))]
pub(crate) enum Wakes {
    /// Any event.
    Anything,
    /// A [notification](Machine::notify) by another thread.
    Notified,
    /// A notification, or an event after which this stream of the current context is idle.
    Idle(CUstream),
}

/// Replaces the simulator's count of events.
#[cfg(not(feature = "simulator"))]
#[derive(Clone, Copy, Default)]
struct EventCount;

/// A machine. Clones are the same one.
#[derive(Clone)]
pub(crate) enum Machine {
    /// The GPUs that the driver shows to this process.
    Gpus,
    #[cfg(feature = "simulator")]
    Simulated(Simulated),
}

/// An operation of the calling thread that a simulated machine's reports of deadlocks name until
/// this is dropped.
pub(crate) struct NamedOperation {
    /// The operation before it; `None` on a thread that no machine simulates.
    #[cfg(feature = "simulator")]
    before: Option<Option<std::sync::Arc<str>>>,
}

impl NamedOperation {
    #[cfg_attr(not(feature = "simulator"), expect(unused_variables, reason = "for reports"))]
    pub(crate) fn begin(operation: &impl std::fmt::Display) -> Self {
        Self {
            #[cfg(feature = "simulator")]
            before: devcomm_sim::Machine::is_attached()
                .then(|| devcomm_sim::Machine::set_operation(Some(operation.to_string().into()))),
        }
    }
}

#[cfg(feature = "simulator")]
impl Drop for NamedOperation {
    fn drop(&mut self) {
        if let Some(before) = self.before.take() {
            devcomm_sim::Machine::set_operation(before);
        }
    }
}

thread_local! {
    /// The machine of the world that this thread is a rank of.
    static CURRENT: RefCell<Option<Machine>> = const { RefCell::new(None) };
}

impl Machine {
    /// Returns the calling thread's machine: that of the world that it is a rank of, or else the
    /// one that the environment selects.
    ///
    /// # Errors
    ///
    /// [`WorldError::Environment`](crate::WorldError::Environment).
    pub(crate) fn current() -> Result<Self> {
        CURRENT.with_borrow(|current| match current {
            Some(machine) => Ok(machine.clone()),
            None => Ok(Self::from_env(None)?.unwrap_or(Self::Gpus)),
        })
    }

    /// Returns the simulated machine that the environment selects, one per process. The first
    /// call's `team` is the size of its LSA teams.
    ///
    /// # Errors
    ///
    /// [`WorldError::Environment`](crate::WorldError::Environment) for an invalid value.
    #[cfg(feature = "simulator")]
    pub(crate) fn from_env(team: Option<usize>) -> Result<Option<Self>> {
        Ok(simulated::from_env(team)?.map(Self::Simulated))
    }

    /// Returns a new simulated machine.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for invalid settings.
    #[cfg(feature = "simulator")]
    pub(crate) fn simulate(
        simulation: &devcomm_sim::Simulation,
        team: Option<usize>,
    ) -> Result<Self> {
        Simulated::new(simulation, team).map(Self::Simulated)
    }

    /// Returns `None`, in a program without the simulator; fails if the variable is set.
    #[cfg(not(feature = "simulator"))]
    pub(crate) fn from_env(_: Option<usize>) -> Result<Option<Self>> {
        match std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
            None => Ok(None),
            Some(value) => {
                let why = "this program was built without the simulator; unset it, or build with \
                           the feature `simulator`";
                let value = Some(value.to_string_lossy().into_owned());
                let why = why.to_owned();
                Err(crate::error::WorldError::Environment { variable: VARIABLE, value, why }.into())
            }
        }
    }

    pub(crate) fn is_simulated(&self) -> bool {
        !matches!(self, Self::Gpus)
    }

    #[cfg(feature = "simulator")]
    pub(crate) fn simulated(&self) -> Option<&devcomm_sim::Machine> {
        match self {
            Self::Gpus => None,
            Self::Simulated(machine) => Some(machine.machine()),
        }
    }

    /// Returns whether a simulated machine has reported an error.
    pub(crate) fn has_failed(&self) -> bool {
        #[cfg(feature = "simulator")]
        if let Self::Simulated(machine) = self {
            return machine.machine().failure().is_some();
        }
        false
    }

    /// Ends a simulated machine, and frees its memory, although objects remain that were made on
    /// it.
    pub(crate) fn end(&self) {
        #[cfg(feature = "simulator")]
        if let Self::Simulated(machine) = self {
            machine.machine().end();
        }
    }

    /// Returns how long a call may wait for the other ranks, unless the program sets it; `None`
    /// means forever.
    ///
    /// # Errors
    ///
    /// [`WorldError::Environment`](crate::WorldError::Environment) for an invalid value of
    /// DEVCOMM_OPERATION_TIMEOUT.
    pub(crate) fn deadline(&self) -> Result<Option<Duration>> {
        let deadline = variables::deadline(&|name| std::env::var_os(name))?;
        // What never ends on simulated GPUs is a deadlock, which is found at once.
        Ok(deadline.filter(|_| !self.is_simulated()))
    }

    /// Fails on a simulated machine, which does not support `what`.
    ///
    /// # Errors
    ///
    /// [`DriverError::NotSimulated`].
    pub(crate) fn refuse_simulated(&self, what: impl FnOnce() -> String) -> Result<()> {
        if self.is_simulated() {
            Err(DriverError::NotSimulated { what: what() }.into())
        } else {
            Ok(())
        }
    }

    /// Returns the driver's functions, for calls on this thread.
    pub(crate) fn driver(&self) -> &'static Driver {
        match self {
            Self::Gpus => &CUDA,
            #[cfg(feature = "simulator")]
            Self::Simulated(machine) => machine.driver(),
        }
    }

    /// Returns the simulator's NCCL functions, and the path that it reports for their library.
    pub(crate) fn nccl(&self) -> Option<(&'static Path, Functions)> {
        match self {
            Self::Gpus => None,
            #[cfg(feature = "simulator")]
            Self::Simulated(machine) => Some(machine.nccl()),
        }
    }

    /// Returns a new module of a simulated machine; NULL on real GPUs, whose modules have machine
    /// code.
    pub(crate) fn load_module(&self) -> CUmodule {
        match self {
            Self::Gpus => null_mut(),
            #[cfg(feature = "simulator")]
            Self::Simulated(machine) => machine.load_module(),
        }
    }

    /// Returns the function of a [simulated](Self::load_module) module that runs a kernel's body in
    /// Rust on the current context's GPU; NULL on real GPUs, which run machine code.
    pub(crate) fn bind(&self, module: CUmodule, body: &HostBody) -> CUfunction {
        match self {
            Self::Gpus => {
                let _ = (module, body);
                null_mut()
            }
            #[cfg(feature = "simulator")]
            Self::Simulated(machine) => machine.bind(module, body),
        }
    }

    /// Attaches the calling thread to a simulated machine, if it is not attached: the simulator's
    /// functions act on the calling thread's machine.
    pub(crate) fn enter(&self) {
        match self {
            Self::Gpus => {}
            #[cfg(feature = "simulator")]
            Self::Simulated(machine) => machine.enter(),
        }
    }

    /// Returns the time since a fixed moment, by the machine's clock.
    pub(crate) fn now(&self) -> Duration {
        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        match self {
            Self::Gpus => START.elapsed(),
            #[cfg(feature = "simulator")]
            Self::Simulated(machine) => machine.now(),
        }
    }

    /// Returns the time since `start`, a result of [`now`](Self::now).
    pub(crate) fn since(&self, start: Duration) -> Duration {
        self.now().saturating_sub(start)
    }

    /// Returns whether `interval` has passed since `last`. Always true on a simulated machine,
    /// which polls only after events.
    pub(crate) fn is_due(&self, last: Duration, interval: Duration) -> bool {
        self.is_simulated() || self.since(last) >= interval
    }

    /// Returns the event count of a simulated machine; a poll takes it before it tests its
    /// condition.
    fn event_count(&self) -> EventCount {
        match self {
            Self::Gpus => EventCount::default(),
            #[cfg(feature = "simulator")]
            Self::Simulated(machine) => machine.event_count(),
        }
    }

    /// Tells a simulated machine that the thread sends or receives messages of other threads.
    fn exchange(&self) {
        match self {
            Self::Gpus => {}
            #[cfg(feature = "simulator")]
            Self::Simulated(machine) => machine.exchange(),
        }
    }

    /// Pauses a poll that has lasted for `waited` and ends at `deadline`. `since` is the
    /// [`event_count`](Self::event_count) before the poll's last test.
    ///
    /// # Errors
    ///
    /// [`StateError::Deadlock`] on a simulated machine.
    fn pause(
        &self,
        wakes: Wakes,
        since: EventCount,
        waited: Duration,
        deadline: Option<Duration>,
    ) -> Result<()> {
        match self {
            Self::Gpus => {
                let _ = (wakes, since, deadline);
                // Short waits are polled without sleeping, long ones with increasing sleeps.
                if waited < Duration::from_millis(1) {
                    std::thread::yield_now();
                } else {
                    std::thread::sleep((waited / 16).min(Duration::from_millis(1)));
                }
                Ok(())
            }
            #[cfg(feature = "simulator")]
            Self::Simulated(machine) => machine.wait(wakes, since, deadline),
        }
    }

    /// Polls `done` until it is true or fails, for at most `limit` of time in which this thread
    /// runs.
    ///
    /// # Errors
    ///
    /// [`StateError::DeadlinePassed`] after `limit`; [`StateError::Deadlock`];
    /// [`StateError::Interrupted`]; those of `done`.
    pub(crate) fn poll(
        &self,
        wakes: Wakes,
        limit: Option<Duration>,
        mut done: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
        let mut start = self.now();
        loop {
            let seen = self.event_count();
            if let Wakes::Notified = wakes {
                self.exchange();
            }
            if done()? {
                return Ok(());
            }
            let mut waited = self.since(start);
            if limit.is_some_and(|limit| waited >= limit.saturating_add(STOPPED)) {
                start = self.now();
                waited = Duration::ZERO;
            } else if limit.is_some_and(|limit| waited >= limit) {
                return Err(StateError::DeadlinePassed { waited }.into());
            }
            interrupt::check()?;
            self.pause(wakes, seen, waited, limit.map(|limit| start.saturating_add(limit)))?;
        }
    }

    /// Waits until other threads of a simulated machine have made `done` true. On GPUs the caller
    /// joins the threads instead.
    pub(crate) fn wait_for_threads(&self, done: impl Fn() -> bool) {
        loop {
            let seen = self.event_count();
            self.exchange();
            if !self.is_simulated() || done() {
                return;
            }
            // A deadlock is reported by the threads that are part of it.
            let _ = self.pause(Wakes::Notified, seen, Duration::ZERO, None);
        }
    }

    /// Sleeps for `duration`, by the machine's clock.
    pub(crate) fn sleep(&self, duration: Duration) {
        match self {
            Self::Gpus => std::thread::sleep(duration),
            // The condition never holds: the poll ends after `duration`.
            #[cfg(feature = "simulator")]
            Self::Simulated(_) => drop(self.poll(Wakes::Notified, Some(duration), || Ok(false))),
        }
    }

    /// Wakes polls after a change in host memory, which a simulated machine cannot observe.
    pub(crate) fn notify(&self) {
        match self {
            Self::Gpus => {}
            #[cfg(feature = "simulator")]
            Self::Simulated(machine) => machine.notify(),
        }
    }
}

impl std::fmt::Debug for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.is_simulated() { "a simulated machine" } else { "GPUs" })
    }
}
