//! Batches: the stream operations that one call or one group enqueues for a communicator.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::Poll;

use devcomm_sys::nccl::RawStream;

use super::call::{CallContext, NcclError, NcclResult};
use super::collective::Collective;
use super::comm::{Comm, RankComm};
use super::one_sided::{Put, SignalWait};
use super::p2p::Transfer;
use crate::machine::core::Core;
use crate::machine::driver::event::Event;
use crate::machine::driver::stream::{Stream, StreamOp};
use crate::race::{Clock, OpId};

/// One operation.
#[derive(Clone)]
pub(super) enum Operation {
    Collective(Collective),
    Transfer(Transfer),
    Put(Put),
    WaitSignals(Rc<[SignalWait]>),
}

/// The batches that a call or a group launches, one per communicator.
#[derive(Default)]
pub(super) struct Launches(Vec<Launch>);

struct Launch {
    rank_comm: Rc<RankComm>,
    /// The streams: the batch is enqueued on the first one, and events order it with the others.
    streams: Vec<Rc<Stream>>,
    operations: Vec<Operation>,
    /// The events that are recorded when the batch starts.
    events: Vec<Rc<Event>>,
}

impl Launches {
    pub(super) fn add(
        &mut self,
        rank_comm: &Rc<RankComm>,
        stream: Rc<Stream>,
        operation: Operation,
        event: Option<Rc<Event>>,
    ) {
        let known = self.0.iter().position(|launch| Rc::ptr_eq(&launch.rank_comm, rank_comm));
        let index = known.unwrap_or_else(|| {
            let rank_comm = Rc::clone(rank_comm);
            self.0.push(Launch { rank_comm, streams: vec![], operations: vec![], events: vec![] });
            self.0.len() - 1
        });
        let launch = &mut self.0[index];
        if !launch.streams.iter().any(|known| Rc::ptr_eq(known, &stream)) {
            launch.streams.push(stream);
        }
        launch.operations.push(operation);
        launch.events.extend(event);
    }

    /// Enqueues all batches. Returns whether a communicator is non-blocking.
    pub(super) fn enqueue(self, core: &Core) -> NcclResult<bool> {
        let mut is_busy = false;
        for Launch { rank_comm, streams, operations, events } in self.0 {
            let Some((main, others)) = streams.split_first() else { continue };
            for other in others {
                let reached = Rc::<Event>::default();
                reached.record(core, other)?;
                reached.wait(core, main)?;
            }
            events.iter().try_for_each(|event| event.record(core, main))?;
            let operations = operations.into();
            is_busy |= !rank_comm.settings.blocking;
            // Only for its effect: the next polls of the communicator find it in progress.
            let _ = rank_comm.code();
            core.enqueue(main, Box::new(Batch { rank_comm, operations, launched: None }))?;
            let done = Rc::<Event>::default();
            if !others.is_empty() {
                done.record(core, main)?;
            }
            for other in others {
                done.wait(core, other)?;
            }
        }
        Ok(is_busy)
    }
}

impl CallContext<'_> {
    /// Returns a stream on the communicator's GPU.
    pub(super) fn stream(&self, rank_comm: &RankComm, stream: RawStream) -> NcclResult<Rc<Stream>> {
        let stream = self.core.stream(rank_comm.gpu, stream.cast())?;
        if stream.gpu() == rank_comm.gpu {
            return Ok(stream);
        }
        let (gpu, own) = (stream.gpu(), rank_comm.gpu);
        Err(NcclError::argument(format!(
            "a stream of GPU {gpu}, but the communicator is on GPU {own}"
        )))
    }
}

/// The stream operation of a batch: operations of one communicator that progress together.
struct Batch {
    rank_comm: Rc<RankComm>,
    operations: Rc<[Operation]>,
    launched: Option<Launched>,
}

struct Launched {
    /// The sequence number of the batch's first collective.
    first: u64,
    /// The rank communicator's epoch when the batch was enqueued.
    epoch: u64,
    /// The state of each operation, once it has begun.
    pending: Vec<Rc<PendingOp>>,
    /// Counts the batch in [`RankComm::queued`].
    _queued: Rc<()>,
}

/// An operation that one rank has begun.
pub(super) struct PendingOp {
    pub(super) rank_comm: Rc<RankComm>,
    epoch: u64,
    pub(super) is_done: Cell<bool>,
    /// The identity for the detection of races, and the clock of the stream at the beginning.
    pub(super) race: (OpId, Clock),
    /// The clock that an operation after the end joins.
    pub(super) learned: RefCell<Clock>,
}

impl PendingOp {
    /// Returns whether the rank has cancelled the operation.
    pub(super) fn is_cancelled(&self) -> bool {
        self.rank_comm.epoch.get() != self.epoch
    }
}

