//! The machine that the crate runs on: the GPUs, or simulated ones.
//!
//! It gives the two tables of C functions that [`sys`](crate::sys) calls, and what a host thread
//! does with time: clocks, pauses, other threads, and waits for what those do. On GPUs that is the
//! system's. A simulated machine runs one thread at a time and has a clock of its own, so all of it
//! is asked of the machine; a thread that waits by other means holds up all others.

mod shared;
#[cfg(feature = "simulator")]
mod simulated;
mod threads;

use std::cell::RefCell;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

#[cfg(feature = "simulator")]
use devcomm_sim::EventCount;
use devcomm_sys::driver::{CUDA, CUfunction, CUstream, Driver};
use devcomm_sys::nccl::Functions;
use devcomm_types::HostBody;

pub(crate) use self::shared::Shared;
#[cfg(feature = "simulator")]
use self::simulated::Simulated;
pub(crate) use self::threads::{Task, message};
use crate::error::{DriverError, Result, StateError};

/// Names a machine to simulate for any program: `4`, or `4,team=2,seed=7`.
pub(crate) const VARIABLE: &str = "DEVCOMM_SIMULATE";

/// What a poll on a simulated machine waits for. On GPUs a poll is repeated instead.
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "simulator"), expect(dead_code, reason = "only a simulated machine asks"))]
pub(crate) enum Wakes {
    /// Whatever has happened.
    Anything,
    /// A [notification](Machine::notify) by another thread.
    Notified,
    /// The same, and that this stream of the current context is idle.
    Idle(CUstream),
}

/// How much has happened on a simulated machine.
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

thread_local! {
    /// The machine of the world whose rank the thread is.
    static CURRENT: RefCell<Option<Machine>> = const { RefCell::new(None) };
}

impl Machine {
    /// The calling thread's machine: that of the world whose rank it is, or else the one that the
    /// environment asks for.
    ///
    /// # Errors
    ///
    /// [`WorldError::Environment`](crate::WorldError::Environment).
    pub(crate) fn current() -> Result<Self> {
        CURRENT.with_borrow(|current| match current {
            Some(machine) => Ok(machine.clone()),
            None => Ok(Self::asked_for(None)?.unwrap_or(Self::Gpus)),
        })
    }

    /// The simulated machine that the environment asks for, one for the whole process. The first
    /// caller may cut its GPUs into LSA teams.
    ///
    /// # Errors
    ///
    /// [`WorldError::Environment`](crate::WorldError::Environment) for a value that makes no sense.
    #[cfg(feature = "simulator")]
    pub(crate) fn asked_for(team: Option<usize>) -> Result<Option<Self>> {
        Ok(simulated::asked_for(team)?.map(Self::Simulated))
    }

    /// A simulated machine of its own.
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

    /// As above, without the simulator: an error if the variable is set.
    #[cfg(not(feature = "simulator"))]
    pub(crate) fn asked_for(_: Option<usize>) -> Result<Option<Self>> {
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

    /// Fails on a simulated machine, which has no `what`.
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

    /// The driver's functions, for calls on this thread.
    pub(crate) fn driver(&self) -> &'static Driver {
        match self {
            Self::Gpus => &CUDA,
            #[cfg(feature = "simulator")]
            Self::Simulated(machine) => machine.driver(),
        }
    }

    /// NCCL's functions and the path that they report, if they are the machine's own.
    pub(crate) fn nccl(&self) -> Option<(&'static Path, Functions)> {
        match self {
            Self::Gpus => None,
            #[cfg(feature = "simulator")]
            Self::Simulated(machine) => Some(machine.nccl()),
        }
    }

    /// The function that runs a kernel's body on the GPU of the current context; NULL on GPUs,
    /// which run machine code.
    pub(crate) fn bind(&self, body: &HostBody) -> CUfunction {
        match self {
            Self::Gpus => {
                let _ = body;
                null_mut()
            }
            #[cfg(feature = "simulator")]
            Self::Simulated(machine) => machine.bind(body),
        }
    }

    /// Registers the calling thread with a simulated machine, if the program has started it: calls
    /// find the machine by their thread.
    pub(crate) fn enter(&self) {
        match self {
            Self::Gpus => {}
            #[cfg(feature = "simulator")]
            Self::Simulated(machine) => machine.enter(),
        }
    }

    /// The time since some fixed moment.
    pub(crate) fn now(&self) -> Duration {
        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        match self {
            Self::Gpus => START.elapsed(),
            #[cfg(feature = "simulator")]
            Self::Simulated(machine) => machine.now(),
        }
    }

    /// The time since a moment that [`now`](Self::now) gave.
    pub(crate) fn since(&self, start: Duration) -> Duration {
        self.now().saturating_sub(start)
    }

    /// Whether something done every `interval` is due. On a simulated machine it always is: a wait
    /// there ends when something has happened.
    pub(crate) fn is_due(&self, last: Duration, interval: Duration) -> bool {
        self.is_simulated() || self.since(last) >= interval
    }

    /// How much has happened on a simulated machine: taken before a poll looks at its condition.
    fn event_count(&self) -> EventCount {
        match self {
            Self::Gpus => EventCount::default(),
            #[cfg(feature = "simulator")]
            Self::Simulated(machine) => machine.event_count(),
        }
    }

    /// Lets others work; a caller that polls has `waited` so long already and stops at `deadline`.
    /// `since` is the [`event_count`](Self::event_count) before the last look.
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
                // Short waits are polled without sleeping, long ones leave the processor to others.
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

    /// Polls `done` until it is true or fails, for at most `limit`.
    ///
    /// # Errors
    ///
    /// [`StateError::DeadlinePassed`] after `limit`; [`StateError::Deadlock`]; those of `done`.
    pub(crate) fn poll(
        &self,
        wakes: Wakes,
        limit: Option<Duration>,
        mut done: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
        let start = self.now();
        loop {
            let seen = self.event_count();
            if done()? {
                return Ok(());
            }
            let waited = self.since(start);
            if limit.is_some_and(|limit| waited >= limit) {
                return Err(StateError::DeadlinePassed { waited }.into());
            }
            self.pause(wakes, seen, waited, limit.map(|limit| start.saturating_add(limit)))?;
        }
    }

    /// Waits until other threads of a simulated machine have made `done` true. On GPUs the caller
    /// joins the threads instead.
    pub(crate) fn wait_for_threads(&self, done: impl Fn() -> bool) {
        loop {
            let seen = self.event_count();
            if !self.is_simulated() || done() {
                return;
            }
            // A deadlock is reported by the threads that wait for something.
            let _ = self.pause(Wakes::Notified, seen, Duration::ZERO, None);
        }
    }

    /// Sleeps.
    pub(crate) fn sleep(&self, duration: Duration) {
        match self {
            Self::Gpus => std::thread::sleep(duration),
            // The deadline is what it waits for.
            #[cfg(feature = "simulator")]
            Self::Simulated(_) => drop(self.poll(Wakes::Notified, Some(duration), || Ok(false))),
        }
    }

    /// Wakes polls for a change in the host's memory, which a simulated machine cannot see.
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
