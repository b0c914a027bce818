//! Waiting until streams are idle or a rank is lost, and the detection of a GPU that is stuck.
//!
//! A GPU counts as stuck once a wait for it has missed its deadline. Then a wait without a limit of
//! its own fails at once, and memory that the GPU may use stays allocated. The GPU is no longer
//! stuck when all streams are found idle, as after an abort of what they wait for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::abort::{self, AbortFlag};
use super::context::Context;
use super::issuer::Issuer;
use super::recorder::Operation;
use super::stream::StreamInner;
use crate::error::{
    AbortCause, Error, LaunchError, NcclError, Result, StateError, WorldError, order_of_calls,
};
use crate::machine::Wakes;

/// How often a wait asks NCCL for asynchronous errors.
pub(super) const ASYNC_ERROR_INTERVAL: Duration = Duration::from_millis(20);
/// How long kernels may take to exit once their abort flag is set, or their communicator is
/// aborted. They read the flag every few thousand polls, which takes far less.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the GPU was waited for in vain, if it is stuck.
#[derive(Debug, Default)]
pub(super) struct Stuck {
    /// The nanoseconds, at least 1; 0 if it is not stuck.
    waited: AtomicU64,
}

impl Stuck {
    pub(super) fn waited(&self) -> Option<Duration> {
        let waited = self.waited.load(Ordering::Acquire);
        (waited > 0).then(|| Duration::from_nanos(waited))
    }

    fn mark(&self, waited: Duration) {
        let waited = waited.as_nanos().clamp(1, u64::MAX.into()) as u64;
        self.waited.fetch_max(waited, Ordering::AcqRel);
    }

    /// Returns whether it was stuck, which it is not any more.
    fn take(&self) -> bool {
        self.waited.swap(0, Ordering::AcqRel) > 0
    }
}

/// Whether work on the GPU has failed, after which nothing runs there any more.
#[derive(Debug, Default)]
pub(super) struct Failure {
    has_happened: AtomicBool,
    /// Whether a wait other than a destructor's, or a launch, has returned the driver's error.
    is_reported: AtomicBool,
}

impl Failure {
    pub(super) fn has_happened(&self) -> bool {
        self.has_happened.load(Ordering::Acquire)
    }

    /// Returns whether the error of a query is one of work on the GPU.
    fn is_gpu_failure(error: &Error) -> bool {
        matches!(error, Error::Driver(_) | Error::State(StateError::Deadlock { .. }))
    }
}

impl Context {
    /// Waits until all streams are idle: as long as destructors do, or until a simulated machine
    /// finds that they never will be.
    ///
    /// # Errors
    ///
    /// The reason why work on the GPU has failed, if no call has returned it yet.
    pub(crate) fn end_work(&self) -> Result<()> {
        let ended = match self.machine().is_simulated() {
            true => self.streams().iter().try_for_each(|stream| stream.drain(None)),
            false => self.drain(),
        };
        match ended {
            Err(error)
                if Failure::is_gpu_failure(&error)
                    && !self.failure().is_reported.load(Ordering::Relaxed) =>
            {
                Err(error)
            }
            // The work is not done, or a rank is lost: the destructors handle both.
            _ => Ok(()),
        }
    }

    /// Records that a wait or a launch returns `error`, if it is one of work on the GPU.
    pub(super) fn mark_reported(&self, error: &Error) {
        let is_of_work = match error {
            // The call itself may have failed: only a query tells.
            Error::Driver(_) => self.streams().iter().any(|stream| stream.failure().is_some()),
            _ => Failure::is_gpu_failure(error),
        };
        if is_of_work {
            self.failure().is_reported.store(true, Ordering::Relaxed);
        }
    }

    /// Records that the GPU was not idle after `waited`: it may never be.
    pub(super) fn mark_stuck(&self, waited: Duration) {
        self.stuck().mark(waited);
    }

    pub(super) fn is_stuck(&self) -> bool {
        self.stuck().waited().is_some()
    }

    /// Fails if the GPU is stuck.
    pub(super) fn refuse_stuck(&self) -> Result<()> {
        match self.stuck().waited() {
            None => Ok(()),
            Some(waited) => Err(StateError::DeadlinePassed { waited }.into()),
        }
    }

    /// If the GPU is stuck, asks all streams whether they are idle now. If they are, it is no
    /// longer stuck.
    ///
    /// # Errors
    ///
    /// [`StateError::DeadlinePassed`] if it is still stuck; [`StateError::Capturing`]; the driver's
    /// error when the GPU has failed.
    pub(super) fn end_stuck(&self) -> Result<()> {
        let Some(waited) = self.stuck().waited() else { return Ok(()) };
        match self.settle(Duration::ZERO) {
            Err(Error::State(StateError::DeadlinePassed { .. })) => {
                Err(StateError::DeadlinePassed { waited }.into())
            }
            settled => settled,
        }
    }

    /// Waits with a timeout, after an abort of what the streams waited for, until they are idle. A
    /// GPU that was stuck is not stuck afterwards.
    pub(crate) fn drain_aborted(&self) -> Result<()> {
        self.settle(self.drain_timeout())
    }

