//! CUDA graphs: work that is captured once and launched repeatedly.

use std::any::Any;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use super::abort::AbortFlag;
use super::capture::Capture;
use super::context::Context;
use super::in_group::refuse_inside;
use super::issuer::{Issuer, Owner, Resource};
use super::recorder::Operation;
use super::stream::Stream;
use crate::error::{Error, LaunchError, Result, StateError};
use crate::sys::cuda::graph::{GraphExecHandle, GraphHandle};

/// Work that was captured from a stream: collectives, copies, fills, kernel launches, events.
///
/// Made by [`Stream::capture`]. It keeps alive the memory, windows and operators that captured
/// operations use; the caller keeps alive the arguments of captured kernel launches. It is closed
/// when the first of the communicators whose operations it contains ends.
///
/// ```no_run
/// # use devcomm_host::{Communicator, ReduceOp, Result, Stream, SymmetricBuffer};
/// # fn f(comm: &Communicator, a: &SymmetricBuffer<f32>, stream: &Stream) -> Result<()> {
/// let graph = stream.capture(|| comm.all_reduce(a, a, ReduceOp::Sum, stream))?;
/// for _ in 0..100 {
///     graph.launch(stream)?;
/// }
/// stream.synchronize()
/// # }
/// ```
pub struct Graph {
    inner: Rc<Inner>,
}

struct Inner {
    exec: RefCell<Option<Exec>>,
    context: Context,
    len: usize,
}

/// An executable graph and the objects that it needs. Fields are dropped in this order.
struct Exec {
    handle: GraphExecHandle,
    /// Kept because some drivers refer to it from the executable graph.
    _graph: GraphHandle,
    communicators: Vec<Arc<dyn Issuer>>,
    kernels: Vec<(&'static str, Arc<AbortFlag>)>,
    _owners: Vec<Rc<dyn Owner>>,
    /// The memory, windows and operators that the operations use.
    _keep: Vec<Rc<dyn Any>>,
}

impl Stream {
    /// Captures the work that `f` enqueues to this stream, and to streams that wait for its events,
    /// instead of running it. All ranks must capture the same operations.
    ///
    /// During the capture, waits, copies from or to the host, allocations and registrations on this
    /// rank's GPU fail with [`StateError::Capturing`].
    ///
    /// # Errors
    ///
    /// Those of `f`; [`Error::InvalidInput`] for the default stream; [`StateError::Capturing`]
    /// inside another capture; [`StateError::InGroup`] inside a group; the driver's error, when an
    /// operation cannot be captured.
    pub fn capture<E: From<Error>>(&self, f: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        refuse_inside("a capture")?;
        let context = self.context();
        if self.as_raw().is_null() {
            return Err(Error::invalid("the default stream cannot be captured").into());
        }
        context.refuse_capturing("another capture begins")?;
        context.health().check()?;
        context.cuda().bind()?;
        self.handle().begin_capture()?;
        let open = OpenCapture(self);
        context.capture().replace(Some(Capture::default()));
        f()?;
        Ok(open.close()?)
    }
}

/// Guard of a capture: ends it, also when the closure fails or panics.
struct OpenCapture<'a>(&'a Stream);

impl OpenCapture<'_> {
    fn close(self) -> Result<Graph> {
        let stream = self.0;
        std::mem::forget(self);
        let context = stream.context();
        let capture = context.capture().take().unwrap_or_default();
        context.cuda().bind()?;
        let graph = stream.handle().end_capture()?;
        let (len, handle) = (graph.len()?, graph.instantiate()?);
        let Capture { owners, keep, kernels } = capture;
        let communicators = owners.iter().map(|owner| owner.issuer()).collect();
        let exec = Exec {
            handle,
            _graph: graph,
            communicators,
            kernels,
            _owners: owners.clone(),
            _keep: keep,
        };
        let exec = RefCell::new(Some(exec));
        let inner = Rc::new(Inner { exec, context: context.clone(), len });
        let resource: Rc<dyn Resource> = Rc::clone(&inner) as _;
        owners.iter().for_each(|owner| owner.adopt(Rc::downgrade(&resource)));
        Ok(Graph { inner })
    }
}

