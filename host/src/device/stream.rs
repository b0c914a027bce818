//! Streams, and waits for them that end when a rank is lost.

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::abort::{self, AbortFlag};
use super::capture::Capture;
use super::context::Context;
use super::enqueues::Enqueue;
use super::event::Event;
use super::in_group::refuse_before_deferred;
use super::issuer::{Issuer, Kept, Owner};
use super::operations::Operations;
use super::recorder::Operation;
use crate::error::{AbortCause, Error, NcclError, Result, StateError, WorldError};
use crate::machine::Wakes;
use crate::sys::cuda::stream::StreamHandle;

/// How often a wait asks NCCL for asynchronous errors.
pub(super) const ASYNC_ERROR_INTERVAL: Duration = Duration::from_millis(20);
/// How long kernels may take to exit once their abort flag is set, or their communicator is
/// aborted. They read the flag every few thousand polls, which takes far less.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// A CUDA stream. Clones are the same stream. Dropping the last clone waits for the stream's work;
/// in a rank's function for at most 100 ms, after which the stream lasts until it is idle.
#[derive(Clone)]
pub struct Stream {
    last: Arc<LastHandle>,
}

/// Dropped with the last handle of a stream.
pub(super) struct LastHandle {
    inner: Arc<StreamInner>,
}

pub(super) struct StreamInner {
    handle: StreamHandle,
    context: Context,
    operations: Mutex<Operations>,
    /// Whether it is registered only because its last handle was dropped during a capture.
    is_dropped: AtomicBool,
}

/// What an operation of a communicator is enqueued to: a stream, or `None` for the context's
/// [default stream](Context::default_stream).
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a stream",
    label = "expected `&Stream`, or `None` for the context's default stream"
)]
pub trait OnStream {
    /// The stream, unless it is the default stream.
    fn named(&self) -> Option<&Stream>;
}

impl OnStream for &Stream {
    fn named(&self) -> Option<&Stream> {
        Some(self)
    }
}

impl OnStream for Option<&Stream> {
    fn named(&self) -> Option<&Stream> {
        *self
    }
}

impl Context {
    /// A new stream. It is non-blocking: it runs concurrently with every other stream, the default
    /// stream included.
    ///
    /// # Errors
    ///
    /// The driver's errors.
    pub fn stream(&self) -> Result<Stream> {
        Ok(Stream::of(self, self.cuda().create_stream()?))
    }

    /// The default stream of this GPU's primary context, the same for every caller. It cannot be
    /// captured, and is never destroyed.
    ///
    /// It is CUDA's legacy default stream: it synchronizes with streams that other libraries made
    /// without `cudaStreamNonBlocking`. Streams of this crate are non-blocking: order them with
    /// events.
    #[doc(alias = "cudaStreamLegacy")]
    #[doc(alias = "CU_STREAM_LEGACY")]
    #[must_use]
    pub fn default_stream(&self) -> Stream {
        let mut known = self.known_default_stream().lock();
        if let Some(last) = known.upgrade() {
            return Stream { last };
        }
        let stream = Stream::of(self, self.cuda().default_stream());
        *known = Arc::downgrade(&stream.last);
        stream
    }
}

impl Stream {
    fn of(context: &Context, handle: StreamHandle) -> Self {
        let (context, operations, is_dropped) = (context.clone(), Mutex::default(), false.into());
        let inner = Arc::new(StreamInner { handle, context, operations, is_dropped });
        inner.context.register_stream(&inner);
        Self { last: Arc::new(LastHandle { inner }) }
    }

    /// A stream that another part of the program made (`CUstream`, which is `cudaStream_t`).
    /// Dropping it waits for its work and does not destroy it. The default stream is
    /// [`Context::default_stream`].
    ///
    /// # Safety
    ///
    /// `raw` is a stream of the primary context of the context's GPU, and outlives this stream.
    #[must_use]
    pub unsafe fn from_raw(context: &Context, raw: *mut c_void) -> Self {
        // SAFETY: the caller's contract.
        Self::of(context, unsafe { context.cuda().foreign_stream(raw.cast(), None) })
    }