impl Batch {
    /// Begins all operations.
    fn begin(&self, core: &Core, comm: &Comm, rank: usize, launched: &mut Launched) {
        let mut number = launched.first;
        let name = match *self.operations {
            [Operation::Collective(Collective { kind, .. })] => kind.name(),
            [Operation::Transfer(_)] => "a send or receive",
            [Operation::Put(_)] => "a put of the host",
            _ => "a group of NCCL operations",
        };
        for operation in &*self.operations {
            let (rank_comm, epoch) = (Rc::clone(&self.rank_comm), launched.epoch);
            let race = core.memory.races.current(name);
            let (is_done, learned) = Default::default();
            let pending = Rc::new(PendingOp { rank_comm, epoch, is_done, race, learned });
            launched.pending.push(Rc::clone(&pending));
            match operation {
                Operation::Collective(collective) => {
                    comm.arrive(core, number, rank, *collective, pending);
                    number += 1;
                }
                Operation::Transfer(transfer) => comm.post(core, rank, *transfer, pending),
                Operation::Put(put) => {
                    comm.put(core, put);
                    pending.is_done.set(true);
                }
                Operation::WaitSignals(_) => {}
            }
        }
    }
}

impl StreamOp for Batch {
    fn enqueued(&mut self, _core: &Core) {
        let is_collective = |op: &&Operation| matches!(op, Operation::Collective(_));
        let collectives = self.operations.iter().filter(is_collective).count();
        let counter = &self.rank_comm.collectives;
        self.launched = Some(Launched {
            first: counter.replace(counter.get() + collectives as u64),
            epoch: self.rank_comm.epoch.get(),
            pending: Vec::new(),
            _queued: Rc::clone(&self.rank_comm.queued),
        });
    }

    fn poll(&mut self, core: &Core) -> Poll<()> {
        let (Some(mut launched), Ok((comm, rank))) =
            (self.launched.take(), self.rank_comm.joined())
        else {
            return Poll::Ready(());
        };
        let may_begin = self.rank_comm.is_usable() && self.rank_comm.epoch.get() == launched.epoch;
        if launched.pending.is_empty() && may_begin {
            self.begin(core, comm, rank, &mut launched);
        }
        for (operation, pending) in self.operations.iter().zip(&launched.pending) {
            if let (Operation::WaitSignals(waits), false) = (operation, pending.is_done.get())
                && let Some(clock) = comm.take_signals(core, waits)
            {
                pending.learned.replace(clock);
                pending.is_done.set(true);
            }
        }
        for pending in launched.pending.iter().filter(|pending| pending.is_done.get()) {
            core.memory.races.learn_here(&pending.learned.borrow());
        }
        let is_cancelled =
            self.rank_comm.epoch.get() != launched.epoch || !self.rank_comm.is_usable();
        if is_cancelled || launched.pending.iter().all(|pending| pending.is_done.get()) {
            return Poll::Ready(());
        }
        self.launched = Some(launched);
        Poll::Pending
    }

    fn name(&self) -> String {
        let names = self.operations.iter().map(|operation| match operation {
            Operation::Collective(collective) => collective.kind.name().to_owned(),
            Operation::Transfer(transfer) => transfer.to_string(),
            Operation::Put(_) => "a put".to_owned(),
            Operation::WaitSignals(_) => "a wait for signals".to_owned(),
        });
        names.collect::<Vec<_>>().join(", ")
    }

    fn describe(&self, _core: &Core) -> String {
        let (Some(launched), Ok((comm, _))) = (&self.launched, self.rank_comm.joined()) else {
            return "an operation of a destroyed communicator".to_owned();
        };
        let mut number = launched.first;
        let mut waiting = Vec::new();
        for (index, operation) in self.operations.iter().enumerate() {
            let is_done = launched.pending.get(index).is_some_and(|pending| pending.is_done.get());
            if !is_done {
                waiting.push(match operation {
                    Operation::Collective(collective) => comm.describe(number, *collective),
                    Operation::Transfer(transfer) => transfer.to_string(),
                    Operation::Put(_) => "a put".to_owned(),
                    Operation::WaitSignals(waits) => {
                        let waits = waits.iter().map(ToString::to_string);
                        waits.collect::<Vec<_>>().join(", ")
                    }
                });
            }
            number += u64::from(matches!(operation, Operation::Collective(_)));
        }
        format!("{} waits in {}", self.rank_comm.name(), waiting.join(", "))
    }

    fn duplicate(&self) -> Box<dyn StreamOp> {
        let (rank_comm, operations) = (Rc::clone(&self.rank_comm), Rc::clone(&self.operations));
        Box::new(Self { rank_comm, operations, launched: None })
    }
}
