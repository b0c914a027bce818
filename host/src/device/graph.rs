//! CUDA graphs: work that is captured once and launched repeatedly.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;

use parking_lot::Mutex;

use super::abort::AbortFlag;
use super::capture::{Capture, Followed};
use super::context::Context;
use super::holds::OwnHold;
use super::in_group::refuse_inside;
use super::issuer::{Issuer, KeepAlive, Owner, Resource};
use super::lifecycle::Lifecycle;
use super::order;
use super::recorder::Operation;
use super::stream::Stream;
use crate::error::{Error, LaunchError, Result, StateError};
use crate::sys::cuda::graph::{GraphExecHandle, GraphHandle};

/// Work that was captured from a stream: collectives, copies, fills, kernel launches, events.
///
/// Made by [`Stream::capture`]. It keeps alive the memory, windows and operators that captured
/// operations use. If it has kernels or operations of NCCL, it keeps all memory, windows,
/// registered buffers, device communicators and kernel modules of its context that existed at the
/// end of the capture: those that are dropped later, and registrations that are closed later, end
/// after the graph. It is closed when the first of the communicators whose operations it contains
/// ends.
///
/// It can move to another thread, but is not `Sync`: CUDA allows one thread at a time to use a
/// graph.
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
    inner: Arc<Inner>,
    /// CUDA allows one thread at a time to use a graph.
    _not_sync: PhantomData<Cell<()>>,
}

struct Inner {
    life: Lifecycle,
    /// `None` once the graph has ended. This lock is never contended: only the graph's one handle
    /// launches, and whatever ends the graph waits for its launches first.
    exec: Mutex<Option<Exec>>,
    context: Context,
    len: usize,
}

/// An executable graph and the objects that it needs. Fields are dropped in this order.
struct Exec {
    handle: GraphExecHandle,
    /// Kept because some drivers refer to it from the executable graph.
    _graph: GraphHandle,
    /// The communicators whose operations it has.
    communicators: Vec<Arc<dyn Issuer>>,
    /// The first kernel with each device communicator, and the abort flag.
    kernels: Vec<(&'static str, Arc<AbortFlag>)>,
    /// The communicators of kernels' arguments.
    kernel_communicators: Vec<Arc<dyn Issuer>>,
    /// The objects whose operations it has, for the order of its launches.
    orders: Vec<Arc<order::Inner>>,
    followed: Vec<Followed>,
    _owners: Vec<Arc<dyn Owner>>,
    /// The memory, windows and operators that the operations use.
    _kept: Vec<KeepAlive>,
    /// What its kernels and operations of NCCL may use besides.
    _hold: Option<OwnHold>,
}

impl Stream {
    /// Captures the work that `f` enqueues to this stream, and to streams that wait for its events,
    /// instead of running it. All ranks must capture the same operations. Work that `f` enqueues to
    /// other streams runs as usual.
    ///
    /// During the capture, waits, copies from or to the host, allocations, registrations and
    /// launches of graphs on this rank's GPU fail with [`StateError::Capturing`].
    ///
    /// # Errors
    ///
    /// Those of `f`; [`Error::InvalidInput`] for the default stream; [`StateError::Capturing`]
    /// inside another capture; [`StateError::InGroup`] inside a group; [`Error::InvalidInput`] when
    /// only the first half of an operation was captured; the driver's error, when an operation
    /// cannot be captured.
    pub fn capture<E: From<Error>>(&self, f: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        refuse_inside("a capture")?;
        let context = self.context();
        if self.is_default() {
            return Err(Error::invalid("the default stream cannot be captured").into());
        }
        context.check_health()?;
        context.begin_capture()?;
        let open = OpenCapture { stream: self, has_begun: false }.begin()?;
        f()?;
        Ok(open.close()?)
    }
}

/// Guard of a capture: ends it, also when the closure fails or panics.
struct OpenCapture<'a> {
    stream: &'a Stream,
    /// Whether the stream is captured.
    has_begun: bool,
}

impl OpenCapture<'_> {
    fn begin(mut self) -> Result<Self> {
        self.stream.context().cuda().bind()?;
        self.stream.handle().begin_capture()?;
        self.has_begun = true;
        let id = self.stream.handle().capture()?.map(|capture| capture.id);
        self.stream.context().with_capture(|capture| capture.id = id);
        Ok(self)
    }

    fn close(mut self) -> Result<Graph> {
        let context = self.stream.context();
        let followed = context.with_capture(|own| std::mem::take(&mut own.followed));
        let followed = followed.unwrap_or_default();
        followed.iter().try_for_each(|followed| (followed.may_end)())?;
        context.cuda().bind()?;
        // If this fails, the capture has ended too.
        self.has_begun = false;
        let graph = self.stream.handle().end_capture()?;
        let hold = context.begin_hold();
        let capture = context.end_capture();
        std::mem::forget(self);
        let (len, handle) = (graph.len()?, graph.instantiate()?);
        let Capture { owners, kept, kernels, kernel_communicators, launches, .. } = capture;
        let holds = launches || !owners.is_empty();
        let communicators = owners.iter().map(|owner| owner.issuer()).collect();
        let exec = Exec {
            handle,
            _graph: graph,
            communicators,
            kernels,
            kernel_communicators,
            orders: capture.last_operations.objects(),
            followed,
            _owners: owners.clone(),
            _kept: kept,
            _hold: holds.then_some(hold),
        };
        let (life, exec) = (Lifecycle::default(), Mutex::new(Some(exec)));
        let inner = Arc::new(Inner { life, exec, context: context.clone(), len });
        let resource: Arc<dyn Resource> = Arc::clone(&inner) as _;
        owners.iter().for_each(|owner| owner.adopt(Arc::downgrade(&resource)));
        Ok(Graph { inner, _not_sync: PhantomData })
    }
}

