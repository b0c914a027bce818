//! CUDA streams, waits for them, and the operations that are registered in them.

use std::any::Any;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::abort::AbortFlag;
use super::capture::Capture;
use super::context::Context;
use super::enqueues::{Enqueue, Target};
use super::event::Event;
use super::in_group::refuse_before_deferred;
use super::issuer::{Issuer, KeepAlive, Owner};
use super::operations::Operations;
use crate::error::{Error, Result, StateError};
use crate::sys::cuda::stream::StreamHandle;

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
    pub(super) handle: StreamHandle,
    pub(super) context: Context,
    pub(super) operations: Mutex<Operations>,
    /// Whether it is registered only because it was not known to be idle when its last handle was
    /// dropped.
    is_dropped: AtomicBool,
    /// Whether its last handle was dropped and its work is done: who made the driver's stream, if
    /// not this crate, may destroy it.
    is_over: AtomicBool,
}

/// What an operation of a communicator is enqueued to: a stream, or `None` for the context's
/// [default stream](Context::default_stream).
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a stream",
    label = "expected `&Stream`, or `None` for the context's default stream"
)]
pub trait OnStream {
    /// Returns the stream, unless it is the default stream.
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
    /// Returns a new stream. It is non-blocking: it runs concurrently with every other stream, the
    /// default stream included.
    ///
    /// # Errors
    ///
    /// The driver's errors.
    pub fn stream(&self) -> Result<Stream> {
        Ok(Stream::of(self, self.cuda().create_stream()?))
    }

