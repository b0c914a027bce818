//! Streams, and waits for them that end when a rank is lost.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::c_void;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::abort::{self, AbortFlag};
use super::context::{Context, ContextStream};
use super::event::Event;
use super::issuer::{Issuer, Owner};
use crate::error::{AbortCause, Error, NcclError, Result, StateError, WorldError};
use crate::machine::Wakes;
use crate::sys::cuda::stream::StreamHandle;

/// How often a wait asks NCCL for asynchronous errors.
pub(super) const ASYNC_ERROR_INTERVAL: Duration = Duration::from_millis(20);
/// How long kernels may take to exit once their abort flag is set: far more than the few thousand
/// polls between two looks at it.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// Work in order on one GPU. Clones are the same stream. Dropping the last one waits for its work.
#[derive(Clone)]
pub struct Stream {
    inner: Rc<StreamInner>,
}

pub(super) struct StreamInner {
    handle: StreamHandle,
    context: Context,
    /// Communicators whose operations may not be done yet.
    pending: RefCell<Vec<Arc<dyn Issuer>>>,
    /// Device communicators whose kernels may not have ended.
    running: RefCell<Vec<Arc<AbortFlag>>>,
    /// What non-blocking communicators may not have got hold of yet.
    keep: RefCell<Vec<Rc<dyn Any>>>,
}

impl Context {
    /// A new stream. It is non-blocking: it runs concurrently with every other stream, the default
    /// stream included.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn stream(&self) -> Result<Stream> {
        Ok(Stream::of(self, self.cuda().create_stream()?))
    }

    /// The default stream of this GPU's primary context, the same for every caller. It cannot be
    /// captured, and is never destroyed.
    ///
    /// It is CUDA's legacy default stream: it and streams that others made without
    /// `cudaStreamNonBlocking` wait for each other. Streams of this crate are non-blocking: order
    /// them with events.
    #[doc(alias = "cudaStreamLegacy")]
    #[doc(alias = "CU_STREAM_LEGACY")]
    #[must_use]
    pub fn default_stream(&self) -> Stream {
        let mut known = self.known_default_stream().borrow_mut();
        if let Some(inner) = known.upgrade() {
            return Stream { inner };
        }
        let stream = Stream::of(self, self.cuda().default_stream());
        *known = Rc::downgrade(&stream.inner);
        stream
    }
}

impl Stream {
    fn of(context: &Context, handle: StreamHandle) -> Self {
        let (pending, running, keep) = Default::default();
        let inner = StreamInner { handle, context: context.clone(), pending, running, keep };
        let inner = Rc::new(inner);
        context.register_stream(&(Rc::clone(&inner) as _));
        Self { inner }
    }

    /// A stream that another part of the program made (`CUstream`, which is `cudaStream_t`).
    /// Dropping it waits for its work and does not destroy it. The default stream is
    /// [`Context::default_stream`].
    ///
    /// # Safety
    ///
    /// It is of the context's GPU and its primary context, and lives as long as this stream.
    #[must_use]
    pub unsafe fn from_raw(context: &Context, raw: *mut c_void) -> Self {
        // SAFETY: the caller's contract.
        Self::of(context, unsafe { context.cuda().foreign_stream(raw.cast(), None) })
    }

