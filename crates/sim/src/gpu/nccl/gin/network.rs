//! GIN operations in flight, and their delivery.
//!
//! Every context of a rank has a queue to each peer. An operation is posted, then sent (its source
//! is read; for a put, that completes it locally and increments its counter), then delivered to its
//! target; its signal is added last. Queues are independent, and posting never delivers, so that a
//! kernel that lacks a wait fails.
//!
//! Without a seed, [`Network::deliver`] delivers all sent operations and sends all posted ones.
//! [`Network::step`] sends or delivers one operation: with a seed at random, or by a list of
//! choices. A weak signal, which is ordered only after its own put and after what was flushed
//! before, may then overtake other earlier operations that have no signal.
//!
//! # Safety
//!
//! The addresses in an operation lie in windows, signals and counters, which were checked when it
//! was posted. It may be delivered after its kernel has ended: signals and counters end with their
//! device communicator, which removes its queues, and windows are checked again. No operation has a
//! reference to a kernel's memory.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use litemap::LiteMap;

use super::Unflushed;
use crate::base::arguments::Arguments;
use crate::base::error::{Error, Result, Site, ThreadId};
use crate::base::ids::GridId;
use crate::base::owner::Registry;
use crate::base::timeline::{Message, Row, Timeline};
use crate::gpu::thread::Grid;
use crate::memory::Memory;
use crate::race::{self, Clock, OpAccess, OpId, Races, Sequence};

/// Identifies a queue.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct QueueKey {
    /// The device communicator's id.
    pub(crate) comm: u32,
    pub(crate) rank: u32,
    pub(crate) context: u32,
    /// World rank of the peer.
    pub(crate) peer: u32,
}

/// The data movement of an operation.
pub(super) enum Transfer {
    Nothing,
    Put { from: *const u8, to: *mut u8, bytes: usize },
    Value { value: [u8; 8], to: *mut u8, bytes: usize },
    Get { from: *const u8, to: *mut u8, bytes: usize },
}

/// An addition to a 64-bit word on the target rank, once the data is delivered.
#[derive(Clone, Copy)]
pub(super) struct Add {
    pub(super) word: *mut u64,
    pub(super) value: u64,
    pub(super) strong: bool,
    /// Whether the word is in a window.
    pub(super) in_window: bool,
}

/// The thread that posted an operation.
#[derive(Clone, Copy)]
pub(super) struct Poster {
    pub(super) kernel: &'static str,
    pub(super) grid: GridId,
    pub(super) thread: ThreadId,
    pub(super) at: Site,
    /// Whether the post has released the thread's writes.
    pub(super) releases: bool,
}

/// An operation.
pub(super) struct Operation {
    /// The GPU of the peer.
    pub(super) to: usize,
    pub(super) transfer: Transfer,
    pub(super) signal: Option<Add>,
    pub(super) counter: Option<*mut u64>,
    pub(super) by: Poster,
    /// The memory that the arguments of its kernel refer to.
    pub(super) arguments: Rc<Arguments>,
    /// The clock of the thread that posted it, with the thread's own accesses.
    pub(super) known: Clock,
    /// What its signal releases, but for its own accesses.
    pub(super) released: Clock,
}

/// An operation in flight.
struct InFlight {
    number: u64,
    operation: Operation,
    /// Operations before this number had been flushed when it was posted.
    flushed: u64,
    /// The data read from its source, and the identity of this read.
    payload: Vec<u8>,
    read: Option<OpId>,
    /// The time of the timeline when it was posted.
    posted_at: u64,
}

struct Queue {
    posted: VecDeque<InFlight>,
    sent: VecDeque<InFlight>,
    /// Sequence number of the next operation.
    next: u64,
    /// Operations before this number have been flushed.
    flushed: u64,
    /// The reads of sources, the deliveries, and the gets: each of these ends in order.
    reads: Sequence,
    deliveries: Sequence,
    gets: Sequence,
    /// The last put or get of each block and line that no flush has covered.
    unflushed: Vec<UnflushedOp>,
}