    /// Returns the default stream of this GPU's primary context, the same for every caller. It
    /// cannot be captured, and is never destroyed.
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
        let (context, operations) = (context.clone(), Mutex::default());
        let [is_dropped, is_over] = [false; 2].map(AtomicBool::new);
        let inner = Arc::new(StreamInner { handle, context, operations, is_dropped, is_over });
        inner.context.register_stream(&inner);
        Self { last: Arc::new(LastHandle { inner }) }
    }

    /// Returns a stream that another part of the program made (`CUstream`, which is
    /// `cudaStream_t`). Dropping it waits for its work and does not destroy it. NULL and
    /// `CU_STREAM_LEGACY` are the default stream, which is [`Context::default_stream`].
    ///
    /// # Safety
    ///
    /// `raw` is a stream of the primary context of the context's GPU, and outlives this stream. If
    /// the drop of this stream cannot wait for its work, because another library captures it or a
    /// deadline passes, `raw` also outlives the context's next wait for all streams. It is not
    /// `CU_STREAM_PER_THREAD`, which is another stream on each thread.
    #[must_use]
    pub unsafe fn from_raw(context: &Context, raw: *mut c_void) -> Self {
        /// `CU_STREAM_LEGACY`: the default stream by another handle.
        const LEGACY: usize = 1;
        let raw = if raw.addr() == LEGACY { std::ptr::null_mut() } else { raw };
        context.share_handles();
        // SAFETY: the caller passes a stream of this context that outlives this.
        Self::of(context, unsafe { context.cuda().foreign_stream(raw.cast(), None) })
    }

    /// Returns a stream of the crate cudarc, which it keeps alive.
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
        context.share_handles();
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
    /// [`WorldError::RankLost`](crate::WorldError::RankLost) soon after a rank is lost while work
    /// is left; [`StateError::CommunicatorEnded`] when a communicator was aborted while its
    /// operation ran; [`LaunchError::KernelAborted`](crate::LaunchError::KernelAborted), once, when
    /// kernels were aborted; [`Error::Nccl`] when an operation failed; [`StateError::Capturing`];
    /// [`StateError::DeadlinePassed`] while the GPU counts as stuck, as
    /// [`synchronize_within`](Self::synchronize_within) says; the driver's error when a kernel
    /// failed.
    pub fn synchronize(&self) -> Result<()> {
        refuse_before_deferred(self.context(), Some(self), "a wait for the stream")?;
        self.inner().wait()
    }

    /// Does the same as [`synchronize`](Self::synchronize), for at most `limit`. Then it aborts
    /// kernels that wait for other ranks: those in this stream and, if the stream does not become
    /// idle, those in the context's other streams, for which this one may wait.
    ///
    /// # Errors
    ///
    /// Also [`LaunchError::KernelAborted`](crate::LaunchError::KernelAborted) with what the kernels
    /// waited for: their device communicators cannot be used any more; everything else can.
    /// [`StateError::DeadlinePassed`] when there are no such kernels, or they still run a second
    /// later. The GPU then counts as stuck: other waits for it fail with this error, and memory
    /// that it may still use is not freed. It no longer does when all streams of the context are
    /// idle, as after [`Communicator::abort`](crate::Communicator::abort) of the communicator whose
    /// operation did not end.
    pub fn synchronize_within(&self, limit: Duration) -> Result<()> {
        refuse_before_deferred(self.context(), Some(self), "a wait for the stream")?;
        match self.inner().wait_within(Some(limit)) {
            Err(Error::State(StateError::DeadlinePassed { waited })) => {
                self.inner().abort_kernels(waited)
            }
            result => result,
        }
    }

    /// Returns whether all work in the stream is done.
    ///
    /// # Errors
    ///
    /// [`StateError::Capturing`]; the driver's error when a kernel failed.
    pub fn is_idle(&self) -> Result<bool> {
        self.context().refuse_capturing("a stream is asked whether it is idle")?;
        let _query = self.begin_enqueue("a query of the stream")?;
        self.context().cuda().bind()?;
        Ok(self.inner().is_all_enqueued()? && self.inner().is_idle()?)
    }

    /// Returns whether the stream's work goes to a graph, of this crate's or of another library
    /// that has begun a capture, such as torch.
    ///
    /// CUDA: `cuStreamIsCapturing`.
    ///
    /// # Errors
    ///
    /// The driver's errors; for the default stream, if a stream that waits for it is captured.
    #[doc(alias = "cudaStreamIsCapturing")]
    pub fn is_capturing(&self) -> Result<bool> {
        Ok(self.capture_id()?.is_some())
    }

    /// Returns the number of the capture that the stream's work goes to, whichever library began
    /// it: each capture of the process has another one.
    ///
    /// # Errors
    ///
    /// Those of [`is_capturing`](Self::is_capturing).
    #[doc(hidden)]
    pub fn capture_id(&self) -> Result<Option<u64>> {
        self.context().cuda().bind()?;
        Ok(self.handle().capture()?.map(|capture| capture.id))
    }

    /// Returns where the stream's work goes. The graph of another library then holds what it may
    /// use.
    pub(super) fn target(&self) -> Result<Target> {
        let context = self.context();
        if self.is_default() || !self.inner().may_be_captured() {
            return Ok(Target::Gpu);
        }
        context.cuda().bind()?;
        let Some(capture) = self.handle().capture()? else { return Ok(Target::Gpu) };
        if context.with_capture(|own| own.id == Some(capture.id)) == Some(true) {
            return Ok(Target::Graph);
        }
        context.hold_for_capture(self.inner(), &capture)?;
        Ok(Target::ForeignGraph(capture.id))
    }

    /// Begins a call that enqueues work to this stream, before it checks what it uses.
    ///
    /// # Errors
    ///
    /// [`StateError::Capturing`] while another thread captures a stream;
    /// [`StateError::BeforeDeferred`]; the errors of [`give_to_capture`](Self::give_to_capture).
    pub(crate) fn begin_enqueue(&self, what: &'static str) -> Result<Enqueue<'_>> {
        refuse_before_deferred(self.context(), Some(self), what)?;
        let mut enqueue = self.context().begin_enqueue()?;
        enqueue.target = self.target()?;
        Ok(enqueue)
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

    /// Returns the driver's handle (`CUstream`, which is `cudaStream_t`), for use with other
    /// libraries.
    #[must_use]
    pub fn as_raw(&self) -> *mut c_void {
        self.context().share_handles();
        self.handle().raw().cast()
    }

    /// Returns whether it is the context's default stream, which cannot be captured.
    #[must_use]
    pub fn is_default(&self) -> bool {
        self.handle().raw().is_null()
    }

    /// Returns whether it is the same stream of the driver.
    pub(super) fn is(&self, other: &Self) -> bool {
        self.handle().raw() == other.handle().raw()
    }

    /// Returns the context that the stream belongs to.
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

    /// Returns a reference that lasts while the stream may have work.
    pub(super) fn weak(&self) -> Weak<StreamInner> {
        Arc::downgrade(self.inner())
    }

    /// Registers an operation of a communicator that the call `enqueue` has enqueued, and the
    /// objects `kept` that it uses.
    pub(crate) fn register_operation(
        &self,
        enqueue: &Enqueue<'_>,
        communicator: &Arc<dyn Owner>,
        kept: Vec<KeepAlive>,
    ) {
        if enqueue.target == Target::Graph {
            self.context().with_capture(|capture| capture.add(communicator, kept));
            return;
        }
        let issuer = communicator.issuer();
        // An operation that is in the stream needs nothing kept: memory is freed when the stream is
        // idle. A non-blocking communicator may enqueue it later.
        let kept = if issuer.is_blocking() { Vec::new() } else { kept };
        self.inner().operations.lock().add(issuer, kept);
    }

    /// Registers a kernel that the call `enqueue` has launched: the number of the communicator that
    /// its arguments are of, and the abort flag of its device communicator.
    pub(crate) fn register_launch(
        &self,
        enqueue: &Enqueue<'_>,
        kernel: &'static str,
        communicator: Option<u64>,
        flag: Option<Arc<AbortFlag>>,
    ) {
        let context = self.context();
        let add = |capture: &mut Capture| {
            capture.launches = true;
            let issuer = communicator.and_then(|number| context.issuer(number));
            capture.kernel_communicators.extend(issuer);
            if let Some(flag) = &flag {
                capture.add_kernel(kernel, Arc::clone(flag));
            }
        };
        if enqueue.target == Target::Graph {
            context.with_capture(add);
        } else if let Some(flag) = flag {
            self.inner().operations.lock().add_kernel(flag);
        }
    }

    /// Registers a communicator that has operations in the stream.
    pub(super) fn register_communicator(&self, issuer: Arc<dyn Issuer>) {
        self.inner().operations.lock().add(issuer, Vec::new());
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Stream({:p}, {:?})", self.handle().raw(), self.context())
    }
}

impl StreamInner {
    /// Returns whether nothing but a wait for it needs it any more.
    pub(super) fn is_dropped(&self) -> bool {
        self.is_dropped.load(Ordering::Acquire)
    }

    /// Returns the abort flags of kernels that may still run.
    pub(super) fn running(&self) -> Vec<Arc<AbortFlag>> {
        self.operations.lock().running()
    }

    /// Returns the number of registrations so far.
    pub(super) fn count(&self) -> u64 {
        self.operations.lock().count()
    }

    /// Forgets the operations that were registered before `count` registrations, and whether they
    /// were aborted. They are done.
    pub(super) fn forget_operations(&self, count: u64) {
        let done = self.operations.lock().take(count);
        drop(done);
    }

    /// Returns whether its driver's stream may be gone. A call that has begun before may use it.
    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Returns whether it is known that a capture is not in progress.
    pub(super) fn has_left_capture(&self, capture: u64) -> bool {
        let Ok(_query) = self.context.begin_query() else { return false };
        if self.is_over() || self.context.cuda().bind().is_err() {
            return false;
        }
        self.handle.capture().is_ok_and(|now| now.is_none_or(|now| now.id != capture))
    }

    /// Notes that its last handle was dropped and its work is done. If another part of the program
    /// destroys the driver's stream, calls of other threads that query it have returned then.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        if self.handle.is_foreign() {
            // After this time the drop goes on, as one that cannot wait for the stream's work.
            let _ = self.context.wait_for_enqueues(Some(self.context.stream_timeout()));
        }
    }
}

impl Drop for LastHandle {
    fn drop(&mut self) {
        let context = &self.inner.context;
        let limit = context.stream_timeout();
        match self.inner.drain(Some(limit)) {
            Ok(()) => {}
            Err(_) if context.postpones_frees() => {
                let last = Arc::new(Self { inner: Arc::clone(&self.inner) });
                return context.postpone_free(Stream { last });
            }
            // Nothing runs there any more.
            Err(Error::Driver(_)) => {}
            Err(error) => {
                let is_late = matches!(error, Error::State(StateError::DeadlinePassed { .. }));
                if is_late && !limit.is_zero() {
                    context.mark_stuck(limit);
                }
                // The next wait for all streams waits for it too, and then removes it.
                return self.inner.is_dropped.store(true, Ordering::Release);
            }
        }
        context.remove_stream(&self.inner);
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        // The stream is destroyed on this thread.
        self.context.bind_to_free();
    }
}