    /// A stream of cudarc's, which it keeps alive.
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
        let theirs = stream.context();
        if !context.cuda().is(theirs.cu_ctx()) {
            return Err(Error::invalid(format!(
                "cudarc's stream is of GPU {} and another context than that of GPU {}",
                theirs.ordinal(),
                context.ordinal()
            )));
        }
        let keep: Box<dyn Any> = Box::new(Arc::clone(stream));
        // SAFETY: a stream of this very context, which the Arc keeps alive.
        let handle = unsafe { context.cuda().foreign_stream(stream.cu_stream(), Some(keep)) };
        Ok(Self::of(context, handle))
    }

    /// Waits until all work in the stream is done, operations of non-blocking communicators
    /// included.
    ///
    /// # Errors
    ///
    /// [`WorldError::RankLost`] soon after a rank is lost while work is left;
    /// [`StateError::CommunicatorEnded`] when an operation was cut short by an abort;
    /// [`LaunchError::KernelAborted`](crate::LaunchError::KernelAborted), once, when kernels were;
    /// [`Error::Nccl`] when one failed; [`StateError::Capturing`]; the driver's error when a kernel
    /// failed.
    pub fn synchronize(&self) -> Result<()> {
        self.inner.wait()
    }

    /// As [`synchronize`](Self::synchronize), for at most `limit`. Then kernels that wait for other
    /// ranks are ended: those in this stream, and if that is not enough those in the other streams
    /// of the context, for which this one may wait.
    ///
    /// # Errors
    ///
    /// Also [`LaunchError::KernelAborted`](crate::LaunchError::KernelAborted) with what the kernels
    /// waited for: their device communicators cannot be used any more; everything else can.
    /// [`StateError::DeadlinePassed`] when there are none, or they have not ended a second later.
    /// The GPU is then taken to be stuck: what it may still use is not freed before the process
    /// ends.
    pub fn synchronize_within(&self, limit: Duration) -> Result<()> {
        match self.inner.wait_within(Some(limit)) {
            Err(Error::State(StateError::DeadlinePassed { waited }))
                if !self.context().is_stuck() =>
            {
                self.inner.end_kernels(waited)
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
        self.context().cuda().bind()?;
        Ok(self.inner.is_done()? && self.handle().is_idle()?)
    }

    /// Makes later work of this stream wait for `event`, which may be of another stream.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for an event of another context; the driver's.
    pub fn wait_event(&self, event: &Event) -> Result<()> {
        self.require(event)?;
        self.handle().wait_for(event.handle())
    }

    /// Marks this point of the stream in `event`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for an event of another context; the driver's.
    pub fn record(&self, event: &Event) -> Result<()> {
        self.require(event)?;
        self.handle().record(event.handle())
    }

    fn require(&self, event: &Event) -> Result<()> {
        if !event.context().is(self.context()) {
            return Err(Error::invalid("the event was made by another context than the stream"));
        }
        self.context().cuda().bind()
    }

    /// The driver's handle (`CUstream`, which is `cudaStream_t`), for use with other libraries.
    #[must_use]
    pub fn as_raw(&self) -> *mut c_void {
        self.handle().raw().cast()
    }

    /// The context that it was made by.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    pub(crate) fn handle(&self) -> &StreamHandle {
        &self.inner.handle
    }

    /// Notes that an operation of a communicator was enqueued, which uses `keep`.
    pub(crate) fn enqueued(&self, communicator: &Rc<dyn Owner>, keep: Vec<Rc<dyn Any>>) {
        let Some(keep) = self.context().captured(communicator, keep) else { return };
        let issuer = communicator.issuer();
        if !issuer.is_blocking() {
            self.inner.keep.borrow_mut().extend(keep);
        }
        self.expect(issuer);
    }

    /// Notes that a kernel with this device communicator was launched.
    pub(crate) fn launched(&self, kernel: &'static str, flag: Arc<AbortFlag>) {
        if let Some(capture) = self.context().capture().borrow_mut().as_mut() {
            return capture.take_in_kernel(kernel, flag);
        }
        let mut running = self.inner.running.borrow_mut();
        if !running.iter().any(|other| Arc::ptr_eq(other, &flag)) {
            running.push(flag);
        }
    }

    /// Notes that operations of a communicator are in the stream.
    pub(super) fn expect(&self, issuer: Arc<dyn Issuer>) {
        let mut pending = self.inner.pending.borrow_mut();
        if !pending.iter().any(|other| Arc::ptr_eq(other, &issuer)) {
            pending.push(issuer);
        }
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Stream({:p}, {:?})", self.as_raw(), self.context())
    }
}

