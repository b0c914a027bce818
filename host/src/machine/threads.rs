//! The host threads of a machine. A simulated machine runs them one at a time.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{CURRENT, Machine, Shared};
use crate::error::{Error, Result};

/// How long [`Machine::spawn`] retries while the system has no room for a thread. Aborts begin so
/// after a loss, and who waits for them does so for longer.
const SPAWN_LIMIT: Duration = Duration::from_secs(2);
/// The pause between two attempts to start a thread.
const SPAWN_RETRY: Duration = Duration::from_millis(50);

/// The registration of a thread that is about to start. A simulated machine waits for the thread,
/// so that threads run in the order of their tickets, not in the order in which they start.
pub(crate) struct Ticket {
    machine: Machine,
    #[cfg(feature = "simulator")]
    simulated: Option<devcomm_sim::Ticket>,
}

/// A guard: while it lives, the thread's [`Machine::current`] is the entered machine.
pub(crate) struct Entered {
    previous: Option<Machine>,
    #[cfg(feature = "simulator")]
    _simulated: Option<devcomm_sim::Attached>,
}

impl Ticket {
    /// Enters the machine with the calling thread. On a simulated one, waits to be scheduled.
    pub(crate) fn enter(self) -> Entered {
        let previous = CURRENT.replace(Some(self.machine));
        Entered {
            previous,
            #[cfg(feature = "simulator")]
            _simulated: self.simulated.map(devcomm_sim::Ticket::attach),
        }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.set(self.previous.take());
    }
}

/// The handle of a started thread. Dropping it detaches the thread.
pub(crate) struct Task<T>(Arc<Shared<Option<Result<T>>>>);

/// Starts a thread; tries again while the system has no room for one.
///
/// # Errors
///
/// The system's, after `limit`.
pub(crate) fn start_thread(
    name: &str,
    limit: Duration,
    f: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    // The standard library drops what it cannot start.
    let (f, start) = (Arc::new(Mutex::new(Some(f))), Instant::now());
    loop {
        let f = Arc::clone(&f);
        let thread = move || {
            if let Some(f) = { f.lock().take() } {
                f();
            }
        };
        match std::thread::Builder::new().name(name.to_owned()).spawn(thread) {
            Err(_) if start.elapsed() < limit => std::thread::sleep(SPAWN_RETRY),
            started => return started,
        }
    }
}

impl<T> Task<T> {
    /// Waits for the thread's result, for at most `limit` and as long as `watch` does not fail. The
    /// first call that gets the result takes it.
    ///
    /// # Errors
    ///
    /// Outer result: [`StateError::DeadlinePassed`](crate::StateError::DeadlinePassed) after
    /// `limit`; [`StateError::Deadlock`](crate::StateError::Deadlock); those of `watch`.
    pub(crate) fn wait(
        &self,
        limit: Option<Duration>,
        watch: impl Fn() -> Result<()>,
    ) -> Result<Result<T>> {
        self.0.watch(limit, |result| match result.take() {
            None => watch().map(|()| None),
            result => Ok(result),
        })
    }
}

impl Machine {
    /// Enters the machine with the calling thread, unless the thread has entered one already.
    pub(crate) fn enter_if_outside(&self) -> Option<Entered> {
        let is_outside = CURRENT.with_borrow(Option::is_none);
        is_outside.then(|| self.ticket(std::thread::current().name().unwrap_or("a thread")).enter())
    }

    /// Returns a ticket for a thread of that name.
    pub(crate) fn ticket(&self, name: &str) -> Ticket {
        #[cfg(not(feature = "simulator"))]
        let _ = name;
        Ticket {
            machine: self.clone(),
            #[cfg(feature = "simulator")]
            simulated: match self {
                Self::Gpus => None,
                Self::Simulated(machine) => Some(machine.ticket(name)),
            },
        }
    }

    /// Starts a thread of the machine.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] when the system cannot.
    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        name: &str,
        f: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<Task<T>> {
        let (shared, ticket) = (Arc::new(Shared::new(self.clone(), None)), self.ticket(name));
        let result = Arc::clone(&shared);
        let thread = move || {
            let _entered = ticket.enter();
            // Unwind safe: after a panic, nothing uses what `f` has captured but destructors.
            let returned = catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
                Err(Error::invalid(format!("a thread panicked: {}", message(&*panic))))
            });
            result.change(|result| *result = Some(returned));
        };
        start_thread(name, SPAWN_LIMIT, thread).map_err(|error| {
            Error::invalid(format!("the thread {name} cannot be started: {error}"))
        })?;
        Ok(Task(shared))
    }
}

/// Returns the message of a panic.
pub(crate) fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "no message".to_owned())
}
