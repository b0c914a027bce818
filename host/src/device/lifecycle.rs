//! The state of an object that kernels and operations use: open, or ended by one thread.

use std::sync::atomic::{AtomicBool, Ordering};

use super::context::Context;
use crate::error::Result;
use crate::machine::{CallLock, Held};

/// The life of a window, a device communicator, a graph, ...: it is open until one thread ends it.
#[derive(Debug, Default)]
pub(crate) struct Lifecycle {
    /// Whether it can no longer be used: a thread ends it, or has ended it.
    is_refused: AtomicBool,
    has_ended: AtomicBool,
    /// Held by the thread that ends it.
    ending: CallLock,
    /// Whether it is being dropped, so that no call uses it.
    is_unused: bool,
}

/// The right to end something: no call uses it any more. Dropping this leaves it open.
pub(crate) struct Ending<'a> {
    lifecycle: &'a Lifecycle,
    _held: Held<'a>,
}

impl Lifecycle {
    /// Returns whether it can be used. A call that enqueues work asks after
    /// [`begin_enqueue`](Context::begin_enqueue).
    pub(crate) fn is_open(&self) -> bool {
        !self.is_refused.load(Ordering::Acquire)
    }

    /// Returns whether it has ended. A call that has found it [open](Self::is_open) can use it
    /// until then.
    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    /// Begins its end: from now on it is refused, and calls of other threads that may use it have
    /// returned. What they have enqueued may still run. `None` if it has ended; waits for another
    /// thread that ends it.
    ///
    /// # Errors
    ///
    /// Those of waiting for other threads.
    pub(crate) fn begin_end<'a>(&'a self, context: &'a Context) -> Result<Option<Ending<'a>>> {
        let deadline = context.deadline();
        let held = self.ending.lock(context.machine(), deadline, || Ok(()))?;
        if self.has_ended() {
            return Ok(None);
        }
        self.is_refused.store(true, Ordering::Release);
        let ending = Ending { lifecycle: self, _held: held };
        if !self.is_unused {
            context.wait_for_enqueues(deadline)?;
        }
        Ok(Some(ending))
    }

    /// Notes that it is being dropped: its end waits for no call.
    pub(crate) fn set_unused(&mut self) {
        self.is_unused = true;
    }

    /// Returns the same life, for an object that takes the place of this one, which has ended.
    pub(crate) fn take(&self) -> Self {
        let (is_refused, has_ended) = (&self.is_refused, &self.has_ended);
        let [is_refused, has_ended] =
            [is_refused, has_ended].map(|flag| flag.swap(true, Ordering::AcqRel).into());
        Self { is_refused, has_ended, ..Self::default() }
    }
}

impl Ending<'_> {
    /// Notes that it has ended.
    pub(crate) fn done(self) {
        self.lifecycle.has_ended.store(true, Ordering::Release);
    }
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        let has_ended = self.lifecycle.has_ended();
        self.lifecycle.is_refused.store(has_ended, Ordering::Release);
    }
}
