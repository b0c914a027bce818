//! The state of a machine, owned by the machine's thread.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use devcomm_sys::driver::{CUfunction, CUresult};
use devcomm_types::HostBody;
use litemap::LiteMap;

use super::baton::{EventCount, Shared};
use super::fault::Faults;
use crate::base::error::{Error, Stall};
use crate::base::simulation::Simulation;
use crate::gpu::gpus::{Gpus, Step};
use crate::machine::driver::event::Event;
use crate::machine::driver::function::Function;
use crate::machine::driver::graph::{Exec, Graph, UserObject};
use crate::machine::driver::stream::{Stream, StreamOp};
use crate::machine::driver::{CudaError, CudaResult};
use crate::machine::host_nccl;
use crate::memory::{Allocation, Memory};
use crate::race::{Clock, OpAccess, OpId, Races};

/// The result of running the GPUs once.
pub(super) enum Progress {
    /// Stream operations completed, which host threads may wait for.
    Streams,
    /// Other progress.
    Something,
    /// No progress; only the host or the clock can cause any.
    Nothing,
}

/// The state of one GPU as the driver sees it.
#[derive(Default)]
pub(crate) struct Device {
    /// The reference count of the GPU's primary context.
    pub(crate) retained: Cell<usize>,
    /// The number of allocated bytes.
    pub(crate) allocated: Cell<usize>,
}

/// The machine's state.
pub(crate) struct Core {
    shared: Arc<Shared>,
    pub(crate) memory: Rc<Memory>,
    pub(crate) gpus: Rc<Gpus>,
    pub(crate) devices: Box<[Device]>,
    /// Streams by handle, the GPUs' [default streams](Stream::default_of) too.
    pub(crate) streams: RefCell<LiteMap<u64, Rc<Stream>>>,
    pub(crate) events: RefCell<LiteMap<u64, Rc<Event>>>,
    pub(crate) graphs: RefCell<LiteMap<u64, Rc<Graph>>>,
    /// The user objects that no graph owns yet.
    pub(crate) user_objects: RefCell<LiteMap<u64, Rc<UserObject>>>,
    pub(crate) execs: RefCell<LiteMap<u64, Rc<Exec>>>,
    pub(crate) functions: RefCell<LiteMap<u64, Rc<Function>>>,
    /// Pinned host memory by address.
    pub(crate) pinned: RefCell<LiteMap<usize, Allocation>>,
    /// Memory from `cuMemAlloc` and its GPU, by address.
    pub(crate) device_memory: RefCell<LiteMap<usize, (usize, Allocation)>>,
    pub(crate) nccl: host_nccl::State,
    /// Objects that the host has destroyed but kernels may still use.
    deferred_drops: RefCell<Vec<Box<dyn Any>>>,
    next_handle: Cell<u64>,
    /// The error that ended the kernels: every later call returns it.
    failure: RefCell<Option<CudaError>>,
    /// The deadlock report, while pending calls fail with it.
    deadlock: RefCell<Option<String>>,
    /// The earliest deadline of a waiting client (host thread), on the machine's clock.
    wake_at: Cell<Option<u64>>,
    /// Whether an operation of a stream has made progress without completing, so that the machine
    /// is not idle.
    op_progressed: Cell<bool>,
}

/// First handle of objects other than default streams.
const FIRST_HANDLE: u64 = 1 << 24;

