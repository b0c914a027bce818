//! All state of a machine, on its own thread.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use devcomm_sys::driver::{CUfunction, CUresult};
use devcomm_types::HostBody;
use litemap::LiteMap;

use super::baton::{News, Shared};
use super::fault::Faults;
use crate::driver::event::Event;
use crate::driver::function::Function;
use crate::driver::graph::{Exec, Graph};
use crate::driver::stream::{Stream, StreamOp};
use crate::driver::{Refusal, Refused};
use crate::error::{Error, Stall};
use crate::gpus::{Gpus, Step};
use crate::host_nccl;
use crate::memory::{Allocation, Memory};
use crate::simulation::Simulation;

/// What a turn of the GPUs brought.
pub(super) enum Moved {
    /// Operations of streams have ended: host threads may be waiting for that.
    Streams,
    /// Something.
    Something,
    /// Nothing; and nothing will come without the host or the clock.
    Nothing,
}

/// The state of one GPU as the driver sees it.
#[derive(Default)]
pub(crate) struct Device {
    /// How often its primary context is retained.
    pub(crate) retained: Cell<usize>,
    /// Bytes that are allocated.
    pub(crate) allocated: Cell<usize>,
}

/// The machine's state.
pub(crate) struct Core {
    shared: Arc<Shared>,
    pub(crate) simulation: Simulation,
    pub(crate) memory: Rc<Memory>,
    pub(crate) gpus: Rc<Gpus>,
    pub(crate) devices: Box<[Device]>,
    /// The streams by handle; those of number 1, 2, ... are the GPUs' default streams.
    pub(crate) streams: RefCell<LiteMap<u64, Rc<Stream>>>,
    pub(crate) events: RefCell<LiteMap<u64, Rc<Event>>>,
    pub(crate) graphs: RefCell<LiteMap<u64, Rc<Graph>>>,
    pub(crate) execs: RefCell<LiteMap<u64, Rc<Exec>>>,
    pub(crate) functions: RefCell<LiteMap<u64, Rc<Function>>>,
    /// Pinned host memory by address.
    pub(crate) pinned: RefCell<LiteMap<usize, Allocation>>,
    pub(crate) nccl: host_nccl::State,
    /// What is gone for the host, and kernels may still use.
    retired: RefCell<Vec<Box<dyn Any>>>,
    next_handle: Cell<u64>,
    /// The error that ended the kernels: every call fails with it from then on.
    failure: RefCell<Option<Refusal>>,
    deadlock: RefCell<Option<String>>,
    /// The earliest time that a waiting client has named.
    wake_at: Cell<Option<u64>>,
}

/// Handles of objects that are no default streams start here.
const FIRST_HANDLE: u64 = 1 << 24;

impl Core {
    pub(super) fn new(shared: Arc<Shared>, simulation: &Simulation) -> Self {
        crate::nccl::install();
        let memory = Rc::new(Memory::new());
        let gpus = Gpus::new(simulation, Rc::clone(&memory));
        let devices = (0..simulation.gpus).map(|_| Device::default()).collect();
        let default = |gpu| (Stream::default_of(gpu), Rc::new(Stream::new(gpu)));
        let streams = RefCell::new((0..simulation.gpus).map(default).collect());
        Self {
            shared,
            simulation: simulation.clone(),
            memory,
            gpus,
            devices,
            streams,
            events: RefCell::default(),
            graphs: RefCell::default(),
            execs: RefCell::default(),
            functions: RefCell::default(),
            pinned: RefCell::default(),
            nccl: host_nccl::State::default(),
            retired: RefCell::default(),
            next_handle: Cell::new(FIRST_HANDLE),
            failure: RefCell::default(),
            deadlock: RefCell::default(),
            wake_at: Cell::new(None),
        }
    }

    /// The number of the machine.
    pub(crate) fn number(&self) -> u64 {
        self.shared.number
    }

    pub(crate) fn faults(&self) -> &Faults {
        &self.shared.faults
    }

    /// How much has happened so far.
    pub(crate) fn news(&self) -> News {
        self.shared.news()
    }

    /// Something has happened that waiting clients may be waiting for.
    pub(crate) fn notify(&self) {
        self.shared.notify();
    }

    /// The virtual clock in nanoseconds.
    pub(crate) fn clock(&self) -> u64 {
        self.shared.clock()
    }

    /// A call of a client takes a microsecond.
    pub(super) fn tick(&self) {
        self.shared.advance(self.clock() + 1000);
    }

    /// A handle that no object had before.
    pub(crate) fn new_handle(&self) -> u64 {
        // As far apart as objects in memory would be.
        self.next_handle.replace(self.next_handle.get() + 64)
    }

    /// A waiting client is content with this time.
    pub(crate) fn wake_at(&self, time: u64) {
        self.wake_at.set(Some(self.wake_at.get().map_or(time, |other| other.min(time))));
    }

