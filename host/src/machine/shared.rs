//! State shared by threads, and waits for changes of it.

use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::{Machine, STOPPED, Wakes, interrupt};
use crate::error::{Error, Result, StateError};

/// How often [`Shared::watch`] polls for changes elsewhere, such as a lost rank.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A mutex with a condition variable, on any [`Machine`]. A panic does not poison it.
pub(crate) struct Shared<T> {
    value: Mutex<T>,
    changed: Condvar,
    machine: Machine,
}

impl<T> Shared<T> {
    pub(crate) fn new(machine: Machine, value: T) -> Self {
        Self { value: Mutex::new(value), changed: Condvar::new(), machine }
    }

    /// Locks the value.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.value.lock()
    }

    /// Changes the value and wakes all waits.
    pub(crate) fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let result = change(&mut self.value.lock());
        self.changed.notify_all();
        self.machine.notify();
        result
    }

    /// Waits until `ready`, which is called after each change, returns a value; for at most `limit`
    /// of time in which this thread runs.
    ///
    /// # Errors
    ///
    /// [`StateError::DeadlinePassed`] after `limit`; [`StateError::Deadlock`];
    /// [`StateError::Interrupted`]; those of `ready`.
    pub(crate) fn wait<R>(
        &self,
        limit: Option<Duration>,
        ready: impl FnMut(&mut T) -> Result<Option<R>>,
    ) -> Result<R> {
        self.wait_polling(limit, Duration::MAX, ready)
    }

    /// Does the same as [`wait`](Self::wait); `ready` is also called at intervals, for changes
    /// elsewhere.
    ///
    /// # Errors
    ///
    /// The errors are those of [`wait`](Self::wait).
    pub(crate) fn watch<R>(
        &self,
        limit: Option<Duration>,
        ready: impl FnMut(&mut T) -> Result<Option<R>>,
    ) -> Result<R> {
        self.wait_polling(limit, POLL_INTERVAL, ready)
    }

    fn wait_polling<R>(
        &self,
        limit: Option<Duration>,
        interval: Duration,
        mut ready: impl FnMut(&mut T) -> Result<Option<R>>,
    ) -> Result<R> {
        if self.machine.is_simulated() {
            let mut found = None;
            self.machine.poll(Wakes::Notified, limit, || {
                found = ready(&mut self.lock())?;
                Ok(found.is_some())
            })?;
            // `poll` succeeds only after it was found.
            return found.ok_or_else(|| Error::invalid("a wait that ended without a result"));
        }
        let interval = interval.min(interrupt::interval());
        let mut start = self.machine.now();
        let mut value = self.lock();
        loop {
            if let Some(found) = ready(&mut value)? {
                return Ok(found);
            }
            let waited = self.machine.since(start);
            if limit.is_some_and(|limit| waited >= limit.saturating_add(STOPPED)) {
                start = self.machine.now();
                continue;
            }
            let left = limit.map_or(interval, |limit| limit.saturating_sub(waited));
            if left.is_zero() {
                return Err(StateError::DeadlinePassed { waited }.into());
            }
            if interrupt::is_due() {
                // The check may take long, and the value may change meanwhile.
                MutexGuard::unlocked(&mut value, interrupt::check)?;
                continue;
            }
            self.changed.wait_for(&mut value, left.min(interval));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_for_which_a_thread_was_stopped_does_not_count() {
        let limit = Duration::from_millis(20);
        let shared = Shared::new(Machine::Gpus, 0);
        let waited = shared.wait(Some(limit), |calls| {
            *calls += 1;
            if *calls == 1 {
                // This is as if the process were stopped.
                std::thread::sleep(limit + STOPPED);
            }
            Ok((*calls == 2).then_some(()))
        });
        assert!(waited.is_ok(), "{waited:?}");
        let late = shared.wait::<()>(Some(limit), |_| Ok(None)).unwrap_err();
        assert!(matches!(late, Error::State(StateError::DeadlinePassed { .. })), "{late}");
    }
}
