//! CUDA streams: queues of operations. The machine polls the head of each queue.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ffi::c_uint;
use std::rc::Rc;
use std::task::Poll;

use devcomm_sys::driver::{CUresult, CUstream};

use super::graph::StreamCapture;
use super::{CallContext, CudaResult, call, call_until};
use crate::base::error::Error;
use crate::base::ids::GridId;
use crate::base::timeline::{Span, Timeline};
use crate::machine::core::Core;
use crate::race::{Clock, Races, Run, Sequence};

/// The handle `CU_STREAM_PER_THREAD`.
const PER_THREAD: usize = 2;

/// Returns whether a handle is the default stream: NULL or `CU_STREAM_LEGACY`.
pub(super) fn is_default(stream: CUstream) -> bool {
    const LEGACY: usize = 1;
    stream.addr() <= LEGACY
}

/// An operation in a stream.
pub(crate) trait StreamOp {
    /// Takes a sequence number, if the operation is ordered across streams. Called when the
    /// operation enters a stream's queue, not when it is captured.
    fn enqueued(&mut self, _core: &Core) {}

    /// Makes progress. Called once all earlier operations of the stream are complete, until it
    /// returns `Ready`.
    fn poll(&mut self, core: &Core) -> Poll<()>;

    /// Returns the grid of the operation's running kernel, if it lets a dependent launch begin.
    fn triggering_grid(&self, _core: &Core) -> Option<GridId> {
        None
    }

    /// Begins, if the operation is a dependent launch. Called while the operation before it has the
    /// running kernel `previous`, which lets a dependent launch begin.
    fn begin_early(&mut self, _core: &Core, _previous: GridId) {}

    /// Returns whether the operation has a running kernel.
    fn runs_kernel(&self) -> bool {
        false
    }

    /// Returns the operation's kernel, if an argument of the launch has a word that `is_given`.
    fn kernel_given(&self, _is_given: &dyn Fn(usize) -> bool) -> Option<&'static str> {
        None
    }

    /// Returns the kind of the operation, such as "a copy".
    fn name(&self) -> String;

    /// Describes the operation and what it waits for, for error messages.
    fn describe(&self, _core: &Core) -> String {
        format!("{} is next", self.name())
    }

    /// Returns a copy that has not started, for one launch of a graph.
    fn duplicate(&self) -> Box<dyn StreamOp>;
}

/// An operation in a stream's queue.
struct Queued {
    op: Box<dyn StreamOp>,
    /// The accesses that the host knew when it enqueued the operation.
    enqueued: Clock,
    /// The run, once the operation has started.
    run: Option<Run>,
    /// The time at which the operation started.
    began: u64,
}

impl Queued {
    /// Performs `action` as a part of the operation; starts the operation first if it has not
    /// started.
    fn within<R>(
        &mut self,
        races: &Races,
        stream: &Stream,
        action: impl FnOnce(&mut dyn StreamOp) -> R,
    ) -> R {
        let Self { op, enqueued, run, .. } = self;
        let run = run.get_or_insert_with(|| races.start(&stream.sequence, stream.gpu, enqueued));
        races.within(run, || action(&mut **op))
    }
}

/// One stream.
pub(crate) struct Stream {
    /// The program's handle, or [`default_of`](Self::default_of) the GPU.
    handle: u64,
    gpu: usize,
    queue: RefCell<VecDeque<Queued>>,
    /// The order of its operations, for the detection of races.
    sequence: Sequence,
    /// Whether the stream's handle was destroyed.
    destroyed: Cell<bool>,
    /// The capture state, if it is being captured.
    pub(super) capturing: RefCell<Option<StreamCapture>>,
}

impl Stream {
    pub(crate) fn new(handle: u64, gpu: usize, races: &Races) -> Self {
        let (queue, destroyed, capturing) = Default::default();
        Self { handle, gpu, queue, sequence: races.host_sequence(), destroyed, capturing }
    }

    /// Returns the handle of a GPU's default stream, which programs do not know.
    pub(crate) fn default_of(gpu: usize) -> u64 {
        (gpu as u64 + 1) << 4
    }

    pub(crate) fn gpu(&self) -> usize {
        self.gpu
    }

    /// Returns whether it was destroyed and its queue is empty.
    pub(crate) fn is_over(&self) -> bool {
        self.destroyed.get() && self.is_idle()
    }

    /// Returns whether its queue is empty.
    pub(crate) fn is_idle(&self) -> bool {
        self.queue.borrow().is_empty()
    }