    /// Waits, for at most `limit`, until all streams are idle. If the GPU was stuck, it is not any
    /// more, and the operations that were aborted in its streams are forgotten: the wait that found
    /// it stuck has failed.
    fn settle(&self, limit: Duration) -> Result<()> {
        // Another thread may enqueue more meanwhile.
        let mut before = Vec::new();
        self.wait_for_all(limit, |stream| before.push((Arc::clone(stream), stream.count())))?;
        if self.stuck().take() {
            before.iter().for_each(|(stream, count)| stream.forget_operations(*count));
        }
        Ok(())
    }

    /// Waits until all work of this context is done.
    ///
    /// # Errors
    ///
    /// A rank is lost while work is left, an operation failed or was aborted, or the GPU failed or
    /// is stuck.
    pub(crate) fn synchronize_streams(&self) -> Result<()> {
        self.refuse_capturing("the GPU's streams are waited for")?;
        self.end_stuck()?;
        self.streams().iter().try_for_each(|stream| stream.wait())
    }

    /// Waits, for at most `limit`, until all streams of this context are idle, whether their work
    /// succeeded or not. Fails at once if the GPU is stuck.
    pub(super) fn drain_within(&self, limit: Duration) -> Result<()> {
        self.end_stuck()?;
        self.wait_for_all(limit, |_| ())
    }

    /// Calls `begin` for each stream and waits until it is idle, all within `limit`.
    fn wait_for_all(
        &self,
        limit: Duration,
        mut begin: impl FnMut(&Arc<StreamInner>),
    ) -> Result<()> {
        self.refuse_capturing("the GPU's streams are waited for")?;
        let (machine, start, streams) = (self.machine(), self.machine().now(), self.streams());
        let dropped: Vec<_> = streams.iter().filter(|stream| stream.is_dropped()).collect();
        for stream in &streams {
            begin(stream);
            stream.drain(Some(limit.saturating_sub(machine.since(start))))?;
        }
        dropped.into_iter().for_each(|stream| self.remove_stream(stream));
        Ok(())
    }

    /// Returns whether all streams of this context are idle right now.
    pub(crate) fn is_idle_now(&self) -> bool {
        self.drain_within(Duration::ZERO).is_ok()
    }
}

