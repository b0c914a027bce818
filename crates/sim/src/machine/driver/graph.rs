//! Stream capture and CUDA graphs.

use std::cell::{Cell, RefCell};
use std::ffi::{c_uint, c_ulonglong, c_void};
use std::rc::Rc;
use std::task::Poll;

use devcomm_sys::driver::{
    CUgraph, CUgraphEdgeData, CUgraphExec, CUgraphNode, CUhostFn, CUresult, CUstream,
    CUstreamCaptureMode, CUstreamCaptureStatus, CUuserObject, cuuint64_t,
};

use super::stream::{Stream, StreamOp, is_default};
use super::{CallContext, CudaResult, call};
use crate::machine::core::Core;
use crate::race::{Clock, Races, Run, Sequence};

/// A node of a graph: an operation and the indices of the nodes that it depends on.
struct Node {
    op: Box<dyn StreamOp>,
    dependencies: Vec<usize>,
}

/// A graph. A node's dependencies have smaller indices.
pub(crate) struct Graph {
    nodes: Vec<Node>,
    owned: Owned,
}

/// The user objects that a graph owns.
type Owned = Rc<RefCell<Vec<Rc<UserObject>>>>;

/// A capture in progress.
struct Capture {
    /// The handle of its graph.
    handle: u64,
    owned: Owned,
    nodes: RefCell<Vec<Node>>,
    /// The error that invalidated the capture, if any.
    invalidated: Cell<Option<CUresult>>,
    has_ended: Cell<bool>,
}

impl Capture {
    /// Fails if the capture was invalidated.
    fn check(&self) -> CudaResult<()> {
        self.invalidated.get().map_or(Ok(()), |why| Err(why.into()))
    }
}

/// The state of a stream that is being captured.
pub(super) struct StreamCapture {
    capture: Rc<Capture>,
    /// The nodes on which the stream's next operation depends.
    last: Vec<usize>,
    /// Whether the capture began on this stream.
    is_origin: bool,
}

impl StreamCapture {
    pub(super) fn push(&mut self, op: Box<dyn StreamOp>) -> CudaResult<()> {
        self.capture.check()?;
        let mut nodes = self.capture.nodes.borrow_mut();
        let dependencies = std::mem::replace(&mut self.last, vec![nodes.len()]);
        nodes.push(Node { op, dependencies });
        Ok(())
    }

    /// Invalidates the capture: its end fails with `why`.
    pub(super) fn invalidate(&self, why: CUresult) {
        self.capture.invalidated.set(Some(why));
    }

    /// Returns the stream's current capture point.
    pub(super) fn point(&self) -> CudaResult<CapturePoint> {
        self.capture.check()?;
        Ok(CapturePoint { capture: Rc::clone(&self.capture), last: self.last.clone() })
    }
}

/// A point in a capture, as recorded by an event.
pub(crate) struct CapturePoint {
    capture: Rc<Capture>,
    last: Vec<usize>,
}

impl CapturePoint {
    /// Adds the stream to the capture, and makes its next operation depend on this point.
    pub(super) fn join(&self, stream: &Stream) -> CudaResult<()> {
        if self.capture.has_ended.get() {
            return Err(CUresult::CUDA_ERROR_CAPTURED_EVENT.into());
        }
        self.capture.check()?;
        let mut capturing = stream.capturing.borrow_mut();
        let (capture, mut last) = (Rc::clone(&self.capture), self.last.clone());
        let (before, is_origin) = match capturing.take() {
            None => (Vec::new(), false),
            Some(other) if Rc::ptr_eq(&other.capture, &capture) => (other.last, other.is_origin),
            Some(other) => {
                *capturing = Some(other);
                return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE.into());
            }
        };
        last.extend(before);
        last.sort_unstable();
        last.dedup();
        *capturing = Some(StreamCapture { capture, last, is_origin });
        Ok(())
    }
}

/// Returns whether every node is in `last` or an ancestor of a node in `last`.
fn all_joined(nodes: &[Node], last: &[usize]) -> bool {
    let mut joined = vec![false; nodes.len()];
    last.iter().for_each(|&index| joined[index] = true);
    for index in (0..nodes.len()).rev() {
        if !joined[index] {
            return false;
        }
        nodes[index].dependencies.iter().for_each(|&index| joined[index] = true);
    }
    true
}