    /// Appends an operation.
    pub(crate) fn push(&self, core: &Core, mut op: Box<dyn StreamOp>) -> CudaResult<()> {
        if let Some(capturing) = &mut *self.capturing.borrow_mut() {
            return capturing.push(op);
        }
        op.enqueued(core);
        let enqueued = core.memory.races.host();
        self.queue.borrow_mut().push_back(Queued { op, enqueued, run: None, began: 0 });
        Ok(())
    }

    /// Runs operations until one is pending; returns whether an operation completed.
    pub(crate) fn advance(&self, core: &Core) -> bool {
        let races = &core.memory.races;
        let mut has_progressed = false;
        // The operation is not in the queue while it is polled: its failure clears the queue.
        while let Some(mut head) = self.take_head() {
            if head.run.is_none() {
                head.began = core.gpus.timeline.now();
            }
            let before = self.clock();
            let poll = |op: &mut dyn StreamOp| {
                // An operation that began early is now also after the end of the previous one.
                races.learn_here(&before);
                op.poll(core)
            };
            if head.within(races, self, poll).is_pending() {
                if let Some(grid) = head.op.triggering_grid(core)
                    && let Some(mut next) = self.take_head()
                {
                    next.within(races, self, |op| op.begin_early(core, grid));
                    self.put_back(core, next);
                }
                self.put_back(core, head);
                break;
            }
            core.gpus.timeline.tick();
            self.record(&core.gpus.timeline, &head);
            if let Some(run) = head.run {
                let ended = races.end(run);
                races.join(&mut self.sequence.clock.borrow_mut(), &ended);
            }
            has_progressed = true;
        }
        has_progressed
    }

    /// Returns the accesses that are before the end of the last completed operation.
    pub(crate) fn clock(&self) -> Clock {
        self.sequence.clock.borrow().clone()
    }

    fn take_head(&self) -> Option<Queued> {
        self.queue.borrow_mut().pop_front()
    }

    /// Puts an operation back, unless a failure has cleared the queue: then it is dropped.
    fn put_back(&self, core: &Core, op: Queued) {
        if core.check().is_ok() {
            self.queue.borrow_mut().push_front(op);
        }
    }

    /// Drops all queued operations.
    pub(crate) fn clear(&self, timeline: &Timeline) {
        let queue = self.queue.take();
        queue.front().filter(|head| head.run.is_some()).inspect(|head| self.record(timeline, head));
    }

    /// Records an operation that has ended.
    fn record(&self, timeline: &Timeline, Queued { op, began: begin, .. }: &Queued) {
        let (begin, rank, waits, at) = (*begin, self.gpu, false, None);
        timeline.span(|end| {
            let row = timeline.stream(rank, self.handle);
            Span { rank, row, begin, end, name: op.name(), waits, at }
        });
    }

    /// Returns whether the first operation has a running kernel.
    pub(crate) fn runs_kernel(&self) -> bool {
        self.queue.borrow().front().is_some_and(|head| head.op.runs_kernel())
    }

    /// Returns the first kernel, running or queued, that has a word in its arguments that
    /// `is_given`.
    fn kernel_given(&self, is_given: &dyn Fn(usize) -> bool) -> Option<&'static str> {
        self.queue.borrow().iter().find_map(|op| op.op.kernel_given(is_given))
    }

    /// Fails if the stream is captured, and invalidates the capture.
    fn refuse_captured(&self) -> CudaResult<()> {
        if let Some(capturing) = &*self.capturing.borrow() {
            capturing.invalidate(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED.into());
        }
        Ok(())
    }

    /// Describes the first operation and what it waits for.
    pub(crate) fn describe(&self, core: &Core) -> Option<String> {
        self.queue.borrow().front().map(|head| head.op.describe(core))
    }
}

impl Core {
    /// Fails the machine if a kernel of `gpu` that has not ended was given the memory that the host
    /// now frees by `call`.
    ///
    /// # Errors
    ///
    /// Returns the report.
    pub(crate) fn check_unused(
        &self,
        call: &'static str,
        what: impl Fn() -> String,
        gpu: usize,
        is_given: impl Fn(usize) -> bool,
    ) -> CudaResult<()> {
        let streams = self.streams.borrow();
        let of_gpu = streams.values().filter(|stream| stream.gpu == gpu);
        let kernel = of_gpu.filter_map(|stream| stream.kernel_given(&is_given)).next();
        drop(streams);
        match kernel {
            Some(kernel) if self.check().is_ok() => {
                self.fail(Error::Closed { call, what: what(), kernel, rank: gpu });
                self.check()
            }
            _ => Ok(()),
        }
    }

