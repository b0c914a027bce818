//! Operations: kernels, copies, collectives and network transfers, and what orders them.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use cuda_std::arch::{Access, Order, Scope, Space};

use super::clock::{Agent, Chain, Clock, OpId};
use super::shadow::{Kind, MAX_OPS, Stamp};
use super::sync::{NO_WORD, Position, Release, add_release};
use super::{Accessor, FoundRace, Races, ThreadClock};
use crate::base::arguments::Arguments;
use crate::base::error::{Error, Race, RaceAccess, Site, ThreadId};
use crate::base::owner::{Owner, Registry};

/// The description of an operation in reports.
#[derive(Clone, Debug)]
pub(super) struct OpInfo {
    pub(super) name: &'static str,
    pub(super) gpu: u32,
    at: Option<Site>,
    /// The kind of a transfer over the network, the thread that posted it, and whether the post
    /// released the thread's writes.
    pub(super) transfer: Option<(Transfer, ThreadId, bool)>,
    /// The arguments of the kernel, or of the kernel that posted a transfer.
    arguments: Option<Rc<Arguments>>,
    /// The clock at the operation's start, if it is a kernel.
    pub(super) start: Option<Clock>,
}

impl OpInfo {
    fn new(name: &'static str, gpu: u32) -> Self {
        Self { name, gpu, at: None, transfer: None, arguments: None, start: None }
    }
}

/// An operation of the network that reads memory, writes it, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transfer {
    Put,
    Get,
}

/// What NCCL releases of a thread's writes before it posts a transfer of the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Releases {
    Nothing,
    /// The network, which reads them, and the thread's GPU get them.
    ToGpu,
    /// The peer gets them too, by the transfer's signal.
    ToSystem,
}

/// A sequence of operations that end in order, such as a stream, and the clock of its end.
pub(crate) struct Sequence {
    chain: Chain,
    /// The number of the last operation that has started.
    last: Cell<u32>,
    pub(crate) clock: RefCell<Clock>,
    /// The list that gets the chain when the sequence is dropped, if another one may continue it.
    ended: Option<EndedChains>,
}

/// The time of all accesses of an operation that is not a kernel.
const OP_TIME: u32 = 1;

/// An access of an operation that is not a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpAccess {
    Read,
    Write,
}

/// The chains of sequences that have been dropped, with the number of the last operation.
pub(super) type EndedChains = Rc<RefCell<Vec<(Chain, u32)>>>;

impl Drop for Sequence {
    fn drop(&mut self) {
        if let Some(ended) = &self.ended {
            ended.borrow_mut().push((self.chain, self.last.get()));
        }
    }
}

/// A running operation of a sequence.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    chain: Chain,
    number: u32,
    gpu: u32,
    /// The clock of the operation: what happened before it, and what it learns.
    clock: Clock,
    /// The identity, once it has accessed memory.
    op: Option<OpId>,
}

/// Fails if the accesses of an operation have no room for its number.
fn require_number(op: OpId) -> Result<(), Error> {
    if op.0 <= MAX_OPS {
        return Ok(());
    }
    Err(Error::Settings(format!(
        "more kernels, copies and transfers than the {MAX_OPS} that the detection of races can \
         tell apart: turn it off (`Simulation::races`)"
    )))
}

impl Races {
    /// Returns a sequence on a chain of its own.
    pub(crate) fn sequence(&self) -> Sequence {
        let chain = Chain(self.chains.get());
        self.chains.set(chain.0 + 1);
        Sequence { chain, last: Cell::new(0), clock: RefCell::default(), ended: None }
    }

    /// Returns a sequence whose operations the GPU of the calling host thread enqueues.
    ///
    /// It continues the chain of a dropped sequence if the thread knows that all operations of that
    /// sequence have ended: the new operations come after them in any case. Otherwise clocks would
    /// grow with each stream and graph of a long job.
    pub(crate) fn host_sequence(&self) -> Sequence {
        let mut sequence = self.sequence();
        if self.current_host().is_some() {
            let known = self.host();
            let has_ended = |end: &(Chain, u32)| self.joins.places.have_ended(end.0, &known);
            let mut chains = self.ended.borrow_mut();
            if let Some(at) = chains.iter().rposition(has_ended) {
                let (chain, last) = chains.swap_remove(at);
                (sequence.chain, sequence.last) = (chain, Cell::new(last));
            }
        }
        sequence.ended = Some(Rc::clone(&self.ended));
        sequence
    }