/// A put or get that no flush has covered.
struct UnflushedOp {
    number: u64,
    by: Poster,
    is_get: bool,
    /// The local memory.
    local: usize,
}

impl Queue {
    fn new(races: &Races) -> Self {
        let (posted, sent, next, flushed, unflushed) = Default::default();
        let [reads, deliveries, gets] = [(); 3].map(|()| races.sequence());
        Self { posted, sent, next, flushed, reads, deliveries, gets, unflushed }
    }

    fn is_empty(&self) -> bool {
        self.posted.is_empty() && self.sent.is_empty()
    }

    /// Sends the first posted operation.
    fn send(&mut self, memory: &Memory) -> Result<()> {
        let Some(mut flight) = self.posted.pop_front() else { return Ok(()) };
        match flight.operation.transfer {
            Transfer::Put { from, bytes, .. } => {
                flight.operation.by.check(memory, from.addr(), bytes)?;
                let op = flight.part_of(&self.reads, memory);
                flight.access(memory, op, from.addr(), bytes, OpAccess::Read)?;
                flight.read = Some(op);
                flight.payload.reserve_exact(bytes);
                // SAFETY: the module's contract; the vector has the capacity.
                unsafe {
                    from.copy_to_nonoverlapping(flight.payload.as_mut_ptr(), bytes);
                    flight.payload.set_len(bytes);
                }
            }
            Transfer::Value { value, bytes, .. } => flight.payload.extend(&value[..bytes]),
            Transfer::Get { .. } | Transfer::Nothing => {}
        }
        if let Some(counter) = flight.operation.counter {
            // SAFETY: the word is a counter's, in memory that lives as long as its communicator.
            unsafe { *counter = (*counter).wrapping_add(1) };
            // It counts its own read; earlier reads have ended only if they were flushed.
            let races = &memory.races;
            let known = flight.with_read(races, &flight.operation.known, &self.reads);
            races.release_to(memory, counter.addr(), flight.rank(), known);
            let reads = flight.with_read(races, &Clock::default(), &self.reads);
            races.count(memory, counter.addr(), &reads);
        }
        self.sent.push_back(flight);
        Ok(())
    }

    /// Delivers the sent operation with this index.
    fn deliver(&mut self, index: usize, memory: &Memory, timeline: &Timeline) -> Result<()> {
        let Some(flight) = self.sent.remove(index) else { return Ok(()) };
        timeline.message(|arrived| flight.message(arrived));
        let InFlight { operation, payload, number, flushed, .. } = &flight;
        let by = operation.by;
        let sequence = match operation.transfer {
            Transfer::Get { .. } => &self.gets,
            _ => &self.deliveries,
        };
        let op = flight.part_of(sequence, memory);
        match operation.transfer {
            Transfer::Put { to, .. } | Transfer::Value { to, .. } => {
                by.check(memory, to.addr(), payload.len())?;
                flight.access(memory, op, to.addr(), payload.len(), OpAccess::Write)?;
                // SAFETY: the module's contract; `to` has space for the payload.
                unsafe { to.copy_from_nonoverlapping(payload.as_ptr(), payload.len()) };
            }
            Transfer::Get { from, to, bytes } => {
                by.check(memory, from.addr(), bytes)?;
                by.check(memory, to.addr(), bytes)?;
                flight.access(memory, op, from.addr(), bytes, OpAccess::Read)?;
                flight.access(memory, op, to.addr(), bytes, OpAccess::Write)?;
                // SAFETY: the module's contract; source and target may overlap.
                unsafe { to.copy_from(from, bytes) };
            }
            Transfer::Nothing => {}
        }
        if let Some(Add { word, value, in_window, strong }) = operation.signal {
            if in_window {
                by.check(memory, word.addr(), size_of::<u64>())?;
            }
            // SAFETY: the module's contract. A word in a window is aligned, as its poster checked.
            unsafe { *word = (*word).wrapping_add(value) };
            let races = &memory.races;
            let known = &operation.released;
            let known = match strong {
                true => races.after(known, sequence, *number),
                false => {
                    // If nothing was flushed, 0 minus 1 stands for no operation.
                    let flushed = races.after(known, sequence, flushed.wrapping_sub(1));
                    races.after_op(&flushed, op)
                }
            };
            races.release_to(memory, word.addr(), flight.rank(), known);
        }
        Ok(())
    }