impl StreamInner {
    /// Whether everything was handed to the GPU: a non-blocking communicator does that later.
    fn is_done(&self) -> Result<bool> {
        for handle in self.pending.borrow().iter().filter(|handle| !handle.is_blocking()) {
            if !poll(handle)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits until all work is done, and fails when an operation was cut short.
    ///
    /// It polls, because the driver's own wait would never return once a rank that the running
    /// kernel waits for is dead.
    fn wait_within(&self, limit: Option<Duration>) -> Result<()> {
        let machine = self.context.machine();
        let mut asked = machine.now();
        let result = self.poll(limit, || {
            if !self.is_done()? {
                return Ok(false);
            }
            let idle = self.is_idle()?;
            if !idle && machine.is_due(asked, ASYNC_ERROR_INTERVAL) {
                asked = machine.now();
                self.check_async_errors()?;
            }
            Ok(idle)
        });
        match result {
            Ok(()) => self.finished(),
            Err(lost @ Error::World(WorldError::RankLost { .. })) => {
                self.wait_for_exit();
                Err(lost)
            }
            Err(
                error @ (Error::State(StateError::CommunicatorEnded { .. })
                | Error::Nccl(NcclError::Failed { .. })),
            ) => {
                // It is reported once.
                self.pending.borrow_mut().clear();
                self.wait_for_exit();
                Err(self.context.prefer_lost_rank(error))
            }
            Err(error) => Err(error),
        }
    }

    /// A rank is lost or a communicator has failed, and the kernels were asked to exit: waits until
    /// they have, and logs what they waited for.
    fn wait_for_exit(&self) {
        let running = self.running.take();
        if running.is_empty() {
            return;
        }
        let _ = self.context.machine().poll(self.wakes(), Some(EXIT_TIMEOUT), || self.is_idle());
        if let Some(error) = abort::error(&running) {
            tracing::warn!("{error}");
        }
    }

    /// A deadline has passed: ends kernels until the stream is idle.
    fn end_kernels(&self, waited: Duration) -> Result<()> {
        let cause = AbortCause::Deadline { waited };
        let mut ended: Vec<Arc<AbortFlag>> = Vec::new();
        for flags in [self.running(), self.context.running()] {
            let known = ended.len();
            for flag in flags {
                if !ended.iter().any(|other| Arc::ptr_eq(other, &flag)) {
                    flag.raise(cause);
                    ended.push(flag);
                }
            }
            if ended.len() == known {
                continue;
            }
            match self.wait_within(Some(EXIT_TIMEOUT)) {
                Err(Error::State(StateError::DeadlinePassed { .. })) => {}
                // What it waited for were other streams' kernels.
                Ok(()) => return abort::error(&ended).map_or(Ok(()), Err),
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

    /// What ends a wait for it.
    fn wakes(&self) -> Wakes {
        Wakes::Idle(self.handle.raw())
    }

    fn is_idle(&self) -> Result<bool> {
        // Such an error stays with the context: nothing will run or finish in it again.
        self.handle.is_idle().inspect_err(|_| self.context.mark_stuck())
    }

    /// The stream is idle; were its operations and kernels finished, or cut short?
    fn finished(&self) -> Result<()> {
        // Dropped when nothing of the stream is borrowed any more: it may wait for this stream
        // itself.
        drop(self.keep.take());
        let pending = self.pending.take();
        match abort::error(&self.running.take()) {
            None => {}
            Some(error) => {
                // What it comes from.
                self.context.health().check()?;
                return Err(error);
            }
        }
        let aborted = pending.into_iter().find(|handle| handle.is_aborted());
        match aborted {
            None => Ok(()),
            Some(handle) => Err(handle.ended()),
        }
    }
}

impl ContextStream for StreamInner {
    fn wait(&self) -> Result<()> {
        self.wait_within(None)
    }

    fn drain(&self, limit: Duration) -> Result<()> {
        // One that has failed does nothing any more.
        self.poll(Some(limit), || Ok(self.is_done().unwrap_or(true) && self.is_idle()?))
    }

    fn check_async_errors(&self) -> Result<()> {
        let pending = self.pending.borrow().clone();
        pending.iter().try_for_each(|issuer| poll(issuer).map(drop))?;
        for issuer in self.running().iter().filter_map(|flag| flag.communicator()) {
            match poll(&issuer) {
                // It was aborted meanwhile: its kernels exit, and a wait for them says so.
                Err(Error::State(StateError::CommunicatorEnded { .. })) => {}
                polled => drop(polled?),
            }
        }
        Ok(())
    }

    fn running(&self) -> Vec<Arc<AbortFlag>> {
        self.running.borrow().clone()
    }
}

/// Whether a communicator's operations are over. One that has failed is aborted: otherwise its
/// kernels would wait forever for a lost rank.
fn poll(issuer: &Arc<dyn Issuer>) -> Result<bool> {
    issuer.poll().inspect_err(|_| Arc::clone(issuer).abort())
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        if self.context.is_capturing() {
            return;
        }
        // Memory is freed once the streams that are known are idle; this one is about to be
        // unknown.
        if self.drain(self.context.drop_timeout()).is_err() {
            self.context.mark_stuck();
        }
    }
}