    /// Returns the stream of a handle, with `gpu`'s context current.
    pub(crate) fn stream(&self, gpu: usize, stream: CUstream) -> CudaResult<Rc<Stream>> {
        let handle = match stream.addr() {
            _ if is_default(stream) => Stream::default_of(gpu),
            PER_THREAD => return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED.into()),
            other => other as u64,
        };
        let streams = self.streams.borrow();
        let stream = streams.get(&handle).filter(|stream| !stream.destroyed.get());
        stream.cloned().ok_or_else(|| CUresult::CUDA_ERROR_INVALID_HANDLE.into())
    }
}

impl CallContext<'_> {
    pub(super) fn stream(&self, stream: CUstream) -> CudaResult<Rc<Stream>> {
        self.core.stream(self.gpu()?, stream)
    }

    /// Returns a stream to query or synchronize. Fails and invalidates the capture of a captured
    /// stream.
    fn synchronizable(&self, stream: CUstream) -> CudaResult<Rc<Stream>> {
        let stream = self.stream(stream)?;
        stream.refuse_captured()?;
        Ok(stream)
    }

    /// Runs `body` once the stream is idle.
    pub(super) fn when_idle(
        &self,
        stream: CUstream,
        body: impl FnOnce() -> CudaResult<()>,
    ) -> Poll<CudaResult<()>> {
        match self.synchronizable(stream) {
            Ok(stream) if !stream.is_idle() => Poll::Pending,
            Ok(stream) => {
                self.core.memory.races.host_learns(&stream.clock());
                Poll::Ready(body())
            }
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl CallContext<'_> {
    /// Returns `Ready` once all streams of the current context are idle. If a stream is captured,
    /// the call fails and invalidates the capture.
    fn when_all_idle(&self) -> Poll<CudaResult<()>> {
        let gpu = match self.gpu() {
            Ok(gpu) => gpu,
            Err(error) => return Poll::Ready(Err(error)),
        };
        let streams = self.core.streams.borrow();
        let of_gpu = || streams.values().filter(|stream| stream.gpu == gpu);
        for stream in of_gpu() {
            if let Err(error) = stream.refuse_captured() {
                return Poll::Ready(Err(error));
            }
        }
        if !of_gpu().all(|stream| stream.is_idle()) {
            return Poll::Pending;
        }
        of_gpu().for_each(|stream| self.core.memory.races.host_learns(&stream.clock()));
        Poll::Ready(Ok(()))
    }
}

pub(super) unsafe fn create(stream: *mut CUstream, _flags: c_uint) -> CUresult {
    call("cuStreamCreate", |cx| {
        let handle = cx.core.new_handle();
        let new = Stream::new(handle, cx.gpu()?, &cx.core.memory.races);
        cx.core.streams.borrow_mut().insert(handle, Rc::new(new));
        // SAFETY: the program passes a valid out pointer, as CUDA requires.
        unsafe { stream.write(handle as CUstream) };
        Ok(())
    })
}

/// Removes the stream's handle. Queued operations still run.
pub(super) unsafe fn destroy(stream: CUstream) -> CUresult {
    call("cuStreamDestroy", |cx| {
        let streams = cx.core.streams.borrow();
        let handle = stream as u64;
        let is_created = |stream: &&Rc<Stream>| handle != Stream::default_of(stream.gpu);
        let stream = streams.get(&handle).filter(is_created);
        let stream = stream.filter(|stream| !stream.destroyed.get());
        stream.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?.destroyed.set(true);
        Ok(())
    })
}

pub(super) unsafe fn query(stream: CUstream) -> CUresult {
    call("cuStreamQuery", |cx| match cx.when_idle(stream, || Ok(())) {
        Poll::Ready(result) => result,
        Poll::Pending => Err(CUresult::CUDA_ERROR_NOT_READY.into()),
    })
}

pub(super) unsafe fn synchronize(stream: CUstream) -> CUresult {
    call_until("cuStreamSynchronize", &|cx| cx.when_idle(stream, || Ok(())))
}

/// Waits for all streams of the current context.
pub(super) unsafe fn synchronize_all() -> CUresult {
    call_until("cuCtxSynchronize", &|cx| cx.when_all_idle())
}