    /// Returns the indices of the sent operations, at least one, that may be delivered now: the
    /// first operation, and the first one with a signal if that signal is weak.
    fn deliverable(&self) -> Vec<usize> {
        let unsignaled = self.sent.iter().take_while(|f| f.operation.signal.is_none()).count();
        let overtakes = self.sent.get(unsignaled).is_some_and(|flight| {
            flight.operation.signal.is_some_and(|signal| !signal.strong)
                && self.sent[0].number >= flight.flushed
        });
        let mut indices = vec![0];
        if overtakes && unsignaled > 0 {
            indices.push(unsignaled);
        }
        indices
    }
}

impl InFlight {
    fn rank(&self) -> usize {
        self.operation.by.thread.rank
    }

    /// Returns the operation's message on the timeline.
    fn message(&self, arrived: u64) -> Message {
        let Operation { to, transfer, signal, by, .. } = &self.operation;
        let data = match transfer {
            Transfer::Put { bytes, .. } => format!("put of {bytes} bytes"),
            Transfer::Value { bytes, .. } => format!("put of a value of {bytes} bytes"),
            Transfer::Get { bytes, .. } => format!("get of {bytes} bytes"),
            Transfer::Nothing => String::new(),
        };
        let name = match (data.as_str(), signal) {
            ("", _) => "signal".to_owned(),
            (_, Some(_)) => format!("{data} with a signal"),
            (_, None) => data,
        };
        let from = (by.thread.rank, Row::Block(by.kernel, by.thread.block));
        Message { from, posted: self.posted_at, to: *to, arrived, name, at: by.at }
    }

    /// Returns the operation's identity in one of the queue's sequences.
    fn part_of(&self, sequence: &Sequence, memory: &Memory) -> OpId {
        let transfer = match self.operation.transfer {
            Transfer::Get { .. } => race::Transfer::Get,
            _ => race::Transfer::Put,
        };
        let Operation { by: Poster { thread, at, releases, .. }, arguments, .. } = &self.operation;
        let by = (*thread, *releases);
        memory.races.transfer(sequence, self.number, transfer, by, (at, arguments))
    }

    /// Returns what is known after the read of its source, and after the earlier reads of the queue
    /// that were flushed when it was posted.
    fn with_read(&self, races: &Races, known: &Clock, reads: &Sequence) -> Clock {
        let known = races.after(known, reads, self.flushed.wrapping_sub(1));
        self.read.map_or_else(|| known.clone(), |read| races.after_op(&known, read))
    }

    /// Checks an access against those of others.
    fn access(
        &self,
        memory: &Memory,
        op: OpId,
        address: usize,
        bytes: usize,
        access: OpAccess,
    ) -> Result<()> {
        let by = (op, self.operation.known.clone());
        memory.races.op_access(memory, &by, address, bytes, access)
    }
}

impl Poster {
    /// Returns whether the other operation was posted by the same block at the same line.
    fn is_like(&self, other: &Self) -> bool {
        let key = |poster: &Self| (poster.grid, poster.thread.block, poster.at);
        key(self) == key(other)
    }

    /// Fails if memory was freed since the operation was posted.
    fn check(self, memory: &Memory, address: usize, bytes: usize) -> Result<()> {
        if memory.is_live(address, bytes) {
            return Ok(());
        }
        let Self { kernel, thread, at, .. } = self;
        let what = format!(
            "the operation that it posted was under way when {bytes} bytes at {address:#x} that \
            it accesses were freed: before freeing, flush and wait for the operation's signal"
        );
        Err(Error::Misuse { kernel, thread, what, at })
    }
}

