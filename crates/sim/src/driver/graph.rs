//! Captures and graphs.

use std::cell::{Cell, RefCell};
use std::ffi::c_ulonglong;
use std::rc::Rc;
use std::task::Poll;

use devcomm_sys::driver::{
    CUgraph, CUgraphExec, CUgraphNode, CUresult, CUstream, CUstreamCaptureMode,
};

use super::stream::{Stream, StreamOp};
use super::{Ask, Refused, ask};
use crate::machine::core::Core;

/// An operation of a graph, and the numbers of those that it comes after.
struct Node {
    op: Box<dyn StreamOp>,
    after: Vec<usize>,
}

/// Operations and their order.
#[derive(Default)]
pub(crate) struct Graph {
    nodes: Vec<Node>,
}

/// What is being captured.
#[derive(Default)]
struct Capture {
    nodes: RefCell<Vec<Node>>,
    /// Why no graph will come of it.
    spoilt: Cell<Option<CUresult>>,
}

/// A stream's part in a capture.
pub(super) struct Joined {
    capture: Rc<Capture>,
    /// What its next operation comes after.
    last: Vec<usize>,
    /// Whether the capture began with it.
    is_origin: bool,
}

impl Joined {
    pub(super) fn push(&mut self, op: Box<dyn StreamOp>) {
        let mut nodes = self.capture.nodes.borrow_mut();
        let after = std::mem::replace(&mut self.last, vec![nodes.len()]);
        nodes.push(Node { op, after });
    }

    /// No graph will come of the capture.
    pub(super) fn spoil(&self, why: CUresult) {
        self.capture.spoilt.set(Some(why));
    }

    /// Where the stream is now.
    pub(super) fn point(&self) -> Point {
        Point { capture: Rc::clone(&self.capture), last: self.last.clone() }
    }
}

/// A place in a capture, which an event marks.
pub(crate) struct Point {
    capture: Rc<Capture>,
    last: Vec<usize>,
}

impl Point {
    /// What a stream does next comes after this: it becomes part of the capture.
    pub(super) fn join(&self, stream: &Stream) -> Refused<()> {
        let mut joined = stream.joined.borrow_mut();
        let (capture, mut last) = (Rc::clone(&self.capture), self.last.clone());
        let (before, is_origin) = match joined.take() {
            None => (Vec::new(), false),
            Some(other) if Rc::ptr_eq(&other.capture, &capture) => (other.last, other.is_origin),
            Some(other) => {
                *joined = Some(other);
                return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE.into());
            }
        };
        last.extend(before);
        last.sort_unstable();
        last.dedup();
        *joined = Some(Joined { capture, last, is_origin });
        Ok(())
    }
}

/// Whether all of `nodes` come before a stream that is at `last`.
fn all_joined(nodes: &[Node], last: &[usize]) -> bool {
    let mut before = vec![false; nodes.len()];
    last.iter().for_each(|&index| before[index] = true);
    // Nodes come after nodes of smaller numbers only.
    for index in (0..nodes.len()).rev() {
        if !before[index] {
            return false;
        }
        nodes[index].after.iter().for_each(|&index| before[index] = true);
    }
    true
}

pub(super) unsafe fn begin_capture(stream: CUstream, _mode: CUstreamCaptureMode) -> CUresult {
    ask("cuStreamBeginCapture", |ask| {
        if stream.is_null() {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED.into());
        }
        let stream = ask.stream(stream)?;
        let mut joined = stream.joined.borrow_mut();
        if joined.is_some() {
            return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE.into());
        }
        *joined = Some(Joined { capture: Rc::default(), last: Vec::new(), is_origin: true });
        Ok(())
    })
}

pub(super) unsafe fn end_capture(stream: CUstream, graph: *mut CUgraph) -> CUresult {
    ask("cuStreamEndCapture", |ask| {
        // SAFETY: the module's, here and below.
        unsafe { graph.write(std::ptr::null_mut()) };
        let stream = ask.stream(stream)?;
        let joined = stream.joined.take();
        let Some(Joined { capture, last, is_origin: true }) = joined else {
            stream.joined.replace(joined);
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED.into());
        };
        for other in ask.core.streams.borrow().values() {
            let is_part = |joined: &mut Joined| Rc::ptr_eq(&joined.capture, &capture);
            drop(other.joined.borrow_mut().take_if(is_part));
        }
        let nodes = capture.nodes.take();
        ask.note(|| format!("{} nodes", nodes.len()));
        if let Some(why) = capture.spoilt.get() {
            return Err(why.into());
        }
        if !all_joined(&nodes, &last) {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED.into());
        }
        let handle = ask.core.new_handle();
        ask.core.graphs.borrow_mut().insert(handle, Rc::new(Graph { nodes }));
        // SAFETY: as above.
        unsafe { graph.write(handle as CUgraph) };
        Ok(())
    })
}