    /// Starts the sequence's next operation, of `gpu`, after what `clock` knows.
    pub(crate) fn start(&self, sequence: &Sequence, gpu: usize, clock: &Clock) -> Run {
        let number = sequence.last.get() + 1;
        sequence.last.set(number);
        let mut known = sequence.clock.borrow().clone();
        self.joins.join(&mut known, clock);
        Run { chain: sequence.chain, number, gpu: gpu as u32, clock: known, op: None }
    }

    /// Starts the sequence's next operation, a part of the stream operation that runs now.
    pub(crate) fn start_part(&self, sequence: &Sequence) -> Run {
        let (gpu, clock) = match &*self.current.borrow() {
            Some(run) => (run.gpu, run.clock.clone()),
            None => (0, Clock::default()),
        };
        self.start(sequence, gpu as usize, &clock)
    }

    /// Performs `poll` as a part of the operation.
    pub(crate) fn within<R>(&self, run: &mut Run, poll: impl FnOnce() -> R) -> R {
        let outer = self.current.replace(Some(run.clone()));
        let result = poll();
        if let Some(after) = self.current.replace(outer) {
            *run = after;
        }
        result
    }

    /// Returns what is known after the operation has ended.
    pub(crate) fn end(&self, run: Run) -> Clock {
        let Run { chain, number, mut clock, op, .. } = run;
        if op.is_some() {
            self.joins.end(&mut clock, chain, number);
        }
        clock
    }

    fn new_op(&self, chain: Chain, number: u32, info: OpInfo) -> OpId {
        if !self.on {
            return OpId::default();
        }
        self.ops.borrow_mut().push(info);
        self.joins.places.add(chain, number)
    }

    /// Returns the identity of the stream operation that runs now, and what it knows. `name` names
    /// it.
    pub(crate) fn current(&self, name: &'static str) -> (OpId, Clock) {
        let mut current = self.current.borrow_mut();
        let Some(Run { chain, number, gpu, clock, op }) = &mut *current else {
            drop(current);
            // Outside of a stream, the operation is in a sequence of its own.
            let sequence = self.sequence();
            return (self.new_op(sequence.chain, 1, OpInfo::new(name, 0)), Clock::default());
        };
        let new = || self.new_op(*chain, *number, OpInfo::new(name, *gpu));
        let id = *op.get_or_insert_with(new);
        (id, clock.clone())
    }

    /// Orders the running stream operation after everything in `clock`.
    pub(crate) fn learn_here(&self, clock: &Clock) {
        if let Some(run) = &mut *self.current.borrow_mut() {
            self.joins.join(&mut run.clock, clock);
        }
    }

    /// Returns what the stream operation that runs now knows.
    pub(crate) fn known_here(&self) -> Clock {
        self.current.borrow().as_ref().map(|run| run.clock.clone()).unwrap_or_default()
    }

    /// Returns what the stream operation that runs now knows, and what it has done so far.
    pub(crate) fn done_here(&self) -> Clock {
        let current = self.current.borrow();
        let Some(run) = &*current else { return Clock::default() };
        self.end(run.clone())
    }

    /// Checks and records an access of an operation that is not a kernel.
    ///
    /// # Errors
    ///
    /// [`Error::Race`], [`Error::Unwritten`] if it reads what nothing has written, and
    /// [`Error::Settings`] if there are too many operations.
    pub(crate) fn op_access(
        &self,
        memory: &dyn Registry,
        (op, clock): &(OpId, Clock),
        address: usize,
        bytes: usize,
        access: OpAccess,
    ) -> Result<(), Error> {
        if !self.on {
            return Ok(());
        }
        require_number(*op)?;
        let (agent, writes) = (Agent::of_op(*op), access == OpAccess::Write);
        let kind = Kind { writes, scope: None, is_async: false };
        let stamp = Stamp::new(agent, OP_TIME, Default::default(), kind);
        let who = Accessor { clock, own: agent, all: 0, space: Space::Global, memo: None };
        let touched = self.touch_range(memory, address, bytes, stamp, &who);
        touched.map_err(|found| {
            Error::Race(self.report(memory, &found, |_| "shared memory".to_owned()))
        })?;
        let unwritten = match !writes && memory.is_of_nccl(address) {
            true => self.unwritten_range(memory, address, bytes),
            false => None,
        };
        if let Some((owner, offset)) = unwritten.and_then(|at| memory.owner_at(at)) {
            let memory = Arguments::default().locate(owner, offset);
            return Err(Error::Unwritten { access: Box::new(self.describe(stamp)), memory });
        }
        Ok(())
    }