    /// Forgets what clients have named: they are about to be asked.
    pub(super) fn forget_wakes(&self) {
        self.wake_at.set(None);
    }

    /// The report, while calls that wait are told of a deadlock.
    pub(crate) fn deadlock(&self) -> Option<String> {
        self.deadlock.borrow().clone()
    }

    /// From here on calls that wait for something that does not come end with a report.
    pub(super) fn tell_deadlock(&self) {
        let error = Error::Deadlock(self.stall());
        self.deadlock.replace(Some(error.to_string()));
        self.shared.failed(error);
    }

    pub(super) fn forget_deadlock(&self) {
        self.deadlock.take();
    }

    /// Who waits for what.
    fn stall(&self) -> Box<Stall> {
        let callers = self.shared.callers();
        let callers = callers.iter().map(|(name, call)| format!("{name} is in {call}"));
        let streams = self.streams.borrow();
        let heads = streams
            .values()
            .filter_map(|stream| Some(format!("GPU {}: {}", stream.gpu(), stream.describe(self)?)));
        Box::new(Stall { host: callers.chain(heads).collect(), ..*self.gpus.stall() })
    }

    /// What every call fails with since a kernel failed.
    pub(crate) fn check(&self) -> Refused<()> {
        self.failure.borrow().clone().map_or(Ok(()), Err)
    }

    /// Ends all that runs: a kernel, or what a stream did, broke a rule.
    pub(crate) fn fail(&self, error: Error) {
        let code = match &error {
            Error::OutOfBounds { .. } => CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            Error::Deadlock(_) | Error::Livelock(_) | Error::Limit { .. } => {
                CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            }
            _ => CUresult::CUDA_ERROR_LAUNCH_FAILED,
        };
        self.fail_with(Refusal::new(code, error.to_string()));
        self.shared.failed(error);
    }

    /// As [`fail`](Self::fail), with any error of the driver's.
    pub(crate) fn fail_with(&self, refusal: Refusal) {
        self.failure.borrow_mut().get_or_insert(refusal);
        self.gpus.reset();
        drop(self.retired.take());
        self.streams.borrow().values().for_each(|stream| stream.clear());
    }

    /// Keeps what the host has done with as long as kernels run: one that was left waiting looks at
    /// it again and again.
    pub(crate) fn retire(&self, gone: impl Any) {
        if self.gpus.has_grids() {
            self.retired.borrow_mut().push(Box::new(gone));
        }
    }

    /// Appends an operation to a stream, or to what is captured from it.
    pub(crate) fn enqueue(&self, stream: &Stream, op: Box<dyn StreamOp>) {
        stream.push(self, op);
    }

    /// Polls the heads of all streams, and runs what is on the GPUs for a while.
    pub(super) fn run_gpus(&self) -> Moved {
        self.streams.borrow_mut().retain(|_, stream| !stream.is_over());
        let streams: Vec<_> = self.streams.borrow().values().cloned().collect();
        let mut moved = false;
        for stream in streams {
            moved |= stream.advance(self);
        }
        self.shared.advance(self.gpus.now());
        let step = self.gpus.step();
        self.shared.advance(self.gpus.now());
        let printed = self.gpus.take_printed();
        if !printed.is_empty() {
            print!("{printed}");
        }
        if !self.gpus.has_grids() {
            drop(self.retired.take());
        }
        match step {
            Step::Failed(error) => {
                self.fail(error);
                Moved::Streams
            }
            _ if moved => Moved::Streams,
            Step::Progress => Moved::Something,
            // Who spins may count its rounds; but a deadline passes, a kernel's or a client's.
            Step::Spinning if self.first_deadline().is_none() => Moved::Something,
            Step::Idle | Step::Stuck | Step::Spinning => Moved::Nothing,
        }
    }

    fn first_deadline(&self) -> Option<u64> {
        self.gpus.next_deadline().into_iter().chain(self.wake_at.get()).min()
    }

    /// Lets the time pass until the first deadline; says whether there is any.
    pub(super) fn pass_deadline(&self) -> bool {
        let first = self.first_deadline();
        if let Some(time) = first {
            self.shared.advance(time);
            self.gpus.advance(time);
        }
        first.is_some()
    }

    /// The function that runs `body` on `gpu`.
    pub(crate) fn bind(&self, gpu: usize, body: &HostBody) -> CUfunction {
        let mut functions = self.functions.borrow_mut();
        let known = functions.iter().find(|(_, function)| function.is(gpu, body));
        let handle = known.map_or_else(|| self.new_handle(), |(handle, _)| *handle);
        functions.entry(handle).or_insert_with(|| Rc::new(Function::new(gpu, *body)));
        handle as CUfunction
    }
}