impl Core {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let simulation = &shared.simulation;
        crate::gpu::nccl::install();
        let memory = Rc::new(Memory::new(Races::new(
            simulation.races,
            simulation.weak,
            simulation.seed.unwrap_or(0),
        )));
        let gpus = Gpus::new(simulation, Rc::clone(&memory));
        let devices = (0..simulation.gpus).map(|_| Device::default()).collect();
        let default = |gpu| {
            let handle = Stream::default_of(gpu);
            (handle, Rc::new(Stream::new(handle, gpu, &memory.races)))
        };
        let streams = RefCell::new((0..simulation.gpus).map(default).collect());
        Self {
            shared,
            memory,
            gpus,
            devices,
            streams,
            events: RefCell::default(),
            graphs: RefCell::default(),
            user_objects: RefCell::default(),
            execs: RefCell::default(),
            functions: RefCell::default(),
            pinned: RefCell::default(),
            device_memory: RefCell::default(),
            nccl: host_nccl::State::default(),
            deferred_drops: RefCell::default(),
            next_handle: Cell::new(FIRST_HANDLE),
            failure: RefCell::default(),
            deadlock: RefCell::default(),
            wake_at: Cell::new(None),
            op_progressed: Cell::new(false),
        }
    }

    pub(crate) fn simulation(&self) -> &Simulation {
        &self.shared.simulation
    }

    /// Returns the machine's number in this process.
    pub(crate) fn number(&self) -> u64 {
        self.shared.number
    }

    pub(crate) fn faults(&self) -> &Faults {
        &self.shared.faults
    }

    /// Returns the machine's event count.
    pub(crate) fn event_count(&self) -> EventCount {
        self.shared.event_count()
    }

    /// Counts a notification, so that waiting calls are polled again.
    pub(crate) fn notify(&self) {
        self.shared.notify();
    }

    /// Returns the virtual clock in nanoseconds.
    pub(crate) fn clock(&self) -> u64 {
        self.shared.clock()
    }

    /// Advances the clock by one microsecond, the duration of every call.
    pub(super) fn tick(&self) {
        self.shared.advance(self.clock().saturating_add(1000));
    }

    /// Returns a new handle, never reused.
    pub(crate) fn new_handle(&self) -> u64 {
        // All handles are multiples of 64, as if they were addresses of objects.
        self.next_handle.replace(self.next_handle.get() + 64)
    }

    /// Registers a waiting client's deadline.
    pub(crate) fn wake_at(&self, time: u64) {
        self.wake_at.set(Some(self.wake_at.get().map_or(time, |other| other.min(time))));
    }

    /// Clears the clients' deadlines, before they are polled.
    pub(super) fn clear_wake_time(&self) {
        self.wake_at.set(None);
    }

    /// Returns the deadlock report, while pending calls fail with it.
    pub(crate) fn deadlock(&self) -> Option<String> {
        self.deadlock.borrow().clone()
    }

    /// Makes pending calls fail with a deadlock report, until [`end_deadlock`](Self::end_deadlock).
    pub(super) fn begin_deadlock(&self) {
        let error = Error::Deadlock(self.stall());
        self.deadlock.replace(Some(error.to_string()));
        self.gpus.timeline.fail(&error.to_string());
        self.gpus.write_timeline();
        self.shared.record_failure(error);
    }

    pub(super) fn end_deadlock(&self) {
        self.deadlock.take();
    }

    /// Returns what every thread and stream waits for.
    fn stall(&self) -> Box<Stall> {
        let callers = self.shared.callers();
        let streams = self.streams.borrow();
        let heads = streams
            .values()
            .filter_map(|stream| Some(format!("GPU {}: {}", stream.gpu(), stream.describe(self)?)));
        Box::new(Stall { host: callers.into_iter().chain(heads).collect(), ..*self.gpus.stall() })
    }

    /// Returns the error that ended the kernels, if any.
    pub(crate) fn check(&self) -> CudaResult<()> {
        self.failure.borrow().clone().map_or(Ok(()), Err)
    }

    /// Ends all kernels and stream operations, after an error of one of them.
    pub(crate) fn fail(&self, error: Error) {
        let code = match &error {
            Error::OutOfBounds { .. } => CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            Error::Deadlock(_) | Error::Livelock(_) | Error::Limit { .. } => {
                CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            }
            _ => CUresult::CUDA_ERROR_LAUNCH_FAILED,
        };
        self.end_with(CudaError::new(code, error.to_string()), error);
    }

    /// Does the same as [`fail`](Self::fail) with the driver's error of a stream's operation,
    /// unless the kernels have ended already.
    pub(crate) fn fail_operation(&self, operation: impl fmt::Display, error: CudaError) {
        if self.check().is_ok() {
            let what = error.text.clone().unwrap_or_else(|| format!("{:?}", error.code));
            self.end_with(error, Error::Operation { operation: operation.to_string(), what });
        }
    }

    /// Ends all kernels and stream operations with `returned`, the error of later calls.
    fn end_with(&self, returned: CudaError, error: Error) {
        self.fail_with(returned);
        self.gpus.timeline.fail(&error.to_string());
        self.gpus.write_timeline();
        self.shared.record_failure(error);
    }

    /// Does the same as [`fail`](Self::fail), with an error that
    /// [`Machine::failure`](crate::Machine::failure) does not return.
    pub(crate) fn fail_with(&self, error: CudaError) {
        self.failure.borrow_mut().get_or_insert(error);
        self.gpus.reset();
        drop(self.deferred_drops.take());
        self.streams.borrow().values().for_each(|stream| stream.clear(&self.gpus.timeline));
    }

    /// Checks an access of the stream operation that runs now against those of others.
    pub(crate) fn op_access(
        &self,
        name: &'static str,
        address: usize,
        bytes: usize,
        access: OpAccess,
    ) -> CudaResult<()> {
        let op = self.memory.races.current(name);
        self.access_by(&op, address, bytes, access)
    }

    /// Checks an access of a call that completes at once.
    pub(crate) fn host_access(
        &self,
        name: &'static str,
        gpu: usize,
        address: usize,
        bytes: usize,
        access: OpAccess,
    ) -> CudaResult<()> {
        self.memory.races.host_op(gpu, || self.op_access(name, address, bytes, access))
    }

    /// Checks an access of an operation.
    pub(crate) fn access_by(
        &self,
        op: &(OpId, Clock),
        address: usize,
        bytes: usize,
        access: OpAccess,
    ) -> CudaResult<()> {
        let races = &self.memory.races;
        races.op_access(self.memory.as_ref(), op, address, bytes, access).map_err(|error| {
            let failure = CudaError::new(CUresult::CUDA_ERROR_LAUNCH_FAILED, error.to_string());
            self.fail(error);
            failure
        })
    }

    /// Keeps an object alive until no kernel runs, since a waiting kernel may still poll it. Drops
    /// the object at once if none runs.
    pub(crate) fn defer_drop(&self, object: impl Any) {
        if self.gpus.has_grids() {
            self.deferred_drops.borrow_mut().push(Box::new(object));
        }
    }

    /// Enqueues an operation on a stream, or adds it to the stream's capture.
    ///
    /// # Errors
    ///
    /// The capture was invalidated.
    pub(crate) fn enqueue(&self, stream: &Stream, op: Box<dyn StreamOp>) -> CudaResult<()> {
        stream.push(self, op)
    }

    /// Returns the number of polls of a stream's copy between its read of the source and its write
    /// of the target: with weak memory a random number below 4, else 0.
    pub(crate) fn copy_delay(&self) -> usize {
        match self.simulation().weak && self.gpus.random() {
            true => self.gpus.choose(4),
            false => 0,
        }
    }

    /// Records that an operation of a stream has made progress, and must be polled again.
    pub(crate) fn op_progressed(&self) {
        self.op_progressed.set(true);
    }

    /// Polls the heads of all streams and steps the GPUs. `host_waits` says whether all host
    /// threads wait.
    pub(super) fn run_gpus(&self, host_waits: bool) -> Progress {
        self.gpus.host.waits.set(host_waits);
        self.streams.borrow_mut().retain(|_, stream| !stream.is_over());
        let streams: Vec<_> = self.streams.borrow().values().cloned().collect();
        let mut advanced = false;
        for stream in streams {
            advanced |= stream.advance(self);
        }
        let op_progressed = self.op_progressed.take();
        if advanced || op_progressed {
            self.gpus.host.progressed();
        }
        // Calls advance the machine's clock, and kernels that read the GPUs' clock advance that.
        self.gpus.clock.set(self.gpus.now().max(self.clock()));
        let step = self.gpus.step();
        self.shared.advance(self.gpus.now());
        let printed = self.gpus.take_printed();
        if !printed.is_empty() {
            // Tests capture what `print!` prints. It panics if the standard output is closed, which
            // is not the kernel's error.
            let _ = std::panic::catch_unwind(|| print!("{printed}"));
        }
        if !self.gpus.has_grids() {
            drop(self.deferred_drops.take());
        }
        match step {
            Step::Failed(error) => {
                self.fail(error);
                Progress::Streams
            }
            _ if advanced => Progress::Streams,
            Step::Progress => Progress::Something,
            _ if op_progressed => Progress::Something,
            // A spinning thread may stop after some iterations, so this is no deadlock: without a
            // deadline the GPUs go on, and otherwise the clock advances to the first one.
            Step::Spinning if self.first_deadline().is_none() && !self.gpus.host.may_resume() => {
                Progress::Something
            }
            Step::Idle | Step::Stuck | Step::Spinning => Progress::Nothing,
        }
    }

    /// Returns the first deadline, of a kernel or a client.
    fn first_deadline(&self) -> Option<u64> {
        self.gpus.next_deadline().into_iter().chain(self.wake_at.get()).min()
    }

    /// Advances the clock to the first deadline; returns whether there is one.
    pub(super) fn advance_to_deadline(&self) -> bool {
        let first = self.first_deadline();
        first.inspect(|time| self.advance(*time)).is_some()
    }

    /// Lets a time pass in which nothing has happened on the machine.
    pub(super) fn sleep(&self, time: Duration) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.advance(self.clock().saturating_add(nanoseconds));
    }

    /// Advances the clock to `time`, unless it is later already.
    fn advance(&self, time: u64) {
        self.shared.advance(time);
        self.gpus.advance(time);
        self.gpus.host.progressed();
    }

    /// Returns the handle of the function of a module that runs `body` on `gpu`.
    pub(crate) fn bind(&self, gpu: usize, module: u64, body: &HostBody) -> CUfunction {
        let mut functions = self.functions.borrow_mut();
        let existing = functions.iter().find(|(_, function)| function.is(gpu, module, body));
        let handle = existing.map_or_else(|| self.new_handle(), |(handle, _)| *handle);
        functions.entry(handle).or_insert_with(|| Rc::new(Function::new(gpu, module, *body)));
        handle as CUfunction
    }
}
