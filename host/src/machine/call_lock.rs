//! A lock that is held during calls of the driver and of NCCL, which may take long.

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::{Machine, Wakes};
use crate::error::{Error, Result};

/// A lock whose waits end early, and which a simulated machine knows: a thread that waits for it
/// lets the others run.
#[derive(Debug, Default)]
pub(crate) struct CallLock {
    held: Mutex<()>,
    /// Whether another thread has found the lock held.
    is_awaited: AtomicBool,
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
        let mut held = None;
        machine.poll(Wakes::Notified, limit, || {
            held = self.try_lock(machine);
            if held.is_none() {
                watch()?;
            }
            Ok(held.is_some())
        })?;
        // `poll` succeeds only after it was set.
        held.ok_or_else(|| Error::invalid("a wait for a lock that ended without it"))
    }

    /// Locks it, unless another thread holds it. Then the machine is notified when that thread lets
    /// it go.
    pub(crate) fn try_lock<'a>(&'a self, machine: &'a Machine) -> Option<Held<'a>> {
        let guard = self.held.try_lock().or_else(|| {
            self.is_awaited.store(true, Ordering::SeqCst);
            // With the fence in `Held::drop`: either this finds the lock free, or its holder, after
            // it has unlocked, finds it awaited.
            fence(Ordering::SeqCst);
            self.held.try_lock()
        })?;
        Some(Held { lock: self, machine, guard: Some(guard) })
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.guard = None;
        fence(Ordering::SeqCst);
        let is_awaited = &self.lock.is_awaited;
        // The load first: without a waiter nothing is written.
        if is_awaited.load(Ordering::SeqCst) && is_awaited.swap(false, Ordering::SeqCst) {
            self.machine.notify();
        }
    }
}