pub(super) unsafe fn begin_capture(stream: CUstream, _mode: CUstreamCaptureMode) -> CUresult {
    call("cuStreamBeginCapture", |cx| {
        if is_default(stream) {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED.into());
        }
        let stream = cx.stream(stream)?;
        let mut capturing = stream.capturing.borrow_mut();
        if capturing.is_some() {
            return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE.into());
        }
        let capture = Rc::new(Capture {
            handle: cx.core.new_handle(),
            owned: Rc::default(),
            nodes: RefCell::default(),
            invalidated: Cell::default(),
            has_ended: Cell::new(false),
        });
        *capturing = Some(StreamCapture { capture, last: Vec::new(), is_origin: true });
        Ok(())
    })
}

pub(super) unsafe fn end_capture(stream: CUstream, graph: *mut CUgraph) -> CUresult {
    call("cuStreamEndCapture", |cx| {
        // SAFETY: the program passes a valid out pointer, as CUDA requires.
        unsafe { graph.write(std::ptr::null_mut()) };
        let stream = cx.stream(stream)?;
        let capturing = stream.capturing.take();
        let Some(StreamCapture { capture, last, is_origin: true }) = capturing else {
            stream.capturing.replace(capturing);
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED.into());
        };
        capture.has_ended.set(true);
        for other in cx.core.streams.borrow().values() {
            let is_same = |capturing: &mut StreamCapture| Rc::ptr_eq(&capturing.capture, &capture);
            drop(other.capturing.borrow_mut().take_if(is_same));
        }
        let nodes = capture.nodes.take();
        cx.note(|| format!("{} nodes", nodes.len()));
        capture.check()?;
        if !all_joined(&nodes, &last) {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED.into());
        }
        let (handle, owned) = (capture.handle, Rc::clone(&capture.owned));
        cx.core.graphs.borrow_mut().insert(handle, Rc::new(Graph { nodes, owned }));
        // SAFETY: the program passes a valid out pointer, as CUDA requires.
        unsafe { graph.write(handle as CUgraph) };
        Ok(())
    })
}

/// Writes the status, the id and the graph; the other out pointers must be NULL.
pub(super) unsafe fn capture_info(
    stream: CUstream,
    status: *mut CUstreamCaptureStatus,
    id: *mut cuuint64_t,
    graph: *mut CUgraph,
    dependencies: *mut *const CUgraphNode,
    edge_data: *mut *const CUgraphEdgeData,
    num_dependencies: *mut usize,
) -> CUresult {
    call("cuStreamGetCaptureInfo", |cx| {
        let unsupported =
            !(dependencies.is_null() && edge_data.is_null() && num_dependencies.is_null());
        if unsupported {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED.into());
        }
        let capture = match is_default(stream) {
            true => None,
            false => cx.stream(stream)?.capturing.borrow().as_ref().map(|own| own.capture.clone()),
        };
        let handle = capture.as_ref().map_or(0, |capture| capture.handle);
        // SAFETY: the program passes a valid out pointer, as CUDA requires.
        unsafe {
            status.write(match capture.as_ref().map(|capture| capture.check()) {
                None => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE,
                Some(Ok(())) => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE,
                Some(Err(_)) => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED,
            });
            id.write(handle);
            graph.write(handle as CUgraph);
        }
        Ok(())
    })
}

/// An object that graphs own: the last of them destroys it.
pub(crate) struct UserObject {
    value: *mut c_void,
    destroy: CUhostFn,
}

impl Drop for UserObject {
    fn drop(&mut self) {
        if let Some(destroy) = self.destroy {
            // SAFETY: the creator of the object promises that the function can be called.
            unsafe { destroy(self.value) };
        }
    }
}

pub(super) unsafe fn create_user_object(
    object: *mut CUuserObject,
    value: *mut c_void,
    destroy: CUhostFn,
    refcount: c_uint,
    _flags: c_uint,
) -> CUresult {
    call("cuUserObjectCreate", |cx| {
        if refcount != 1 {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED.into());
        }
        let handle = cx.core.new_handle();
        let new = Rc::new(UserObject { value, destroy });
        cx.core.user_objects.borrow_mut().insert(handle, new);
        // SAFETY: the program passes a valid out pointer, as CUDA requires.
        unsafe { object.write(handle as CUuserObject) };
        Ok(())
    })
}