impl Drop for OpenCapture<'_> {
    fn drop(&mut self) {
        let context = self.stream.context();
        if self.has_begun {
            context.bind_to_free();
            let _ = self.stream.handle().end_capture();
        }
        // This may free memory, which is refused during a capture.
        drop(context.end_capture());
    }
}

impl Graph {
    /// Enqueues the captured work to `stream`. All ranks must launch their graphs.
    ///
    /// # Errors
    ///
    /// [`StateError::Closed`]; [`StateError::CommunicatorEnded`]; [`StateError::Capturing`];
    /// [`LaunchError::Refused`] when the device communicator of a kernel in it was aborted or
    /// closed; [`Error::InvalidInput`] for a stream of another context, and if the last operations
    /// of an object are not those that the graph's operations of it continue;
    /// [`WorldError::RankLost`](crate::WorldError::RankLost); the driver's errors.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        let context = &self.inner.context;
        if !stream.context().is(context) {
            return Err(Error::invalid("a graph is launched to a stream of another context"));
        }
        // A graph that is being captured would not keep what this one uses.
        context.refuse_capturing("a graph is launched")?;
        context.check_health()?;
        let enqueue = stream.begin_enqueue("the launch of a graph")?;
        let exec = self.inner.exec.lock();
        let exec = exec.as_ref().filter(|_| self.inner.is_open());
        // For the message; 0 outside of a world.
        let rank = context.rank().unwrap_or(0);
        let exec = exec.ok_or(StateError::Closed { what: self.inner.name(), rank })?;
        for communicator in exec.communicators.iter().chain(&exec.kernel_communicators) {
            // Operations of a communicator that has ended would use freed memory.
            communicator.require_live()?;
        }
        for (kernel, flag) in &exec.kernels {
            if let Some(refusal) = flag.refusal() {
                return Err(LaunchError::Refused { kernel, refusal }.into());
            }
        }
        let _turn = match exec.orders.is_empty() {
            true => None,
            false => {
                let turn = context.turn()?;
                exec.followed.iter().try_for_each(|followed| (followed.may_launch)())?;
                context.take_turn(&exec.orders, stream)?;
                Some(turn)
            }
        };
        context.cuda().bind()?;
        let _launch = context.recorder().begin(Operation::Graph(self.len()));
        // SAFETY: `exec` keeps the memory and communicators of its operations, and its hold those
        // that kernels may use; other arguments are the contract of the captured launches.
        unsafe { exec.handle.launch(stream.handle()) }
            .inspect_err(|error| stream.context().mark_reported(error))?;
        exec.followed.iter().for_each(|followed| (followed.is_launched)());
        for communicator in &exec.communicators {
            stream.register_communicator(Arc::clone(communicator));
        }
        for (kernel, flag) in &exec.kernels {
            stream.register_launch(&enqueue, kernel, None, Some(Arc::clone(flag)));
        }
        Ok(())
    }

    /// Returns the number of graph nodes (`cuGraphGetNodes`).
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "the number of nodes is for information")]
    pub fn len(&self) -> usize {
        self.inner.len
    }

    /// Returns whether it can be launched.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        let exec = self.inner.exec.lock();
        exec.as_ref().is_some_and(|exec| {
            let mut communicators = exec.communicators.iter().chain(&exec.kernel_communicators);
            communicators.all(|communicator| communicator.is_live())
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
}

impl Resource for Inner {
    fn name(&self) -> &'static str {
        "the graph"
    }

    fn is_open(&self) -> bool {
        self.life.is_open()
    }

    fn close(&self) -> Result<()> {
        let Some(ending) = self.life.begin_end(&self.context)? else { return Ok(()) };
        self.context.drain()?;
        self.drop_exec();
        ending.done();
        Ok(())
    }
}

impl Inner {
    /// Destroys the executable graph, and then drops what it has held. The streams are idle.
    fn drop_exec(&self) {
        self.context.bind_to_free();
        let exec = self.exec.lock().take();
        drop(exec);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.life.is_open() {
            return;
        }
        let context = self.context.clone();
        let moved = || {
            let exec = Mutex::new(self.exec.lock().take());
            Self { life: self.life.take(), exec, context: context.clone(), len: self.len }
        };
        if context.can_free_or_postpone("a graph", moved) {
            self.drop_exec();
        } else {
            std::mem::forget(self.exec.lock().take());
        }
    }
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Graph({} operations)", self.inner.len)
    }
}