    /// Posts a transfer of a thread. Returns what the transfer's accesses come after, and what its
    /// signal releases to the peer: what the thread knows and has done if the post releases at GPU
    /// scope and at system scope, and else what is visible to all.
    pub(crate) fn post(&self, thread: &mut ThreadClock, releases: Releases) -> [Clock; 2] {
        let mut visible = thread.clock.visible_part();
        if releases == Releases::Nothing {
            return [visible.clone(), visible];
        }
        let clock = self.released(thread);
        thread.time += 1;
        if releases == Releases::ToSystem {
            return [clock.clone(), clock];
        }
        // What the thread has read before it has been read: the transfer comes after it.
        self.joins.pass(&mut visible, &clock);
        [clock, visible]
    }

    /// Returns the identity of transfer `number` of a sequence, which a thread posted.
    pub(crate) fn transfer(
        &self,
        sequence: &Sequence,
        number: u64,
        transfer: Transfer,
        (thread, releases): (ThreadId, bool),
        (at, arguments): (Site, &Rc<Arguments>),
    ) -> OpId {
        let name = match transfer {
            Transfer::Put => "a put",
            Transfer::Get => "a get",
        };
        let transfer = Some((transfer, thread, releases));
        let (at, arguments) = (Some(at), Some(Rc::clone(arguments)));
        let info = OpInfo { at, transfer, arguments, ..OpInfo::new(name, thread.rank as u32) };
        self.new_op(sequence.chain, number as u32 + 1, info)
    }

    /// Returns what is known after transfer `number` of a sequence and all before it; `u64::MAX`
    /// stands for none.
    pub(crate) fn after(&self, clock: &Clock, sequence: &Sequence, number: u64) -> Clock {
        let mut clock = clock.clone();
        self.joins.end(&mut clock, sequence.chain, (number as u32).wrapping_add(1));
        clock
    }

    /// Returns what is known after a transfer.
    pub(crate) fn after_op(&self, clock: &Clock, op: OpId) -> Clock {
        let mut clock = clock.clone();
        clock.add(Agent::of_op(op), OP_TIME, &self.joins.places);
        clock
    }

    /// Makes a word of a signal or counter release `clock` to the threads that read it.
    pub(crate) fn release_to(&self, memory: &dyn Registry, word: usize, rank: usize, clock: Clock) {
        if !self.on {
            return;
        }
        let from = Position { gpu: rank as u32, agent: Agent::default() };
        let word = self.shadow.canonical(word, memory);
        let mut words = self.words.borrow_mut();
        let release = Release { from, scope: Scope::Sys, clock };
        let found = &mut words.entry(word).or_default().releases;
        add_release(found, &release, |clock, other| self.joins.join(clock, other));
    }

    /// Records that the counter at `word` has counted `reads`.
    pub(crate) fn count(&self, memory: &dyn Registry, word: usize, reads: &Clock) {
        if !self.on {
            return;
        }
        let word = self.shadow.canonical(word, memory);
        let mut words = self.words.borrow_mut();
        self.joins.join(words.entry(word).or_default().counted.get_or_insert_default(), reads);
    }

    /// Records that a thread reads a word that releases a clock.
    pub(crate) fn read_from(
        &self,
        memory: &dyn Registry,
        thread: &mut ThreadClock,
        word: usize,
        order: Order,
    ) {
        if !self.on {
            return;
        }
        let word = self.shadow.canonical(word, memory);
        self.read_word(thread, word, order, Scope::Sys);
    }

    /// Records that a thread has seen a release of `clock`, by reads of this order.
    pub(crate) fn find_release(&self, thread: &mut ThreadClock, clock: Clock, order: Order) {
        let from = Position { gpu: thread.here.gpu, agent: Agent::default() };
        let release = Release { from, scope: Scope::Sys, clock };
        if self.on {
            self.read_releases(thread, NO_WORD, &[release], order, Scope::Sys);
        }
    }

