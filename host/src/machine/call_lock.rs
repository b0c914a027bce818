//! A lock that is held during calls of the driver and of NCCL, which may take long.

use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::{Machine, Wakes};
use crate::error::{Error, Result};

/// A lock whose waits end early, and which a simulated machine knows: a thread that waits for it
/// lets the others run.
#[derive(Debug, Default)]
pub(crate) struct CallLock {
    held: Mutex<()>,
    /// How many threads wait for it.
    waiting: AtomicUsize,
}

/// A guard: the lock is held while it lives.
pub(crate) struct Held<'a> {
    lock: &'a CallLock,
    machine: &'a Machine,
    /// `None` only while dropping.
    guard: Option<MutexGuard<'a, ()>>,
}

impl CallLock {
    /// Locks it, after a wait of at most `limit`, which also ends if `watch` fails.
    ///
    /// # Errors
    ///
    /// [`StateError::DeadlinePassed`](crate::StateError::DeadlinePassed) after `limit`;
    /// [`StateError::Deadlock`](crate::StateError::Deadlock); those of `watch`.
    pub(crate) fn lock<'a>(
        &'a self,
        machine: &'a Machine,
        limit: Option<Duration>,
        watch: impl Fn() -> Result<()>,
    ) -> Result<Held<'a>> {
        if let Some(held) = self.try_lock(machine) {
            return Ok(held);
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let mut held = None;
        let waited = machine.poll(Wakes::Notified, limit, || {
            held = self.try_lock(machine);
            if held.is_none() {
                watch()?;
            }
            Ok(held.is_some())
        });
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        waited?;
        held.ok_or_else(|| Error::invalid("a wait for a lock that ended without it"))
    }

    /// Locks it, unless another thread holds it.
    pub(crate) fn try_lock<'a>(&'a self, machine: &'a Machine) -> Option<Held<'a>> {
        let guard = Some(self.held.try_lock()?);
        Some(Held { lock: self, machine, guard })
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.guard = None;
        // Either this sees the waiting thread, or that one sees the free lock.
        fence(Ordering::SeqCst);
        if self.lock.waiting.load(Ordering::SeqCst) > 0 {
            self.machine.notify();
        }
    }
}