    /// A stream of the crate cudarc, which it keeps alive.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] when it is of another GPU than the context, or not of the GPU's
    /// primary context; [`DriverError::NotSimulated`](crate::DriverError::NotSimulated) for a
    /// context of a simulated machine.
    pub fn from_cudarc(
        context: &Context,
        stream: &Arc<cudarc::driver::CudaStream>,
    ) -> Result<Self> {
        context.machine().refuse_simulated(|| "a stream of cudarc's".to_owned())?;
        context.require_cudarc(stream.context(), "stream")?;
        let keep: Box<dyn Any + Send + Sync> = Box::new(Arc::clone(stream));
        // SAFETY: a stream of the same CUDA context, which the `Arc` keeps alive.
        let handle = unsafe { context.cuda().foreign_stream(stream.cu_stream(), Some(keep)) };
        Ok(Self::of(context, handle))
    }

    /// Waits until all work in the stream is done, operations of non-blocking communicators
    /// included.
    ///
    /// # Errors
    ///
    /// [`WorldError::RankLost`] soon after a rank is lost while work is left;
    /// [`StateError::CommunicatorEnded`] when a communicator was aborted while its operation ran;
    /// [`LaunchError::KernelAborted`](crate::LaunchError::KernelAborted), once, when kernels were
    /// aborted; [`Error::Nccl`] when an operation failed; [`StateError::Capturing`]; the driver's
    /// error when a kernel failed.
    pub fn synchronize(&self) -> Result<()> {
        refuse_before_deferred(self.context(), Some(self), "a wait for the stream")?;
        self.inner().wait()
    }

    /// As [`synchronize`](Self::synchronize), for at most `limit`. Then it aborts kernels that wait
    /// for other ranks: those in this stream and, if the stream does not become idle, those in the
    /// context's other streams, for which this one may wait.
    ///
    /// # Errors
    ///
    /// Also [`LaunchError::KernelAborted`](crate::LaunchError::KernelAborted) with what the kernels
    /// waited for: their device communicators cannot be used any more; everything else can.
    /// [`StateError::DeadlinePassed`] when there are no such kernels, or they still run a second
    /// later. The GPU then counts as stuck: memory that it may still use is not freed before the
    /// process ends.
    pub fn synchronize_within(&self, limit: Duration) -> Result<()> {
        refuse_before_deferred(self.context(), Some(self), "a wait for the stream")?;
        match self.inner().wait_within(Some(limit)) {
            Err(Error::State(StateError::DeadlinePassed { waited }))
                if !self.context().is_stuck() =>
            {
                self.inner().abort_kernels(waited)
            }
            result => result,
        }
    }

    /// Whether all work in the stream is done.
    ///
    /// # Errors
    ///
    /// The driver's error when a kernel failed.
    pub fn is_idle(&self) -> Result<bool> {
        self.context().refuse_capturing("a stream is asked whether it is idle")?;
        let _query = self.begin_enqueue("a query of the stream")?;
        self.context().cuda().bind()?;
        Ok(self.inner().is_all_enqueued()? && self.handle().is_idle()?)
    }

    /// Whether the stream's work goes to a graph, of this crate's or of another library that has
    /// begun a capture, such as torch.
    ///
    /// CUDA: `cuStreamIsCapturing`.
    ///
    /// # Errors
    ///
    /// The driver's errors; for the default stream, if a stream that waits for it is captured.
    #[doc(alias = "cudaStreamIsCapturing")]
    pub fn is_capturing(&self) -> Result<bool> {
        self.context().cuda().bind()?;
        Ok(self.handle().capture()?.is_some())
    }

    /// The number of the capture by another library that the stream's work goes to. Its graph then
    /// holds what it may use.
    pub(super) fn foreign_capture(&self) -> Result<Option<u64>> {
        if self.as_raw().is_null() {
            return Ok(None);
        }
        self.context().cuda().bind()?;
        let Some(capture) = self.handle().capture()? else { return Ok(None) };
        self.context().hold_for_capture(&capture)?;
        Ok(Some(capture.id))
    }