pub(super) unsafe fn release_user_object(object: CUuserObject, _count: c_uint) -> CUresult {
    call("cuUserObjectRelease", |cx| {
        let released = cx.core.user_objects.borrow_mut().remove(&(object as u64));
        released.map(drop).ok_or_else(|| CUresult::CUDA_ERROR_INVALID_VALUE.into())
    })
}

/// Moves the one reference of an object to a graph, or to the graph of a capture in progress.
pub(super) unsafe fn retain_user_object(
    graph: CUgraph,
    object: CUuserObject,
    count: c_uint,
    flags: c_uint,
) -> CUresult {
    /// `CU_GRAPH_USER_OBJECT_MOVE`.
    const MOVE: c_uint = 1;
    call("cuGraphRetainUserObject", |cx| {
        if (count, flags) != (1, MOVE) {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED.into());
        }
        let owned = match cx.graph(graph) {
            Ok(graph) => Rc::clone(&graph.owned),
            Err(unknown) => {
                let streams = cx.core.streams.borrow();
                let capture = streams.values().find_map(|stream| {
                    let capturing = stream.capturing.borrow();
                    let own = capturing.as_ref().map(|own| Rc::clone(&own.capture))?;
                    (own.handle == graph as u64).then(|| Rc::clone(&own.owned))
                });
                capture.ok_or(unknown)?
            }
        };
        let object = cx.core.user_objects.borrow_mut().remove(&(object as u64));
        owned.borrow_mut().push(object.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?);
        Ok(())
    })
}

impl CallContext<'_> {
    fn graph(&self, graph: CUgraph) -> CudaResult<Rc<Graph>> {
        let graphs = self.core.graphs.borrow();
        let found = graphs.get(&(graph as u64)).cloned();
        found.ok_or_else(|| CUresult::CUDA_ERROR_INVALID_HANDLE.into())
    }
}

/// Writes the number of nodes; `nodes` must be NULL.
pub(super) unsafe fn nodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize) -> CUresult {
    call("cuGraphGetNodes", |cx| {
        let graph = cx.graph(graph)?;
        if !nodes.is_null() {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED.into());
        }
        // SAFETY: the program passes a valid out pointer, as CUDA requires.
        unsafe { count.write(graph.nodes.len()) };
        Ok(())
    })
}

/// An instantiated graph.
pub(crate) struct Exec {
    graph: Rc<Graph>,
    /// Whether a launch is running: launches of one instantiated graph do not overlap.
    is_running: Cell<bool>,
    /// The sequence of each node's runs, one per launch, for the detection of races.
    sequences: Vec<Sequence>,
}

pub(super) unsafe fn instantiate(
    exec: *mut CUgraphExec,
    graph: CUgraph,
    _flags: c_ulonglong,
) -> CUresult {
    call("cuGraphInstantiate", |cx| {
        let graph = cx.graph(graph)?;
        let handle = cx.core.new_handle();
        let sequences = graph.nodes.iter().map(|_| cx.core.memory.races.host_sequence()).collect();
        let new = Exec { graph, is_running: Cell::new(false), sequences };
        cx.core.execs.borrow_mut().insert(handle, Rc::new(new));
        // SAFETY: the program passes a valid out pointer, as CUDA requires.
        unsafe { exec.write(handle as CUgraphExec) };
        Ok(())
    })
}

pub(super) unsafe fn launch(exec: CUgraphExec, stream: CUstream) -> CUresult {
    call("cuGraphLaunch", |cx| {
        let stream = cx.stream(stream)?;
        let found = cx.core.execs.borrow().get(&(exec as u64)).cloned();
        let exec = found.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        cx.core.enqueue(&stream, Box::new(Launch::new(exec)))
    })
}

pub(super) unsafe fn destroy(graph: CUgraph) -> CUresult {
    call("cuGraphDestroy", |cx| match cx.core.graphs.borrow_mut().remove(&(graph as u64)) {
        Some(_) => Ok(()),
        None => Err(CUresult::CUDA_ERROR_INVALID_HANDLE.into()),
    })
}

pub(super) unsafe fn destroy_exec(exec: CUgraphExec) -> CUresult {
    call("cuGraphExecDestroy", |cx| match cx.core.execs.borrow_mut().remove(&(exec as u64)) {
        Some(_) => Ok(()),
        None => Err(CUresult::CUDA_ERROR_INVALID_HANDLE.into()),
    })
}

