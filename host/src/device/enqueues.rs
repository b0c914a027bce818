//! The threads that enqueue work to a context's GPU: any thread of its rank or, while a stream is
//! captured, the thread that captures.
//!
//! A call that enqueues work first checks what it uses: a window is open, no other thread captures.
//! A call that ends an object or begins a capture first refuses later calls, and then waits for the
//! calls of other threads that may have checked before.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ThreadId};
use std::time::Duration;

use parking_lot::Mutex;

use super::capture::Capture;
use super::context::Context;
use crate::error::{Result, StateError};
use crate::machine::Wakes;

/// The calls that enqueue work, and the capture in progress.
#[derive(Default)]
pub(super) struct Enqueues {
    state: Mutex<State>,
    /// Whether there is a capture. A thread that captures has set it itself.
    is_capturing: AtomicBool,
}

#[derive(Default)]
struct State {
    /// The number of calls so far.
    count: u64,
    /// The calls that have not returned, by number, and their threads.
    running: Vec<(u64, ThreadId)>,
    /// How many threads wait for calls to return.
    waiting: usize,
    /// The capture in progress, at most one, and its thread.
    capture: Option<(ThreadId, Capture)>,
}

/// Where the work of a stream goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    Gpu,
    /// The graph that this thread captures.
    Graph,
    /// The graph of another library's capture, with this number.
    ForeignGraph(u64),
}

/// Guard of a call that enqueues work.
pub(crate) struct Enqueue<'a> {
    context: &'a Context,
    number: u64,
    pub(super) target: Target,
}

impl Context {
    /// Begins a call that enqueues work, before it checks what it uses.
    ///
    /// # Errors
    ///
    /// [`StateError::Capturing`] while another thread captures a stream.
    pub(crate) fn begin_enqueue(&self) -> Result<Enqueue<'_>> {
        // A GPU that has recovered is found idle before there is more work. If it is stuck, waits
        // say so.
        let _ = self.end_stuck();
        self.begin_query()
    }

    /// Does the same as [`begin_enqueue`](Self::begin_enqueue), for a call that only queries the
    /// work.
    ///
    /// # Errors
    ///
    /// The errors are those of [`begin_enqueue`](Self::begin_enqueue).
    pub(super) fn begin_query(&self) -> Result<Enqueue<'_>> {
        let own = thread::current().id();
        let mut state = self.enqueues().state.lock();
        let is_others = state.capture.as_ref().is_some_and(|(thread, _)| *thread != own);
        // A capture waits for calls that have begun before it, with all that they do.
        if is_others && !state.running.iter().any(|(_, thread)| *thread == own) {
            return Err(StateError::Capturing { what: "another thread uses the GPU" }.into());
        }
        let number = state.count;
        state.count += 1;
        state.running.push((number, own));
        Ok(Enqueue { context: self, number, target: Target::Gpu })
    }

    /// Waits, for at most `limit`, until the calls that other threads have begun before this one
    /// have returned.
    ///
    /// # Errors
    ///
    /// [`StateError::DeadlinePassed`], [`StateError::Deadlock`].
    pub(super) fn wait_for_enqueues(&self, limit: Option<Duration>) -> Result<()> {
        let own = thread::current().id();
        let enqueues = &self.enqueues().state;
        let before = enqueues.lock().count;
        let have_returned = || {
            let running = &enqueues.lock().running;
            !running.iter().any(|(number, thread)| *number < before && *thread != own)
        };
        if have_returned() {
            return Ok(());
        }
        // `poll` asks again before it waits: a call that returns later notifies.
        enqueues.lock().waiting += 1;
        let waited = self.machine().poll(Wakes::Notified, limit, || Ok(have_returned()));
        enqueues.lock().waiting -= 1;
        waited
    }

    /// Begins a capture by this thread.
    ///
    /// # Errors
    ///
    /// [`StateError::Capturing`] during another one; those of waiting for calls of other threads.
    pub(super) fn begin_capture(&self) -> Result<()> {
        let mut state = self.enqueues().state.lock();
        if state.capture.is_some() {
            return Err(StateError::Capturing { what: "another capture begins" }.into());
        }
        state.capture = Some((thread::current().id(), Capture::default()));
        self.enqueues().is_capturing.store(true, Ordering::Release);
        drop(state);
        self.wait_for_enqueues(self.deadline()).inspect_err(|_| drop(self.end_capture()))
    }

    /// Ends the capture in progress, and returns what its operations use.
    pub(super) fn end_capture(&self) -> Capture {
        let mut state = self.enqueues().state.lock();
        let capture = state.capture.take();
        self.enqueues().is_capturing.store(false, Ordering::Release);
        drop(state);
        capture.map(|(_, capture)| capture).unwrap_or_default()
    }

    /// Calls `f` with the capture in progress, if this thread captures.
    pub(super) fn with_capture<R>(&self, f: impl FnOnce(&mut Capture) -> R) -> Option<R> {
        if !self.enqueues().is_capturing.load(Ordering::Relaxed) {
            return None;
        }
        let mut state = self.enqueues().state.lock();
        let (thread, capture) = state.capture.as_mut()?;
        (*thread == thread::current().id()).then(|| f(capture))
    }

    /// Returns whether a stream is captured, by any thread.
    pub(crate) fn is_capturing(&self) -> bool {
        self.enqueues().is_capturing.load(Ordering::Acquire)
    }

    /// Fails while a stream is captured: the call would not become part of the graph, or would
    /// invalidate the capture. `what` begins the message, such as "a window is registered".
    ///
    /// # Errors
    ///
    /// [`StateError::Capturing`].
    pub fn refuse_capturing(&self, what: &'static str) -> Result<()> {
        if self.is_capturing() { Err(StateError::Capturing { what }.into()) } else { Ok(()) }
    }
}

impl Drop for Enqueue<'_> {
    fn drop(&mut self) {
        let mut state = self.context.enqueues().state.lock();
        state.running.retain(|(number, _)| *number != self.number);
        let is_awaited = state.waiting > 0;
        drop(state);
        if is_awaited {
            self.context.machine().notify();
        }
    }
}