    /// Begins a call that enqueues work to this stream, before it checks what it uses.
    ///
    /// # Errors
    ///
    /// [`StateError::Capturing`] while another thread captures a stream;
    /// [`StateError::BeforeDeferred`].
    pub(crate) fn begin_enqueue(&self, what: &'static str) -> Result<Enqueue<'_>> {
        refuse_before_deferred(self.context(), Some(self), what)?;
        self.context().begin_enqueue()
    }

    /// Makes later work of this stream wait for `event`, which may be of another stream.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for an event of another context; the driver's errors.
    pub fn wait_event(&self, event: &Event) -> Result<()> {
        let _enqueue = self.require(event, "a wait for an event")?;
        self.handle().wait_for(event.handle())
    }

    /// Records `event` at this point of the stream.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for an event of another context; the driver's errors.
    pub fn record(&self, event: &Event) -> Result<()> {
        let _enqueue = self.require(event, "the record of an event")?;
        self.handle().record(event.handle())
    }

    fn require(&self, event: &Event, what: &'static str) -> Result<Enqueue<'_>> {
        if !event.context().is(self.context()) {
            return Err(Error::invalid("the event was made by another context than the stream"));
        }
        let enqueue = self.begin_enqueue(what)?;
        self.context().cuda().bind()?;
        Ok(enqueue)
    }

    /// The driver's handle (`CUstream`, which is `cudaStream_t`), for use with other libraries.
    #[must_use]
    pub fn as_raw(&self) -> *mut c_void {
        self.handle().raw().cast()
    }

    /// The context that the stream belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.inner().context
    }

    pub(crate) fn handle(&self) -> &StreamHandle {
        &self.inner().handle
    }

    fn inner(&self) -> &Arc<StreamInner> {
        &self.last.inner
    }

    /// Registers an enqueued operation of a communicator, and the objects `keep` that it uses.
    pub(crate) fn register_operation(&self, communicator: &Arc<dyn Owner>, keep: Vec<Kept>) {
        let Some(keep) = self.context().move_to_capture(communicator, keep) else { return };
        let issuer = communicator.issuer();
        let keep = if issuer.is_blocking() { Vec::new() } else { keep };
        self.inner().operations.lock().add(issuer, keep);
    }

    /// Registers a launched kernel: the number of the communicator that its arguments are of, and
    /// the abort flag of its device communicator.
    pub(crate) fn register_launch(
        &self,
        kernel: &'static str,
        communicator: Option<u64>,
        flag: Option<Arc<AbortFlag>>,
    ) -> Result<()> {
        let context = self.context();
        let add = |capture: &mut Capture| {
            capture.launches = true;
            let used = communicator.and_then(|number| context.issuer(number));
            capture.used.extend(used);
            if let Some(flag) = &flag {
                capture.add_kernel(kernel, Arc::clone(flag));
            }
        };
        if context.with_capture(add).is_some() {
            return Ok(());
        }
        if let Some(flag) = flag {
            self.inner().operations.lock().add_kernel(flag);
        }
        // Only other libraries capture their streams without this crate.
        if self.handle().is_foreign() { self.foreign_capture().map(drop) } else { Ok(()) }
    }

    /// Registers a communicator that has operations in the stream.
    pub(super) fn register_communicator(&self, issuer: Arc<dyn Issuer>) {
        self.inner().operations.lock().add(issuer, Vec::new());
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Stream({:p}, {:?})", self.as_raw(), self.context())
    }
}

impl StreamInner {
    /// Whether all operations were enqueued to the GPU, which non-blocking communicators do later.
    fn is_all_enqueued(&self) -> Result<bool> {
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
    fn wait_within(&self, limit: Option<Duration>) -> Result<()> {
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
                self.context.forget_ended(self.handle.raw().cast(), turns);
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
            Err(error) => Err(error),
        }
    }

    /// After a rank was lost or a communicator failed: waits until the kernels, which were asked to
    /// exit, and NCCL's if they `are_aborted`, have exited, and logs what they waited for.
    fn wait_for_exit(&self, are_aborted: bool) {
        let running = self.operations.lock().take_running().running();
        if running.is_empty() && !are_aborted {
            return;
        }
        let _ = self.context.machine().poll(self.wakes(), Some(EXIT_TIMEOUT), || self.is_idle());
        if let Some(error) = abort::error(&running) {
            tracing::warn!("{error}");
        }
    }

