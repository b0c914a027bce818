//! Streams: queues of operations, of which the machine polls the first.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ffi::c_uint;
use std::rc::Rc;
use std::task::Poll;

use devcomm_sys::driver::{CUresult, CUstream};

use super::graph::Joined;
use super::{Ask, Refused, ask, ask_until};
use crate::machine::core::Core;

/// Something that a stream does.
pub(crate) trait StreamOp {
    /// It is now in the queue of a stream, not in a capture: what has an order among the operations
    /// of all streams takes its number.
    fn enqueued(&mut self, _core: &Core) {}

    /// Goes on as far as it can. Called when everything before it in its stream is done, again and
    /// again until it is ready.
    fn poll(&mut self, core: &Core) -> Poll<()>;

    /// Whether it has a kernel on the GPU.
    fn runs_kernel(&self) -> bool {
        false
    }

    /// What it is and waits for, for reports.
    fn describe(&self, core: &Core) -> String;

    /// The same anew: of a graph, each launch runs its own.
    fn duplicate(&self) -> Box<dyn StreamOp>;
}

/// One stream.
pub(crate) struct Stream {
    gpu: usize,
    queue: RefCell<VecDeque<Box<dyn StreamOp>>>,
    /// Its handle is good for nothing any more.
    destroyed: Cell<bool>,
    /// The capture that it is part of.
    pub(super) joined: RefCell<Option<Joined>>,
}

impl Stream {
    pub(crate) fn new(gpu: usize) -> Self {
        let (queue, destroyed, joined) = Default::default();
        Self { gpu, queue, destroyed, joined }
    }

    /// The handle of a GPU's default stream.
    pub(crate) fn default_of(gpu: usize) -> u64 {
        gpu as u64 + 1
    }

    pub(crate) fn gpu(&self) -> usize {
        self.gpu
    }

    /// Whether it was destroyed and has done what was left.
    pub(crate) fn is_over(&self) -> bool {
        self.destroyed.get() && self.is_idle()
    }

    /// Whether it has nothing to do.
    pub(crate) fn is_idle(&self) -> bool {
        self.queue.borrow().is_empty()
    }

    /// Appends an operation.
    pub(crate) fn push(&self, core: &Core, mut op: Box<dyn StreamOp>) {
        if let Some(joined) = &mut *self.joined.borrow_mut() {
            return joined.push(op);
        }
        op.enqueued(core);
        self.queue.borrow_mut().push_back(op);
    }

    /// Goes on as far as it can; says whether an operation ended.
    pub(crate) fn advance(&self, core: &Core) -> bool {
        let mut moved = false;
        // Out of the queue meanwhile: an operation that fails clears it.
        while let Some(mut op) = self.take_head() {
            if op.poll(core).is_pending() {
                if core.check().is_ok() {
                    self.queue.borrow_mut().push_front(op);
                }
                break;
            }
            moved = true;
        }
        moved
    }

    fn take_head(&self) -> Option<Box<dyn StreamOp>> {
        self.queue.borrow_mut().pop_front()
    }

    /// Drops all operations.
    pub(crate) fn clear(&self) {
        self.queue.take();
    }

    /// Whether a kernel of it is on the GPU.
    pub(crate) fn runs_kernel(&self) -> bool {
        self.queue.borrow().front().is_some_and(|op| op.runs_kernel())
    }

    /// What the first operation waits for.
    pub(crate) fn describe(&self, core: &Core) -> Option<String> {
        self.queue.borrow().front().map(|op| op.describe(core))
    }
}

impl Core {
    /// The stream of a handle that `gpu`'s context is current for; NULL is its default stream.
    pub(crate) fn stream(&self, gpu: usize, stream: CUstream) -> Refused<Rc<Stream>> {
        let handle = if stream.is_null() { Stream::default_of(gpu) } else { stream as u64 };
        let streams = self.streams.borrow();
        let stream = streams.get(&handle).filter(|stream| !stream.destroyed.get());
        stream.cloned().ok_or_else(|| CUresult::CUDA_ERROR_INVALID_HANDLE.into())
    }
}

impl Ask<'_> {
    pub(super) fn stream(&self, stream: CUstream) -> Refused<Rc<Stream>> {
        self.core.stream(self.gpu()?, stream)
    }

    /// A stream that is waited for: not one that is captured.
    fn waited(&self, stream: CUstream) -> Refused<Rc<Stream>> {
        let stream = self.stream(stream)?;
        if let Some(joined) = &*stream.joined.borrow() {
            joined.spoil(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED.into());
        }
        Ok(stream)
    }

    /// Answers once the stream has nothing to do.
    pub(super) fn when_idle(
        &self,
        stream: CUstream,
        answer: impl FnOnce() -> Refused<()>,
    ) -> Poll<Refused<()>> {
        match self.waited(stream) {
            Ok(stream) if !stream.is_idle() => Poll::Pending,
            Ok(_) => Poll::Ready(answer()),
            Err(refusal) => Poll::Ready(Err(refusal)),
        }
    }
}

pub(super) unsafe fn create(stream: *mut CUstream, _flags: c_uint) -> CUresult {
    ask("cuStreamCreate", |ask| {
        let handle = ask.core.new_handle();
        ask.core.streams.borrow_mut().insert(handle, Rc::new(Stream::new(ask.gpu()?)));
        // SAFETY: the module's.
        unsafe { stream.write(handle as CUstream) };
        Ok(())
    })
}

/// What it still has to do goes on.
pub(super) unsafe fn destroy(stream: CUstream) -> CUresult {
    ask("cuStreamDestroy", |ask| {
        let streams = ask.core.streams.borrow();
        let stream = streams.get(&(stream as u64)).filter(|stream| !stream.destroyed.get());
        let stream = stream.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        stream.destroyed.set(true);
        Ok(())
    })
}

pub(super) unsafe fn query(stream: CUstream) -> CUresult {
    ask("cuStreamQuery", |ask| match ask.waited(stream)?.is_idle() {
        true => Ok(()),
        false => Err(CUresult::CUDA_ERROR_NOT_READY.into()),
    })
}

pub(super) unsafe fn synchronize(stream: CUstream) -> CUresult {
    ask_until("cuStreamSynchronize", &|ask| ask.when_idle(stream, || Ok(())))
}