/// All operations in flight.
pub(crate) struct Network {
    memory: Rc<Memory>,
    timeline: Rc<Timeline>,
    queues: RefCell<LiteMap<QueueKey, Queue>>,
    /// The non-empty queues, in the order in which they became non-empty.
    busy: RefCell<Vec<QueueKey>>,
}

impl Network {
    /// Returns an idle network over `memory`.
    pub(crate) fn new(memory: Rc<Memory>, timeline: Rc<Timeline>) -> Self {
        Self { memory, timeline, queues: RefCell::default(), busy: RefCell::default() }
    }

    /// Drops all operations in flight.
    pub(crate) fn clear(&self) {
        self.queues.borrow_mut().clear();
        self.busy.borrow_mut().clear();
    }

    /// Drops a device communicator's operations in flight, and forgets the accesses to its signals.
    pub(super) fn forget(&self, comm: u32, words: impl Iterator<Item = *const [Cell<u64>]>) {
        for words in words {
            self.memory.races.forget(words.addr(), words.len() * size_of::<u64>());
        }
        self.queues.borrow_mut().retain(|key, _| key.comm != comm);
        self.busy.borrow_mut().retain(|key| key.comm != comm);
    }

    /// Returns whether no operation is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.busy.borrow().is_empty()
    }

    /// Posts an operation.
    pub(super) fn post(&self, key: QueueKey, operation: Operation) {
        let mut queues = self.queues.borrow_mut();
        let queue = queues.entry(key).or_insert_with(|| Queue::new(&self.memory.races));
        if queue.is_empty() {
            self.busy.borrow_mut().push(key);
        }
        // A put with a counter needs no flush: the counter tells when its source has been read.
        let local = match operation.transfer {
            Transfer::Put { from, .. } => Some((false, from.addr())),
            Transfer::Get { to, .. } => Some((true, to.addr())),
            Transfer::Value { .. } | Transfer::Nothing => None,
        };
        if let (Some((is_get, local)), None) = (local, operation.counter) {
            let (number, by) = (queue.next, operation.by);
            queue.unflushed.retain(|open| !by.is_like(&open.by));
            queue.unflushed.push(UnflushedOp { number, by, is_get, local });
        }
        let (number, flushed, payload) = (queue.next, queue.flushed, Vec::new());
        let posted_at = self.timeline.now();
        queue.posted.push_back(InFlight {
            number,
            operation,
            flushed,
            payload,
            read: None,
            posted_at,
        });
        queue.next += 1;
    }

    /// Records that a fence has covered all puts of a rank so far, on one context or on all.
    pub(in crate::gpu::nccl) fn fenced(&self, comm: u32, rank: u32, context: Option<u32>) {
        for (key, queue) in &mut *self.queues.borrow_mut() {
            let covered = context.is_none_or(|context| context == key.context);
            if covered && (key.comm, key.rank) == (comm, rank) {
                queue.unflushed.retain(|open| open.is_get);
            }
        }
    }

    /// Removes and returns the puts and gets of a grid that no flush has covered.
    pub(crate) fn take_unflushed(&self, grid: &Grid) -> Vec<Unflushed> {
        let mut left = Vec::new();
        for (_, queue) in &mut *self.queues.borrow_mut() {
            queue.unflushed.retain(|UnflushedOp { by, is_get, local, .. }| {
                if by.grid != grid.id {
                    return true;
                }
                let arguments = &grid.launch.arguments;
                let place = self.memory.owner_at(*local);
                let memory = place.map(|(owner, at)| arguments.name(owner, at).to_string());
                let memory = memory.unwrap_or_else(|| "freed memory".to_owned());
                let Poster { thread, at, .. } = *by;
                left.push(Unflushed { thread, memory, is_get: *is_get, at });
                false
            });
        }
        left
    }

    /// Returns the number of operations that are posted but not sent.
    pub(crate) fn posted(&self, key: QueueKey) -> usize {
        self.queues.borrow().get(&key).map_or(0, |queue| queue.posted.len())
    }

    /// Returns the sequence number of the next operation of a queue.
    pub(super) fn next(&self, key: QueueKey) -> u64 {
        self.queues.borrow().get(&key).map_or(0, |queue| queue.next)
    }

    /// Returns the sequence number below which all operations are complete locally; without `gets`,
    /// a get counts as complete once it is sent.
    pub(crate) fn complete(&self, key: QueueKey, gets: bool) -> u64 {
        let queues = self.queues.borrow();
        let Some(queue) = queues.get(&key) else { return 0 };
        let is_get = |f: &&InFlight| matches!(f.operation.transfer, Transfer::Get { .. });
        let first_get = queue.sent.iter().find(is_get).filter(|_| gets);
        first_get.or(queue.posted.front()).map_or(queue.next, |flight| flight.number)
    }

    /// Records that a thread has found the operations of a queue before `before` complete, its gets
    /// only with `gets`. Returns the clocks of the ends of the reads of their sources, and of the
    /// gets.
    pub(crate) fn flushed(&self, key: QueueKey, before: u64, gets: bool) -> [Clock; 2] {
        let mut queues = self.queues.borrow_mut();
        let Some(queue) = queues.get_mut(&key) else { return Default::default() };
        queue.flushed = queue.flushed.max(before);
        queue.unflushed.retain(|open| open.number >= before || (open.is_get && !gets));
        let (races, last) = (&self.memory.races, before.wrapping_sub(1));
        [&queue.reads, &queue.gets].map(|done| races.after(&Clock::default(), done, last))
    }

    /// Returns whether an operation in flight will change this signal or counter.
    pub(super) fn will_change(&self, word: *const u64) -> bool {
        let queues = self.queues.borrow();
        let changes = |flight: &InFlight| {
            let Operation { signal, .. } = flight.operation;
            signal.is_some_and(|add| std::ptr::eq(add.word, word))
        };
        let counts = |flight: &InFlight| {
            flight.operation.counter.is_some_and(|counter| std::ptr::eq(counter, word))
        };
        queues.values().any(|queue| {
            queue.posted.iter().any(|f| changes(f) || counts(f)) || queue.sent.iter().any(changes)
        })
    }

    /// Delivers all sent operations, and sends all posted ones.
    pub(crate) fn deliver(&self) -> Result<()> {
        let (mut queues, mut busy) = (self.queues.borrow_mut(), self.busy.borrow_mut());
        for key in std::mem::take(&mut *busy) {
            let Some(queue) = queues.get_mut(&key) else { continue };
            while !queue.sent.is_empty() {
                queue.deliver(0, &self.memory, &self.timeline)?;
            }
            while !queue.posted.is_empty() {
                queue.send(&self.memory)?;
            }
            if !queue.is_empty() {
                busy.push(key);
            }
        }
        Ok(())
    }

    /// Sends or delivers one operation. `choose` chooses an index below its argument.
    pub(crate) fn step(&self, choose: &mut dyn FnMut(usize) -> usize) -> Result<()> {
        let (mut queues, mut busy) = (self.queues.borrow_mut(), self.busy.borrow_mut());
        if busy.is_empty() {
            return Ok(());
        }
        let chosen = choose(busy.len());
        let Some(queue) = queues.get_mut(&busy[chosen]) else { return Ok(()) };
        if queue.sent.is_empty() || !queue.posted.is_empty() && choose(2) == 0 {
            queue.send(&self.memory)?;
        } else {
            let indices = queue.deliverable();
            let index = indices[choose(indices.len())];
            queue.deliver(index, &self.memory, &self.timeline)?;
        }
        if queue.is_empty() {
            busy.swap_remove(chosen);
        }
        Ok(())
    }
}