    /// After a deadline: aborts the kernels of this stream and, if it stays busy, of all streams.
    fn abort_kernels(&self, waited: Duration) -> Result<()> {
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
                // This stream waited for other streams, whose kernels were aborted.
                Ok(()) => return abort::error(&aborted).map_or(Ok(()), Err),
                error => return error,
            }
        }
        self.context.mark_stuck();
        Err(StateError::DeadlinePassed { waited }.into())
    }

    fn poll(&self, limit: Option<Duration>, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
        self.context.refuse_capturing("a stream is waited for")?;
        self.context.cuda().bind()?;
        let machine = self.context.machine();
        let start = machine.now();
        machine.poll(self.wakes(), limit, || {
            let done = done()?;
            if !done {
                self.context.health().check()?;
                if self.context.is_stuck() {
                    return Err(StateError::DeadlinePassed { waited: machine.since(start) }.into());
                }
            }
            Ok(done)
        })
    }

    /// The events of a simulated machine after which a wait for this stream polls again.
    fn wakes(&self) -> Wakes {
        Wakes::Idle(self.handle.raw())
    }

    fn is_idle(&self) -> Result<bool> {
        let _query = self.context.begin_enqueue()?;
        // Errors here are sticky: no work of this CUDA context can run or finish any more.
        self.handle.is_idle().inspect_err(|_| self.context.mark_stuck())
    }

    /// The driver's error, if a kernel of the stream's context has failed.
    pub(super) fn failure(&self) -> Option<Error> {
        let _query = self.context.begin_enqueue().ok()?;
        self.handle.is_idle().err()
    }

    /// The result of a wait for the stream, which was idle after `registered` registrations: an
    /// error if its operations or kernels were aborted.
    fn idle_result(&self, registered: u64) -> Result<()> {
        let done = self.operations.lock().take(registered);
        match abort::error(&done.running()) {
            None => {}
            Some(error) => {
                // If a rank is lost, that is the cause.
                self.context.health().check()?;
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
    pub(super) fn drain(&self, limit: Duration) -> Result<()> {
        // A communicator that has failed enqueues nothing more.
        self.poll(Some(limit), || Ok(self.is_all_enqueued().unwrap_or(true) && self.is_idle()?))
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

    /// Whether nothing but a wait for it needs it any more.
    pub(super) fn is_dropped(&self) -> bool {
        self.is_dropped.load(Ordering::Acquire)
    }

    /// The abort flags of kernels that may still run.
    pub(super) fn running(&self) -> Vec<Arc<AbortFlag>> {
        self.operations.lock().running()
    }

    /// Forgets the operations in the stream, which is idle, and whether they were aborted.
    pub(super) fn forget_operations(&self) {
        let all = self.operations.lock().take(u64::MAX);
        drop(all);
    }
}

/// Whether a communicator has no operation in progress. Aborts one that has failed, in the
/// background, where the driver may take seconds for it: otherwise its kernels would wait forever
/// for a lost rank.
fn poll(issuer: &Arc<dyn Issuer>) -> Result<bool> {
    issuer.poll().inspect_err(|_| Arc::clone(issuer).start_abort())
}

impl Drop for LastHandle {
    fn drop(&mut self) {
        let context = &self.inner.context;
        match self.inner.drain(context.stream_timeout()) {
            Ok(()) => {}
            Err(_) if context.keeps() => {
                let last = Arc::new(Self { inner: Arc::clone(&self.inner) });
                return context.keep(Stream { last });
            }
            Err(Error::State(StateError::Capturing { .. })) => {
                // The next wait for all streams waits for it too, and then removes it.
                return self.inner.is_dropped.store(true, Ordering::Release);
            }
            Err(_) => context.mark_stuck(),
        }
        context.remove_stream(&self.inner);
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        // The stream is destroyed on this thread.
        let _ = self.context.cuda().bind();
    }
}