impl Ask<'_> {
    fn graph(&self, graph: CUgraph) -> Refused<Rc<Graph>> {
        let graphs = self.core.graphs.borrow();
        let found = graphs.get(&(graph as u64)).cloned();
        found.ok_or_else(|| CUresult::CUDA_ERROR_INVALID_HANDLE.into())
    }
}

/// The number of nodes alone.
pub(super) unsafe fn nodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize) -> CUresult {
    ask("cuGraphGetNodes", |ask| {
        let graph = ask.graph(graph)?;
        if !nodes.is_null() {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED.into());
        }
        // SAFETY: the module's.
        unsafe { count.write(graph.nodes.len()) };
        Ok(())
    })
}

/// A graph that can be launched.
pub(crate) struct Exec {
    graph: Rc<Graph>,
    /// Whether a launch of it runs: the next one waits for that.
    runs: Cell<bool>,
}

pub(super) unsafe fn instantiate(
    exec: *mut CUgraphExec,
    graph: CUgraph,
    _flags: c_ulonglong,
) -> CUresult {
    ask("cuGraphInstantiate", |ask| {
        let graph = ask.graph(graph)?;
        let handle = ask.core.new_handle();
        let made = Exec { graph, runs: Cell::new(false) };
        ask.core.execs.borrow_mut().insert(handle, Rc::new(made));
        // SAFETY: the module's.
        unsafe { exec.write(handle as CUgraphExec) };
        Ok(())
    })
}

pub(super) unsafe fn launch(exec: CUgraphExec, stream: CUstream) -> CUresult {
    ask("cuGraphLaunch", |ask| {
        let stream = ask.stream(stream)?;
        let found = ask.core.execs.borrow().get(&(exec as u64)).cloned();
        let exec = found.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        ask.core.enqueue(&stream, Box::new(Launch::new(exec)));
        Ok(())
    })
}

pub(super) unsafe fn destroy(graph: CUgraph) -> CUresult {
    ask("cuGraphDestroy", |ask| match ask.core.graphs.borrow_mut().remove(&(graph as u64)) {
        Some(_) => Ok(()),
        None => Err(CUresult::CUDA_ERROR_INVALID_HANDLE.into()),
    })
}

pub(super) unsafe fn destroy_exec(exec: CUgraphExec) -> CUresult {
    ask("cuGraphExecDestroy", |ask| match ask.core.execs.borrow_mut().remove(&(exec as u64)) {
        Some(_) => Ok(()),
        None => Err(CUresult::CUDA_ERROR_INVALID_HANDLE.into()),
    })
}

/// One launch of a graph, as an operation of a stream.
struct Launch {
    exec: Rc<Exec>,
    /// An operation for each node; `None` once it is done.
    ops: Vec<Option<Box<dyn StreamOp>>>,
    started: bool,
}

impl Launch {
    fn new(exec: Rc<Exec>) -> Self {
        let ops = exec.graph.nodes.iter().map(|node| Some(node.op.duplicate())).collect();
        Self { exec, ops, started: false }
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
            if self.exec.runs.replace(true) {
                return Poll::Pending;
            }
            self.started = true;
        }
        for (index, node) in self.exec.graph.nodes.iter().enumerate() {
            let comes_now = node.after.iter().all(|before| self.is_done(*before));
            if comes_now && self.ops[index].as_mut().is_some_and(|op| op.poll(core).is_ready()) {
                self.ops[index] = None;
            }
        }
        if self.ops.iter().any(Option::is_some) {
            return Poll::Pending;
        }
        self.exec.runs.set(false);
        Poll::Ready(())
    }

    fn runs_kernel(&self) -> bool {
        self.ops.iter().flatten().any(|op| op.runs_kernel())
    }

    fn describe(&self, core: &Core) -> String {
        let ready = |(index, node): &(usize, &Node)| {
            !self.is_done(*index) && node.after.iter().all(|before| self.is_done(*before))
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