    /// Records that a thread opens or closes a session on the barrier whose state is at `word`.
    ///
    /// # Errors
    ///
    /// Returns an access of another session, ordered neither before nor after the thread's session.
    pub(crate) fn use_session(
        &self,
        memory: &dyn Registry,
        thread: &mut ThreadClock,
        word: usize,
        at: Site,
    ) -> Result<(), RaceAccess> {
        if !self.on {
            return Ok(());
        }
        let place = (word, size_of::<u32>(), Space::Global);
        let used = self.access(memory, thread, place, Access::Write, at, &|_| 0);
        used.map(drop).map_err(|found| self.describe(found.before))
    }

    pub(super) fn describe(&self, stamp: Stamp) -> RaceAccess {
        let (agent, kind) = (stamp.agent(), stamp.kind());
        let info = self.ops.borrow()[agent.op.index()].clone();
        let rank = info.gpu as usize;
        let (number, by) = super::agents::performer_of(agent.number);
        let thread =
            info.start.is_some().then_some(ThreadId { rank, block: agent.block, thread: number });
        let verb = if kind.writes { "stores" } else { "loads" };
        let how = match (kind.scope, by) {
            (Some(Scope::Cta), _) => " atomically, with the scope of its block",
            (Some(Scope::Gpu), _) => " atomically, with the scope of its GPU",
            (Some(Scope::Sys), _) => " atomically, with the scope of the system",
            (None, by) => by,
        };
        let at = self.sites.site(stamp.site()).or(info.at);
        let operation = info.name.to_owned();
        RaceAccess { operation, rank, thread, what: format!("{verb}{how}"), scope: kind.scope, at }
    }

    /// Returns the report of a race; `shared` names a byte of shared memory.
    pub(crate) fn report(
        &self,
        memory: &dyn Registry,
        found: &FoundRace,
        shared: impl FnOnce(usize) -> String,
    ) -> Box<Race> {
        let FoundRace { now, before, address } = *found;
        let (access, other) = (self.describe(now), self.describe(before));
        let address = address + (now.bytes() & before.bytes()).trailing_zeros() as usize;
        let (memory, space, of_window) = match memory.owner_at(address) {
            None => (shared(address), Space::Shared, false),
            Some((owner, offset)) => {
                let ops = self.ops.borrow();
                let arguments_of =
                    |stamp: Stamp| ops[stamp.agent().op.index()].arguments.as_deref();
                // The name is one that a kernel has for the memory, at any of its addresses.
                let all = memory.owners_at(address);
                let arguments = [now, before].into_iter().filter_map(arguments_of);
                let mut named = arguments.flat_map(|arguments| {
                    all.iter().filter_map(|&(owner, offset)| arguments.find(owner, offset))
                });
                let place = named.next().unwrap_or_else(|| format!("byte {offset} of {owner}"));
                let of_window = all.iter().any(|(owner, _)| matches!(owner, Owner::Window { .. }));
                (place, Space::Global, of_window)
            }
        };
        Box::new(Race { memory, remedy: self.remedy(now, before, space, of_window), access, other })
    }
}

/// The clocks that a kernel's grid shares with the operations after it.
#[derive(Clone)]
pub(crate) struct GridClock {
    pub(crate) op: OpId,
    /// The clock of its threads at their start.
    pub(crate) start: Clock,
    /// The clock of its threads that have ended.
    pub(crate) end: Rc<RefCell<Clock>>,
}

impl Races {
    /// Returns a kernel that the current stream operation launches.
    ///
    /// # Errors
    ///
    /// [`Error::Settings`] if there are too many operations.
    pub(crate) fn grid(
        &self,
        kernel: &'static str,
        arguments: &Rc<Arguments>,
    ) -> Result<GridClock, Error> {
        let (op, mut start) = self.current(kernel);
        require_number(op)?;
        // All that is known is before the kernel's accesses of all kinds, and visible to all.
        start.fence_all();
        // All that it knows has ended. `seen` names it by chains, so `passed` needs no blocks.
        let known = start.clone();
        self.joins.pass(&mut start, &known);
        if let Some(info) = self.ops.borrow_mut().get_mut(op.index()) {
            info.arguments = Some(Rc::clone(arguments));
            info.start = Some(start.clone());
        }
        Ok(GridClock { op, end: Rc::new(RefCell::new(start.clone())), start })
    }

    /// Returns what is known after a kernel has ended.
    pub(crate) fn end_of(&self, grid: &GridClock) -> Clock {
        let mut clock = grid.end.borrow().clone();
        let (chain, number) = self.joins.places.of(grid.op);
        self.joins.end(&mut clock, chain, number);
        clock
    }
}

#[cfg(test)]
mod tests;