impl StreamInner {
    /// Returns whether all operations were enqueued to the GPU, which non-blocking communicators do
    /// later.
    pub(super) fn is_all_enqueued(&self) -> Result<bool> {
        let pending = self.operations.lock().pending();
        for handle in pending.iter().filter(|handle| !handle.is_blocking()) {
            if !poll(handle)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits until all work is done, and fails when an operation was aborted.
    ///
    /// It polls, because `cuStreamSynchronize` would never return if the running kernel waits for a
    /// dead rank.
    pub(super) fn wait_within(&self, limit: Option<Duration>) -> Result<()> {
        let stream = self.handle.raw() as usize;
        let _wait = self.context.recorder().begin(Operation::Wait { stream });
        let machine = self.context.machine();
        let (mut checked, mut registered, mut turns) = (machine.now(), 0, 0);
        let result = self.poll(limit, || {
            // Another thread may enqueue more before this returns.
            registered = self.operations.lock().count();
            turns = self.context.ended_turns();
            if !self.is_all_enqueued()? {
                return Ok(false);
            }
            let idle = self.is_idle()?;
            if !idle && machine.is_due(checked, ASYNC_ERROR_INTERVAL) {
                checked = machine.now();
                self.check_async_errors()?;
            }
            Ok(idle)
        });
        match result {
            Ok(()) => {
                self.context.forget_ended(self.handle.raw(), turns);
                self.idle_result(registered)
            }
            Err(lost @ Error::World(WorldError::RankLost { .. })) => {
                self.wait_for_exit(false);
                Err(lost)
            }
            Err(
                error @ (Error::State(StateError::CommunicatorEnded { .. })
                | Error::Nccl(NcclError::Failed { .. })),
            ) => {
                // The error is reported once.
                let failed = self.operations.lock().take_pending();
                self.wait_for_exit(!failed.pending().is_empty());
                Err(self.context.prefer_cause(error))
            }
            Err(mut error) => {
                self.context.mark_reported(&error);
                if let Error::State(StateError::Deadlock { report }) = &mut error {
                    *report += &order_of_calls(&self.context.objects_in_progress());
                }
                Err(error)
            }
        }
    }

    /// Waits, after a rank was lost or a communicator failed, until the kernels, which were asked
    /// to exit, have exited, and NCCL's too if they `are_aborted`; logs what they waited for.
    fn wait_for_exit(&self, are_aborted: bool) {
        let running = self.operations.lock().take_running().running();
        if running.is_empty() && !are_aborted {
            return;
        }
        let _ = self.context.machine().poll(self.wakes(), Some(EXIT_TIMEOUT), || self.is_idle());
        if let Some(error) = abort::error(&running, Vec::new()) {
            tracing::warn!("{error}");
        }
    }

    /// Aborts, after a deadline, the kernels of this stream and, if it stays busy, of all streams.
    /// Their error lists the objects with operations in progress.
    pub(super) fn abort_kernels(&self, waited: Duration) -> Result<()> {
        let objects = self.context.objects_in_progress();
        let cause = AbortCause::Deadline { waited };
        let mut aborted: Vec<Arc<AbortFlag>> = Vec::new();
        for flags in [self.running(), self.context.running()] {
            let known = aborted.len();
            for flag in flags {
                if !aborted.iter().any(|other| Arc::ptr_eq(other, &flag)) {
                    flag.raise(cause);
                    aborted.push(flag);
                }
            }
            if aborted.len() == known {
                continue;
            }
            match self.wait_within(Some(EXIT_TIMEOUT)) {
                Err(Error::State(StateError::DeadlinePassed { .. })) => {}
                // The kernels have exited, of this stream or of those for which it waited.
                Ok(()) | Err(Error::Launch(LaunchError::KernelAborted { .. })) => {
                    return abort::error(&aborted, objects).map_or(Ok(()), Err);
                }
                error => return error,
            }
        }
        self.context.mark_stuck(waited);
        Err(StateError::DeadlinePassed { waited }.into())
    }

    fn poll(&self, limit: Option<Duration>, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
        self.context.refuse_capturing("a stream is waited for")?;
        self.context.cuda().bind()?;
        self.context.machine().poll(self.wakes(), limit, || {
            let done = done()?;
            if !done {
                self.context.check_health()?;
                if limit.is_none() {
                    self.context.refuse_stuck()?;
                }
            }
            Ok(done)
        })
    }

    /// Returns the events of a simulated machine after which a wait for this stream polls again.
    fn wakes(&self) -> Wakes {
        Wakes::Idle(self.handle.raw())
    }

    /// Returns whether another library, or this thread, may capture the stream.
    pub(super) fn may_be_captured(&self) -> bool {
        self.context.is_capturing() || self.context.shares_handles()
    }

    /// Returns whether all work that the driver has is done.
    pub(super) fn is_idle(&self) -> Result<bool> {
        let _query = self.context.begin_query()?;
        if self.is_over() {
            return Ok(true);
        }
        // A query would invalidate the capture.
        if self.may_be_captured() && self.handle.refuses_queries() {
            return Err(StateError::Capturing { what: "a stream is waited for" }.into());
        }
        // Errors here are sticky: no work of this CUDA context can run or finish any more.
        let failure = self.context.failure();
        self.handle.is_idle().inspect_err(|_| failure.has_happened.store(true, Ordering::Release))
    }

    /// Returns whether work of the stream may not be done.
    pub(super) fn may_run(&self) -> bool {
        !(self.is_all_enqueued().unwrap_or(false) && self.is_idle().unwrap_or(false))
    }

    /// Returns the driver's error, if a kernel of the stream's context has failed.
    pub(super) fn failure(&self) -> Option<Error> {
        self.is_idle().err().filter(Failure::is_gpu_failure)
    }

    /// Returns the result of a wait for the stream, which was idle after `registered`
    /// registrations: an error if its operations or kernels were aborted.
    fn idle_result(&self, registered: u64) -> Result<()> {
        let done = self.operations.lock().take(registered);
        match abort::error(&done.running(), Vec::new()) {
            None => {}
            Some(error) => {
                // If a rank is lost, that is the cause.
                self.context.check_health()?;
                return Err(error);
            }
        }
        let aborted = done.pending().into_iter().find(|handle| handle.is_aborted());
        match aborted {
            None => Ok(()),
            Some(handle) => Err(handle.ended()),
        }
    }

    /// Waits until all work is done, and fails when an operation was aborted.
    pub(super) fn wait(&self) -> Result<()> {
        self.wait_within(None)
    }

    /// Waits until the stream is idle, whether its work succeeded or not.
    pub(super) fn drain(&self, limit: Option<Duration>) -> Result<()> {
        // A communicator that has failed enqueues nothing more.
        self.poll(limit, || Ok(self.is_all_enqueued().unwrap_or(true) && self.is_idle()?))
    }

    /// Fails when an operation in the stream has failed or was aborted, or the network that its
    /// kernels use has failed.
    pub(super) fn check_async_errors(&self) -> Result<()> {
        let pending = self.operations.lock().pending();
        pending.iter().try_for_each(|issuer| poll(issuer).map(drop))?;
        for issuer in self.running().iter().filter_map(|flag| flag.communicator()) {
            match poll(&issuer) {
                // The communicator was aborted meanwhile: a wait for its kernels reports that.
                Err(Error::State(StateError::CommunicatorEnded { .. })) => {}
                polled => drop(polled?),
            }
        }
        Ok(())
    }
}

/// Returns whether a communicator has no operation in progress. Aborts one that has failed, in the
/// background, where the driver may take seconds for it: otherwise its kernels would wait forever
/// for a lost rank.
fn poll(issuer: &Arc<dyn Issuer>) -> Result<bool> {
    issuer.poll().inspect_err(|_| Arc::clone(issuer).start_abort())
}