impl Drop for OpenCapture<'_> {
    fn drop(&mut self) {
        let context = self.0.context();
        let capture = context.capture().take();
        let _ = context.cuda().bind();
        // End the capture first: dropping `capture` may free memory, which waits for the streams,
        // and that is refused during a capture.
        let _ = self.0.handle().end_capture();
        drop(capture);
    }
}

impl Graph {
    /// Enqueues the captured work to `stream`. All ranks must launch their graphs.
    ///
    /// # Errors
    ///
    /// [`StateError::Closed`]; [`StateError::CommunicatorEnded`]; [`LaunchError::Refused`] when the
    /// device communicator of a kernel in it was aborted or closed; [`Error::InvalidInput`] for a
    /// stream of another context; [`WorldError::RankLost`](crate::WorldError::RankLost); the
    /// driver's errors.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        let context = &self.inner.context;
        if !stream.context().is(context) {
            return Err(Error::invalid("a graph is launched to a stream of another context"));
        }
        context.health().check()?;
        let exec = self.inner.exec.borrow();
        let exec =
            exec.as_ref().ok_or(StateError::Closed { what: "the graph", rank: self.rank() })?;
        for communicator in &exec.communicators {
            // Operations of a communicator that has ended would use freed memory.
            communicator.require_live()?;
        }
        for (kernel, flag) in &exec.kernels {
            if let Some(refusal) = flag.refusal() {
                return Err(LaunchError::Refused { kernel, refusal }.into());
            }
        }
        context.cuda().bind()?;
        let _launch = context.recorder().begin(Operation::Graph(self.len()));
        // SAFETY: `exec` keeps memory and communicators; the kernels' arguments are promised by the
        // contract of their captured launches.
        unsafe { exec.handle.launch(stream.handle())? };
        for communicator in &exec.communicators {
            stream.register_communicator(Arc::clone(communicator));
        }
        for (kernel, flag) in &exec.kernels {
            stream.register_launch(kernel, Arc::clone(flag));
        }
        Ok(())
    }

    /// The number of graph nodes (`cuGraphGetNodes`).
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "the number of nodes is for information")]
    pub fn len(&self) -> usize {
        self.inner.len
    }

    /// Whether it can be launched.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        let exec = self.inner.exec.borrow();
        exec.as_ref().is_some_and(|exec| {
            exec.communicators.iter().all(|communicator| communicator.is_live())
                && exec.kernels.iter().all(|(_, flag)| flag.refusal().is_none())
        })
    }

    /// Destroys the graph and releases what it keeps alive, after waiting for this rank's streams.
    /// Idempotent.
    ///
    /// # Errors
    ///
    /// Those of waiting for the streams.
    pub fn close(&self) -> Result<()> {
        self.inner.close()
    }

    fn rank(&self) -> usize {
        let exec = self.inner.exec.borrow();
        exec.as_ref().and_then(|exec| exec.communicators.first()).map_or(0, |first| first.rank())
    }
}

impl Resource for Inner {
    fn is_open(&self) -> bool {
        self.exec.borrow().is_some()
    }

    fn close(&self) -> Result<()> {
        if self.exec.borrow().is_none() {
            return Ok(());
        }
        self.context.drain()?;
        let _ = self.context.cuda().bind();
        drop(self.exec.take());
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.exec.borrow().is_none() {
            return;
        }
        let context = self.context.clone();
        let moved = || {
            let exec = RefCell::new(self.exec.take());
            Self { exec, context: context.clone(), len: self.len }
        };
        if context.can_free_or_keep("a graph", moved) {
            let _ = self.context.cuda().bind();
        } else {
            std::mem::forget(self.exec.take());
        }
    }
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Graph({} operations)", self.inner.len)
    }
}