/// The stream operation that is one launch of a graph.
struct Launch {
    exec: Rc<Exec>,
    /// The operation of each node; `None` once it is complete.
    ops: Vec<Option<Box<dyn StreamOp>>>,
    /// The run of each node that has started, for the detection of races.
    runs: Vec<Option<Run>>,
    /// The accesses that are before the end of each node that has ended.
    ended: Vec<Clock>,
    started: bool,
}

impl Launch {
    fn new(exec: Rc<Exec>) -> Self {
        let nodes = &exec.graph.nodes;
        let ops = nodes.iter().map(|node| Some(node.op.duplicate())).collect();
        let (runs, ended) =
            (nodes.iter().map(|_| None).collect(), vec![Clock::default(); nodes.len()]);
        Self { exec, ops, runs, ended, started: false }
    }

    /// Performs `action` as a part of node `index`; starts the node first if it has not started.
    fn within<R>(
        &mut self,
        races: &Races,
        index: usize,
        action: impl FnOnce(&mut dyn StreamOp) -> R,
    ) -> Option<R> {
        let op = self.ops[index].as_mut()?;
        let run =
            self.runs[index].get_or_insert_with(|| races.start_part(&self.exec.sequences[index]));
        Some(races.within(run, || {
            // A node that began early ran beside its dependency: it learns from that once it ends.
            let before = &self.exec.graph.nodes[index].dependencies;
            before.iter().for_each(|before| races.learn_here(&self.ended[*before]));
            action(&mut **op)
        }))
    }

    fn is_done(&self, index: usize) -> bool {
        self.ops[index].is_none()
    }
}

impl StreamOp for Launch {
    fn enqueued(&mut self, core: &Core) {
        self.ops.iter_mut().flatten().for_each(|op| op.enqueued(core));
    }

    fn poll(&mut self, core: &Core) -> Poll<()> {
        if !self.started {
            if self.exec.is_running.replace(true) {
                return Poll::Pending;
            }
            self.started = true;
        }
        let (exec, races) = (Rc::clone(&self.exec), &core.memory.races);
        for (index, node) in exec.graph.nodes.iter().enumerate() {
            let is_ready = node.dependencies.iter().all(|index| self.is_done(*index));
            if is_ready {
                let polled = self.within(races, index, |op| op.poll(core));
                if polled.is_some_and(|polled| polled.is_ready()) {
                    // The machine is not idle, although the graph has not ended: other streams may
                    // wait for this node, if it is a rank's part of a collective.
                    core.op_progressed();
                    self.ops[index] = None;
                    if let Some(run) = self.runs[index].take() {
                        self.ended[index] = races.end(run);
                        races.learn_here(&self.ended[index]);
                    }
                }
            } else if let [before] = node.dependencies[..]
                && let Some(grid) =
                    self.ops[before].as_ref().and_then(|op| op.triggering_grid(core))
            {
                self.within(races, index, |op| op.begin_early(core, grid));
            }
        }
        if self.ops.iter().any(Option::is_some) {
            return Poll::Pending;
        }
        self.exec.is_running.set(false);
        Poll::Ready(())
    }

    fn runs_kernel(&self) -> bool {
        self.ops.iter().flatten().any(|op| op.runs_kernel())
    }

    fn kernel_given(&self, is_given: &dyn Fn(usize) -> bool) -> Option<&'static str> {
        self.ops.iter().flatten().find_map(|op| op.kernel_given(is_given))
    }

    fn name(&self) -> String {
        "a graph".to_owned()
    }

    fn describe(&self, core: &Core) -> String {
        let ready = |(index, node): &(usize, &Node)| {
            !self.is_done(*index) && node.dependencies.iter().all(|index| self.is_done(*index))
        };
        let nodes = self.exec.graph.nodes.iter().enumerate().filter(ready);
        let waiting = nodes.filter_map(|(index, _)| Some(self.ops[index].as_ref()?.describe(core)));
        let waiting: Vec<_> = waiting.collect();
        format!("a graph, in which {}", waiting.join("; "))
    }

    fn duplicate(&self) -> Box<dyn StreamOp> {
        Box::new(Self::new(Rc::clone(&self.exec)))
    }
}
