//! What a communicator does in streams: the operations of one call, or of one group.

use std::cell::Cell;
use std::rc::Rc;
use std::task::Poll;

use devcomm_sys::nccl::RawStream;

use super::call::{Ask, Refusal, Refused};
use super::collective::Collective;
use super::comm::{Comm, Member};
use super::one_sided::{Awaited, Put};
use super::p2p::Transfer;
use crate::driver::event::Event;
use crate::driver::stream::{Stream, StreamOp};
use crate::machine::core::Core;

/// One operation.
#[derive(Clone)]
pub(super) enum Operation {
    Collective(Collective),
    Transfer(Transfer),
    Put(Put),
    Await(Rc<[Awaited]>),
}

/// What a call or a group launches: a batch for each communicator.
#[derive(Default)]
pub(super) struct Launches(Vec<Launch>);

struct Launch {
    member: Rc<Member>,
    /// The batch is in the first one. The others wait for it, and it for them.
    streams: Vec<Rc<Stream>>,
    operations: Vec<Operation>,
    /// Recorded when the batch starts.
    events: Vec<Rc<Event>>,
}

impl Launches {
    pub(super) fn add(
        &mut self,
        member: &Rc<Member>,
        stream: Rc<Stream>,
        operation: Operation,
        event: Option<Rc<Event>>,
    ) {
        let known = self.0.iter().position(|launch| Rc::ptr_eq(&launch.member, member));
        let index = known.unwrap_or_else(|| {
            let member = Rc::clone(member);
            self.0.push(Launch { member, streams: vec![], operations: vec![], events: vec![] });
            self.0.len() - 1
        });
        let launch = &mut self.0[index];
        if !launch.streams.iter().any(|known| Rc::ptr_eq(known, &stream)) {
            launch.streams.push(stream);
        }
        launch.operations.push(operation);
        launch.events.extend(event);
    }

    /// Appends all to their streams. Whether that goes on in the background.
    pub(super) fn enqueue(self, core: &Core) -> Refused<bool> {
        let mut is_busy = false;
        for Launch { member, streams, operations, events } in self.0 {
            let Some((main, others)) = streams.split_first() else { continue };
            for other in others {
                let reached = Rc::<Event>::default();
                reached.record(core, other);
                reached.wait(core, main)?;
            }
            events.iter().for_each(|event| event.record(core, main));
            let operations = operations.into();
            is_busy |= !member.settings.blocking;
            let _ = member.code();
            core.enqueue(main, Box::new(Batch { member, operations, launched: None }));
            let done = Rc::<Event>::default();
            if !others.is_empty() {
                done.record(core, main);
            }
            for other in others {
                done.wait(core, other)?;
            }
        }
        Ok(is_busy)
    }
}

impl Ask<'_> {
    /// A stream on the communicator's GPU.
    pub(super) fn stream(&self, member: &Member, stream: RawStream) -> Refused<Rc<Stream>> {
        let stream = self.core.stream(member.gpu, stream.cast())?;
        if stream.gpu() == member.gpu {
            return Ok(stream);
        }
        let (gpu, own) = (stream.gpu(), member.gpu);
        Err(Refusal::argument(format!("a stream of GPU {gpu} for a communicator of GPU {own}")))
    }
}

/// Operations of one communicator that go on together, as one of a stream.
struct Batch {
    member: Rc<Member>,
    operations: Rc<[Operation]>,
    launched: Option<Launched>,
}

struct Launched {
    /// The number of its first collective.
    first: u64,
    epoch: u64,
    /// For each operation, once it has begun.
    tickets: Vec<Rc<Ticket>>,
    _queued: Rc<()>,
}

/// One rank's part in an operation that has begun.
pub(super) struct Ticket {
    pub(super) member: Rc<Member>,
    epoch: u64,
    pub(super) is_done: Cell<bool>,
}

impl Ticket {
    /// Whether the rank has ended it.
    pub(super) fn is_cut(&self) -> bool {
        self.member.epoch.get() != self.epoch
    }
}

impl Batch {
    /// Begins all operations.
    fn begin(&self, core: &Core, comm: &Comm, rank: usize, launched: &mut Launched) {
        let mut number = launched.first;
        for operation in &*self.operations {
            let (member, epoch) = (Rc::clone(&self.member), launched.epoch);
            let ticket = Rc::new(Ticket { member, epoch, is_done: Cell::new(false) });
            launched.tickets.push(Rc::clone(&ticket));
            match operation {
                Operation::Collective(collective) => {
                    comm.arrive(core, number, rank, *collective, ticket);
                    number += 1;
                }
                Operation::Transfer(transfer) => comm.post(core, rank, *transfer, ticket),
                Operation::Put(put) => {
                    comm.put(core, put);
                    ticket.is_done.set(true);
                }
                Operation::Await(_) => {}
            }
        }
    }
}

impl StreamOp for Batch {
    fn enqueued(&mut self, _core: &Core) {
        let is_collective = |op: &&Operation| matches!(op, Operation::Collective(_));
        let collectives = self.operations.iter().filter(is_collective).count();
        let counter = &self.member.collectives;
        self.launched = Some(Launched {
            first: counter.replace(counter.get() + collectives as u64),
            epoch: self.member.epoch.get(),
            tickets: Vec::new(),
            _queued: Rc::clone(&self.member.queued),
        });
    }

    fn poll(&mut self, core: &Core) -> Poll<()> {
        let (Some(mut launched), Ok((comm, rank))) = (self.launched.take(), self.member.place())
        else {
            return Poll::Ready(());
        };
        let may_begin = self.member.is_usable() && self.member.epoch.get() == launched.epoch;
        if launched.tickets.is_empty() && may_begin {
            self.begin(core, comm, rank, &mut launched);
        }
        for (operation, ticket) in self.operations.iter().zip(&launched.tickets) {
            if let (Operation::Await(awaited), false) = (operation, ticket.is_done.get()) {
                ticket.is_done.set(comm.take_signals(awaited));
            }
        }
        let is_cut = self.member.epoch.get() != launched.epoch || !self.member.is_usable();
        if is_cut || launched.tickets.iter().all(|ticket| ticket.is_done.get()) {
            return Poll::Ready(());
        }
        self.launched = Some(launched);
        Poll::Pending
    }

    fn describe(&self, _core: &Core) -> String {
        let (Some(launched), Ok((comm, _))) = (&self.launched, self.member.place()) else {
            return "an operation of a communicator that has ended".to_owned();
        };
        let mut number = launched.first;
        let mut waiting = Vec::new();
        for (index, operation) in self.operations.iter().enumerate() {
            let is_done = launched.tickets.get(index).is_some_and(|ticket| ticket.is_done.get());
            if !is_done {
                waiting.push(match operation {
                    Operation::Collective(collective) => comm.describe(number, *collective),
                    Operation::Transfer(transfer) => transfer.to_string(),
                    Operation::Put(_) => "a put".to_owned(),
                    Operation::Await(awaited) => {
                        let awaited = awaited.iter().map(ToString::to_string);
                        awaited.collect::<Vec<_>>().join(", ")
                    }
                });
            }
            number += u64::from(matches!(operation, Operation::Collective(_)));
        }
        format!("{} waits in {}", self.member.name(), waiting.join(", "))
    }

    fn duplicate(&self) -> Box<dyn StreamOp> {
        let (member, operations) = (Rc::clone(&self.member), Rc::clone(&self.operations));
        Box::new(Self { member, operations, launched: None })
    }
}
