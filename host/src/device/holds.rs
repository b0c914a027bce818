//! Objects that graphs may still use, which are freed after the graphs.
//!
//! The arguments of a captured kernel are bytes: it is not known what they refer to. Nor is it
//! known which registrations of memory an operation of NCCL uses. So a graph with kernels or
//! operations of NCCL holds whatever existed when it was captured and is dropped later: memory,
//! windows, registered buffers, device communicators and kernel modules are freed after the graph.
//! What was made after the capture is freed as usual.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::context::Context;
use super::stream::StreamInner;
use crate::error::Result;
use crate::sys::cuda::graph::CaptureInfo;

/// The logical time at which an object was created, in the order of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CreationTime(u64);

/// When the capture of another library ends, while it is not known to have ended.
const FOREIGN: CreationTime = CreationTime(u64::MAX);

/// The graphs of a context that hold objects.
#[derive(Default)]
pub(super) struct Holds {
    creations: AtomicU64,
    live: Mutex<Vec<Arc<Hold>>>,
    /// The capture by another library whose graph last got a hold.
    foreign: Mutex<Option<u64>>,
    /// Whether another part of the program knows a stream or an event of the context by its handle,
    /// so that it can capture streams.
    is_shared: AtomicBool,
}

/// What one graph holds.
pub(super) struct Hold {
    /// When the capture ended, or was seen to have ended: the graph may use what was created
    /// before.
    captured: Mutex<CreationTime>,
    /// The stream and the number of a capture by another library.
    by_other: Option<(Weak<StreamInner>, u64)>,
    /// Whether the graph is gone.
    is_over: AtomicBool,
    held: Mutex<Vec<Box<dyn Any + Send>>>,
}

impl Hold {
    fn new(captured: CreationTime, by_other: Option<(Weak<StreamInner>, u64)>) -> Self {
        let captured = captured.into();
        Self { captured, by_other, is_over: false.into(), held: Mutex::default() }
    }

    /// Returns whether the graph may use what was created at this time.
    fn may_use(&self, created_at: CreationTime) -> bool {
        let mut captured = self.captured.lock();
        if let (&mut FOREIGN, Some((stream, capture))) = (&mut *captured, &self.by_other)
            && let Some(stream) = stream.upgrade()
            && stream.has_left_capture(*capture)
        {
            *captured = stream.context.creation_time();
        }
        created_at < *captured
    }
}

/// Owned by a graph of this crate: its drop ends the hold, and drops what it held.
pub(super) struct OwnHold {
    hold: Arc<Hold>,
    context: Context,
}

impl Drop for OwnHold {
    fn drop(&mut self) {
        self.hold.is_over.store(true, Ordering::Release);
        self.context.free_held();
    }
}

/// Owned by a graph of another library: ends the hold when it is dropped, which may be on a thread
/// of the driver.
struct EndOfGraph(Arc<Hold>);

impl Drop for EndOfGraph {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Release);
    }
}

impl Context {
    /// Returns the logical time now, which advances with each call.
    pub(crate) fn creation_time(&self) -> CreationTime {
        // Relaxed suffices: what a graph uses was created by calls that happen before the end of
        // its capture, and the earlier of two such increments has the smaller number.
        CreationTime(self.holds().creations.fetch_add(1, Ordering::Relaxed))
    }

    /// Records that another part of the program knows a stream or an event by its handle.
    pub(super) fn share_handles(&self) {
        // Relaxed: the program passes the handle from this thread to the library that captures, and
        // enqueues to the captured stream only after that.
        self.holds().is_shared.store(true, Ordering::Relaxed);
    }

    /// Returns whether another part of the program may capture streams.
    pub(super) fn shares_handles(&self) -> bool {
        self.holds().is_shared.load(Ordering::Relaxed)
    }

    /// Begins a hold for a graph that has been captured, while the context still captures: other
    /// threads free nothing then.
    pub(super) fn begin_hold(&self) -> OwnHold {
        let hold = Arc::new(Hold::new(self.creation_time(), None));
        self.holds().live.lock().push(Arc::clone(&hold));
        OwnHold { hold, context: self.clone() }
    }

    /// Begins a hold for the graph of a capture by another library, if it has none. The graph may
    /// also use what is created during the capture of `stream`. The hold ends with the graph.
    pub(super) fn hold_for_capture(
        &self,
        stream: &Arc<StreamInner>,
        capture: &CaptureInfo,
    ) -> Result<()> {
        let mut last = self.holds().foreign.lock();
        if *last == Some(capture.id) {
            return Ok(());
        }
        let hold = Arc::new(Hold::new(FOREIGN, Some((Arc::downgrade(stream), capture.id))));
        capture.give(Box::new(EndOfGraph(Arc::clone(&hold))))?;
        self.holds().live.lock().push(hold);
        *last = Some(capture.id);
        Ok(())
    }

    /// Drops what destroyed graphs held.
    pub(super) fn free_held(&self) {
        let mut live = self.holds().live.lock();
        if !live.iter().any(|hold| hold.is_over.load(Ordering::Acquire)) {
            return;
        }
        let over = live.extract_if(.., |hold| hold.is_over.load(Ordering::Acquire));
        let over: Vec<_> = over.collect();
        // The lock is released first: destructors take it.
        drop(live);
        for hold in over {
            let mut held = std::mem::take(&mut *hold.held.lock());
            // Newest first: a window before its memory.
            while held.pop().is_some() {}
        }
    }

    /// Gives the result of `moved` to a graph that may use an object created at `created_at`.
    /// Returns whether there is one.
    pub(crate) fn hold<T: Any + Send>(
        &self,
        created_at: CreationTime,
        moved: impl FnOnce() -> T,
    ) -> bool {
        self.hold_by(|hold| hold.may_use(created_at), moved)
    }

    /// Does the same for graphs of other libraries only.
    pub(crate) fn hold_for_others<T: Any + Send>(
        &self,
        created_at: CreationTime,
        moved: impl FnOnce() -> T,
    ) -> bool {
        self.hold_by(|hold| hold.by_other.is_some() && hold.may_use(created_at), moved)
    }

    fn hold_by<T: Any + Send>(
        &self,
        may_use: impl Fn(&Hold) -> bool,
        moved: impl FnOnce() -> T,
    ) -> bool {
        let is_holder = |hold: &Arc<Hold>| !hold.is_over.load(Ordering::Acquire) && may_use(hold);
        // The lock is released first: a capture's state is asked for.
        let live = self.holds().live.lock().clone();
        let Some(holder) = live.into_iter().find(is_holder) else { return false };
        let moved = Box::new(moved());
        holder.held.lock().push(moved);
        true
    }
}
