//! Destructors of what the GPU or other ranks may still use.
//!
//! A destructor in a rank's function must not wait for long: the function may be failing while its
//! kernels wait for other ranks, which wait for this one until they know its error. So what the GPU
//! does not release soon is kept, and freed when the streams are idle at a later drop or
//! allocation, or else when the function has ended. The ends of communicators, for which all ranks
//! meet, are always postponed until then.

use std::any::Any;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::context::Context;
use super::holds::CreationTime;
use crate::error::Result;

/// How long destructors wait for the GPU before they leak the memory that it may still use.
pub(super) const TIMEOUT: Duration = Duration::from_secs(10);
/// How long destructors in a rank's function wait, before they postpone the free.
pub(super) const SHORT_TIMEOUT: Duration = Duration::from_millis(100);

/// What is kept while a rank's function runs.
#[derive(Default)]
pub(super) struct Postponed {
    /// Communicators, by number.
    ends: Vec<(u64, Box<dyn Any + Send>)>,
    /// What the GPU may still use, in the order of the drops.
    frees: Vec<Box<dyn Any + Send>>,
    /// Whether later drops are added to `frees`.
    postpones_frees: bool,
}

impl Context {
    /// Postpones drops that would wait, as long as the result lives: the rank's function may be
    /// failing, and its error must reach the other ranks first, which may wait for this rank in
    /// another call.
    pub(crate) fn postpone_drops(&self) -> PostponedDrops {
        *self.postponed().lock() =
            Some(Postponed { postpones_frees: true, ..Postponed::default() });
        PostponedDrops { context: self.clone() }
    }

    /// Returns whether the ends of communicators are postponed.
    pub(crate) fn postpones_ends(&self) -> bool {
        self.postponed().lock().is_some()
    }

    /// Takes a communicator that is being dropped; `number` is larger for one that was made later.
    /// Drops it if the rank's function has ended meanwhile.
    pub(crate) fn postpone_end(&self, number: u64, dropped: impl Any + Send) {
        self.postpone(dropped, |postponed, dropped| postponed.ends.push((number, dropped)));
    }

    /// Keeps `dropped`, or drops it if nothing is postponed any more.
    fn postpone(
        &self,
        dropped: impl Any + Send,
        store: impl FnOnce(&mut Postponed, Box<dyn Any + Send>),
    ) {
        let mut dropped: Option<Box<dyn Any + Send>> = Some(Box::new(dropped));
        if let Some(postponed) = self.postponed().lock().as_mut()
            && let Some(dropped) = dropped.take()
        {
            store(postponed, dropped);
        }
        // The lock is not held here: a destructor takes it.
        drop(dropped);
    }

    /// Makes the CUDA context current, before something is freed. Where that fails, so does the
    /// free, which reports the error.
    pub(crate) fn bind_to_free(&self) {
        let _ = self.cuda().bind();
    }

    /// Returns whether a destructor can free `what` now: every stream is idle, after a wait.
    /// Otherwise the memory stays allocated until the process ends, because a kernel may still use
    /// it, or the free would block.
    pub(crate) fn can_free(&self, what: &str) -> bool {
        self.free_postponed();
        let idle = self.wait_to_free(TIMEOUT);
        idle.inspect_err(|why| tracing::warn!("{what} is left allocated: {why}")).is_ok()
    }

    /// Does the same as [`can_free_or_postpone`](Self::can_free_or_postpone), for an object that
    /// graphs may use: a graph that may use it gets the result of `moved`.
    pub(crate) fn can_free_or_hold<T: Any + Send>(
        &self,
        what: &str,
        created_at: CreationTime,
        moved: impl FnOnce() -> T,
    ) -> bool {
        self.free_held();
        let mut moved = Some(moved);
        self.hold(created_at, || moved.take().map(|moved| moved()));
        match moved {
            None => false,
            Some(moved) => self.can_free_or_postpone(what, moved),
        }
    }

    /// Does the same as [`can_free`](Self::can_free), after a short wait in a rank's function. If
    /// the GPU is still busy there, keeps the result of `moved`, to drop it later.
    pub(crate) fn can_free_or_postpone<T: Any + Send>(
        &self,
        what: &str,
        moved: impl FnOnce() -> T,
    ) -> bool {
        if !self.postpones_frees() {
            return self.can_free(what);
        }
        self.free_postponed();
        let idle = self.wait_to_free(SHORT_TIMEOUT).is_ok();
        if !idle {
            self.postpone_free(moved());
        }
        idle
    }

    /// Waits for the streams in a destructor.
    fn wait_to_free(&self, limit: Duration) -> Result<()> {
        // Streams cannot be waited for during a capture; the GPU may be healthy.
        self.refuse_capturing("memory is freed")?;
        let idle = self.drain_within(self.drop_timeout(limit));
        self.drop_wait_failed().store(idle.is_err(), Ordering::Relaxed);
        idle
    }

    /// Returns how long a destructor waits: for `limit`, or not at all if the GPU is stuck, an
    /// earlier destructor has waited in vain, or the thread panics.
    fn drop_timeout(&self, limit: Duration) -> Duration {
        let failed = self.drop_wait_failed().load(Ordering::Relaxed) || self.is_stuck();
        let no_wait = failed || std::thread::panicking();
        if no_wait { Duration::ZERO } else { limit }
    }

    /// Returns how long the destructor of a stream waits for it.
    pub(super) fn stream_timeout(&self) -> Duration {
        self.drop_timeout(if self.postpones_frees() { SHORT_TIMEOUT } else { TIMEOUT })
    }

    /// Waits, with a timeout, until all streams of this context are idle, whether their work
    /// succeeded or not. Then the memory that they used can be freed.
    pub(crate) fn drain(&self) -> Result<()> {
        self.drain_within(self.drain_timeout())
    }

    pub(super) fn drain_timeout(&self) -> Duration {
        if std::thread::panicking() { Duration::ZERO } else { TIMEOUT }
    }

    /// Returns whether frees of what the GPU may still use are [postponed](Self::postpone_free).
    pub(super) fn postpones_frees(&self) -> bool {
        self.postponed().lock().as_ref().is_some_and(|postponed| postponed.postpones_frees)
    }

    /// Keeps what the GPU may still use, to drop it later.
    pub(super) fn postpone_free(&self, dropped: impl Any + Send) {
        self.postpone(dropped, |postponed, dropped| postponed.frees.push(dropped));
    }

    /// Drops what was kept, if the streams are idle now.
    pub(crate) fn free_postponed(&self) {
        let any = self.postponed().lock().as_ref().is_some_and(|kept| !kept.frees.is_empty());
        if any && self.is_idle_now() {
            self.drop_wait_failed().store(false, Ordering::Relaxed);
            self.drop_frees();
        }
    }

    /// Drops what the GPU may still use, newest first.
    fn drop_frees(&self) {
        let frees = self.postponed().lock().as_mut().map(|kept| std::mem::take(&mut kept.frees));
        let mut frees = frees.unwrap_or_default();
        while frees.pop().is_some() {}
    }
}

/// While it exists, drops that would wait are postponed.
pub(crate) struct PostponedDrops {
    context: Context,
}

/// Drops what was postponed. Communicators, which may be kept by what the GPU uses, end last: the
/// newest first, which is the same order on all ranks.
impl Drop for PostponedDrops {
    fn drop(&mut self) {
        if let Some(postponed) = self.context.postponed().lock().as_mut() {
            postponed.postpones_frees = false;
        }
        self.context.drop_wait_failed().store(false, Ordering::Relaxed);
        self.context.drop_frees();
        let postponed = self.context.postponed().lock().take().unwrap_or_default();
        // Another thread may have postponed more meanwhile.
        drop(postponed.frees);
        let mut ends = postponed.ends;
        ends.sort_by_key(|(number, _)| *number);
        while ends.pop().is_some() {}
    }
}
