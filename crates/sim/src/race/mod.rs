//! Detects races: two accesses to the same memory, one of them a write, that nothing orders.
//!
//! The detector computes what happens before what, from barriers, releases and acquires, waits, and
//! the order of streams, by vector clocks ([`clock`]). It remembers the last accesses to each word
//! ([`shadow`]), and reports an access that no chain of synchronisation separates from an earlier
//! one, even if it came long after: so most races are found in any order of execution. A thread
//! *knows* an access if the access is ordered before all that the thread does next.
//!
//! The rules are those of PTX's memory model:
//!
//! * A release and an acquire order accesses only if the scope of each includes the other's thread.
//! * Atomic and ordered accesses, also relaxed ones, do not race with each other if their scopes
//!   include each other. So protocols with the flag in the data, such as LL and Lamport, need no
//!   declaration: their words are accessed by relaxed operations, and a plain access to them is a
//!   race.
//! * Asynchronous copies and `wgmma` are agents of their own: what they read and write is ordered
//!   by the wait for them, and an ordinary write before they read it needs `fence.proxy.async`.
//! * Shuffles and votes order nothing; `sync_warp` does.
//! * A thread that acquires a signal knows the writes of the signal's data and, if the post is a
//!   release, all that the posting thread knew and had done. After a post that releases nothing, it
//!   knows what is visible to all: what precedes starts of kernels that the posting thread knows,
//!   and fences of the system's scope.

mod agents;
mod clock;
mod host;
mod memo;
mod ops;
mod remedy;
mod shadow;
mod sync;
mod thread;
mod weak;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use cuda_std::arch::{Access, Engine, Order, Scope, Space};

use self::agents::Barrier;
use self::clock::{Agent, Joins};
pub(crate) use self::clock::{Clock, OpId};
pub(crate) use self::host::HostEvent;
use self::host::Hosts;
use self::memo::Memo;
use self::ops::{EndedChains, OpInfo};
pub(crate) use self::ops::{GridClock, OpAccess, Releases, Run, Sequence, Transfer};
pub(crate) use self::shadow::MAX_BLOCKS;
use self::shadow::{Kind, NO_STAMP, NumberMap, PAGE, Shadow, Sites, Stamp, Word};
use self::sync::{AtomicWord, Position, Release, acquires, includes, releases};
pub(crate) use self::thread::ThreadClock;
use self::weak::{OldValues, Seen};
use crate::base::ids::Site;
use crate::base::owner::Registry;

/// The detector's state.
#[derive(Default)]
pub(crate) struct Races {
    /// Whether the detector is on. If not, it does nothing.
    on: bool,
    joins: Joins,
    shadow: Shadow,
    sites: Sites,
    /// The operations, by [`OpId::index`].
    ops: RefCell<Vec<OpInfo>>,
    /// The number of chains so far, and those that a later sequence may continue.
    chains: Cell<u32>,
    ended: EndedChains,
    /// Atomic words by canonical address.
    words: RefCell<NumberMap<AtomicWord>>,
    /// The releases of sequentially consistent fences whose scope is wider than a block.
    fences: RefCell<Vec<Release>>,
    /// The clock of all sequentially consistent fences of each running block, by [`Agent::key`].
    block_fences: RefCell<HashMap<u64, Clock>>,
    /// Initialised `mbarrier`s by address.
    barriers: RefCell<NumberMap<Barrier>>,
    hosts: Hosts,
    /// The stream operation that runs now.
    current: RefCell<Option<Run>>,
    /// Random numbers, which select the access that a word forgets if it has too many.
    random: Cell<u64>,
    /// The number of asynchronous copies so far, modulo [`TOLD_APART`](shadow::TOLD_APART).
    copies: Cell<u8>,
    /// Old values of atomic words, if loads may see them.
    old: OldValues,
    weak: bool,
}

/// A race that an access has found: the access, and the earlier one.
pub(crate) struct FoundRace {
    now: Stamp,
    before: Stamp,
    address: usize,
}

/// The agent of an access and its clock, for the checks of all words of the access.
struct Accessor<'a> {
    clock: &'a Clock,
    /// The thread, whose own earlier accesses are ordered by its program.
    own: Agent,
    /// The time up to which the clock has all threads of the block.
    all: u32,
    /// The kind of the memory.
    space: Space,
    /// Earlier results for the same clock.
    memo: Option<&'a Memo>,
}

/// Returns which bytes of the word at `at` are in the range, a bit each.
#[inline]
fn bytes_of_word(at: usize, address: usize, end: usize) -> u8 {
    let (first, last) = (address.saturating_sub(at).min(3), (end - at).min(4));
    (0xf >> (4 - last)) & (0xf << first)
}

impl Races {
    /// Returns a detector; with `weak`, atomic loads may see old values.
    pub(crate) fn new(on: bool, weak: bool, seed: u64) -> Self {
        Self { on, weak, random: Cell::new(seed), ..Self::default() }
    }

    /// Returns whether `before` happened before `now`, an access by `who`.
    #[inline]
    fn is_ordered(&self, before: Stamp, now: Stamp, who: &Accessor<'_>) -> bool {
        if before.is_same_agent(now) && before.is_same_copy(now) {
            return true;
        }
        match who.memo {
            None => self.is_known(before, now.kind(), who),
            Some(memo) => {
                memo.check((before, now, who.space), || self.is_known(before, now.kind(), who))
            }
        }
    }

    /// Does the same as [`is_ordered`](Self::is_ordered), for accesses by different agents, or by
    /// different copies of one.
    fn is_known(&self, before: Stamp, kind: Kind, who: &Accessor<'_>) -> bool {
        let (agent, time, earlier) = (before.agent(), before.time(), before.kind());
        // No later write disturbs a read, or an access of an asynchronous agent or of the network,
        // that has ended.
        let is_ended = || who.clock.has_passed(agent, time, &self.joins.places);
        let is_transfer =
            || self.ops.borrow().get(agent.op.index()).is_some_and(|op| op.transfer.is_some());
        let is_async = || agent.number >= clock::THREADS || is_transfer();
        if (!earlier.writes || (kind.writes && is_async())) && is_ended() {
            return true;
        }
        // The asynchronous proxy sees an ordinary write only after a `fence.proxy.async`.
        if kind.is_async && earlier.writes && !earlier.is_async {
            return who.clock.fenced[who.space as usize].covers(agent, time, &self.joins.places);
        }
        agent == who.own
            || ((agent.op, agent.block) == (who.own.op, who.own.block)
                && agent.number < clock::THREADS
                && time <= who.all)
            || who.clock.seen.covers(agent, time, &self.joins.places)
    }

    /// Returns whether two accesses do not race although nothing orders them: both are atomic, and
    /// their scopes include each other.
    fn is_strong(&self, a: Stamp, b: Stamp) -> bool {
        let (Some(a_scope), Some(b_scope)) = (a.kind().scope, b.kind().scope) else {
            return false;
        };
        let [a, b] = [a, b].map(|stamp| self.position(stamp.agent()));
        includes(a_scope, a, b) && includes(b_scope, b, a)
    }

    fn position(&self, agent: Agent) -> Position {
        Position { gpu: self.ops.borrow()[agent.op.index()].gpu, agent }
    }

    /// Returns whether an access conflicts with an earlier one, which nothing orders before it.
    #[inline]
    fn conflicts(&self, before: Stamp, now: Stamp, who: &Accessor<'_>) -> bool {
        !before.is_none()
            && before.bytes() & now.bytes() != 0
            && !self.is_ordered(before, now, who)
            && !self.is_strong(before, now)
    }

    /// Checks and records an access of `bytes` bytes, made by `who`.
    #[inline]
    fn touch(
        &self,
        memory: &dyn Registry,
        address: usize,
        bytes: usize,
        stamp: Stamp,
        who: &Accessor<'_>,
    ) -> Result<(), FoundRace> {
        let end = address + bytes;
        let mut at = address & !3;
        while at < end {
            let now = stamp.of_bytes(bytes_of_word(at, address, end));
            self.touch_word(self.shadow.word(at, memory), at, now, who)?;
            at += 4;
        }
        Ok(())
    }

    /// Does the same as [`touch`](Self::touch), for ranges that have whole pages.
    fn touch_range(
        &self,
        memory: &dyn Registry,
        address: usize,
        bytes: usize,
        stamp: Stamp,
        who: &Accessor<'_>,
    ) -> Result<(), FoundRace> {
        let (mut at, end) = (address, address + bytes);
        while at < end {
            let next = (at / PAGE + 1) * PAGE;
            let uniform =
                (at % PAGE == 0 && next <= end).then(|| self.shadow.uniform(at, memory)).flatten();
            match uniform {
                Some(mut words) => {
                    let word = Cell::new(*words);
                    self.touch_word(&word, at, stamp.of_bytes(0xf), who)?;
                    *words = word.get();
                }
                None => self.touch(memory, at, next.min(end) - at, stamp, who)?,
            }
            at = next;
        }
        Ok(())
    }

    /// Checks and records an access to bytes of the word at `at`.
    #[inline]
    fn touch_word(
        &self,
        word: &Cell<Word>,
        at: usize,
        now: Stamp,
        who: &Accessor<'_>,
    ) -> Result<(), FoundRace> {
        let mut content = word.get();
        let last = content.write;
        if last.is_same_agent(now) && last.is_same_access(now) {
            return Ok(());
        }
        let writes = now.kind().writes;
        for before in [last].into_iter().chain(content.others) {
            if (writes || before.kind().writes) && self.conflicts(before, now, who) {
                return Err(FoundRace { now, before, address: at });
            }
        }
        if writes {
            // What has passed the check is ordered before this write, unless both are atomic.
            let kept = |now: Stamp, before: Stamp| match now.stands_for(before) {
                true if before.is_none() || now.is_weak() => NO_STAMP,
                true if self.is_ordered(before, now, who) => NO_STAMP,
                _ => before,
            };
            content.others = content.others.map(|other| kept(now, other));
            let now = now.joined(last);
            content.write = now.after(last);
            shadow::keep(&mut content.others, kept(now, last), &self.random);
        } else {
            self.add_read(&mut content, now, who);
        }
        word.set(content);
        Ok(())
    }

    /// Returns the address of the first byte of the range that nothing has written, if there is
    /// one.
    pub(crate) fn unwritten(
        &self,
        memory: &dyn Registry,
        address: usize,
        bytes: usize,
    ) -> Option<usize> {
        let end = address + bytes;
        (address & !3..end).step_by(4).find_map(|at| {
            let initialised = self.shadow.word(at, memory).get().write.initialised();
            let unwritten = bytes_of_word(at, address, end) & !initialised;
            (unwritten != 0).then(|| at + unwritten.trailing_zeros() as usize)
        })
    }

    /// Does the same as [`unwritten`](Self::unwritten), for ranges that have whole pages.
    fn unwritten_range(
        &self,
        memory: &dyn Registry,
        address: usize,
        bytes: usize,
    ) -> Option<usize> {
        let (mut at, end) = (address, address + bytes);
        while at < end {
            let next = ((at / PAGE + 1) * PAGE).min(end);
            let uniform = self.shadow.uniform(at, memory).map(|word| word.write.initialised());
            let unwritten = match uniform {
                Some(0xf) => None,
                Some(0) => Some(at),
                _ => self.unwritten(memory, at, next - at),
            };
            if unwritten.is_some() {
                return unwritten;
            }
            at = next;
        }
        None
    }

    #[inline]
    fn add_read(&self, content: &mut Word, now: Stamp, who: &Accessor<'_>) {
        let others = &mut content.others;
        let replaces = |other: &Stamp| !other.kind().writes && now.stands_for(*other);
        let is_own =
            |other: &Stamp| other.is_none() || (other.is_same_agent(now) && replaces(other));
        let is_before = |other: &Stamp| replaces(other) && self.is_ordered(*other, now, who);
        // What is ordered after this read is ordered after the one that it replaces.
        let found = others.iter().position(is_own).or_else(|| others.iter().position(is_before));
        match found {
            Some(at) => others[at] = now,
            None => shadow::keep(others, now, &self.random),
        }
    }

    /// Checks and records an access of a thread before it happens. Called only while the detection
    /// is on. Returns for each word the old value that the access sees, if any, which `choose`
    /// selects.
    pub(crate) fn access(
        &self,
        memory: &dyn Registry,
        thread: &mut ThreadClock,
        (address, bytes, space): (usize, usize, Space),
        access: Access,
        at: Site,
        choose: &dyn Fn(usize) -> usize,
    ) -> Result<[Option<u32>; 4], FoundRace> {
        let (writes, strong) = match access {
            Access::Read => (false, None),
            Access::Write => (true, None),
            Access::AtomicRead(order, scope) => (false, Some((order, scope))),
            Access::AtomicWrite(order, scope) | Access::AtomicRmw(order, scope) => {
                (true, Some((order, scope)))
            }
            Access::ReadByOther | Access::BarrierTest | Access::BarrierChange => {
                return Ok([None; 4]);
            }
        };
        if let Some((Order::SeqCst, scope)) = strong {
            // PTX has no such access: it is a fence, followed by an acquire or a release.
            self.fence(thread, Order::SeqCst, scope);
        }
        // Others know that the accesses before this one have ended, so this one has a later time.
        thread.time += u32::from(std::mem::take(&mut thread.has_met));
        let (agent, time, is_async) = self.performer(thread, writes);
        if thread.engine == Engine::Bulk {
            thread.bulk = Some((time, at));
        }
        let kind = Kind { writes, scope: strong.map(|(_, scope)| scope), is_async };
        let stamp = Stamp::new(agent, time, self.sites.number(at), kind).of_copy(thread.copy);
        let me = thread.here.agent;
        // The writer of an atomic access's first word stands for the writers of all its words.
        let written = match strong {
            Some(_) => self.shadow.word(address, memory).get().write,
            None => NO_STAMP,
        };
        let (clock, memo) = (&thread.clock, Some(&thread.memo));
        let who = Accessor { clock, own: me, all: thread.all, space, memo };
        self.touch(memory, address, bytes, stamp, &who)?;
        let mut old = [const { None }; 4];
        if self.weak {
            match access {
                Access::AtomicRead(..) => {
                    old = self.see_old(memory, (address, bytes), stamp, &who, choose);
                }
                Access::AtomicWrite(..) | Access::AtomicRmw(..) => {
                    self.keep_old(memory, (address, bytes), stamp, written);
                }
                Access::Write => self.forget_old(memory, address, bytes),
                _ => {}
            }
        }
        if let (Some(strong), Engine::Thread) = (strong, thread.engine) {
            let words = (address..address + bytes).step_by(4);
            for (at, old) in words.zip(&old) {
                let word = self.shadow.canonical(at, memory);
                let writer = old.as_ref().map_or(written, |old| old.writer);
                self.order(thread, word, access, strong, (writer, stamp), old.as_ref());
            }
            if writes && releases(strong.0) {
                thread.time += 1;
            }
        }
        Ok(old.map(|old| old.map(|old| old.value)))
    }

    /// Applies the synchronisation of an atomic access to a word, with the parameters of
    /// [`synchronise`](Self::synchronise).
    fn order(
        &self,
        thread: &mut ThreadClock,
        word: usize,
        access: Access,
        strong: (Order, Scope),
        stamps: (Stamp, Stamp),
        old: Option<&Seen>,
    ) {
        let (is_write, is_rmw) =
            (matches!(access, Access::AtomicWrite(..)), matches!(access, Access::AtomicRmw(..)));
        if !is_write {
            self.synchronise(thread, word, strong, stamps, old);
        }
        if is_write || is_rmw {
            self.write_word(thread, word, strong, is_rmw);
        }
    }

    /// Orders a thread after the releases that it sees when it reads a word, or its `old` value,
    /// atomically: `writer` wrote that value, and `stamp` is the read.
    fn synchronise(
        &self,
        thread: &mut ThreadClock,
        word: usize,
        (order, scope): (Order, Scope),
        (writer, stamp): (Stamp, Stamp),
        old: Option<&Seen>,
    ) {
        if acquires(order) {
            self.acquire_seen(thread, Some(word), scope);
        }
        if !writer.is_none() && self.is_strong(writer, stamp) {
            self.read_start(thread, word, writer.agent(), order, scope);
        }
        match old {
            Some(old) => self.read_releases(thread, word, &old.releases, order, scope),
            None => self.read_word(thread, word, order, scope),
        }
    }

    /// Ends a thread: its kernel's end acquires what its relaxed reads have found. Returns the line
    /// of a bulk copy that may still read its shared memory, if there is one.
    pub(crate) fn end_thread(&self, thread: &mut ThreadClock, grid: &GridClock) -> Option<Site> {
        if !self.on {
            return None;
        }
        let (reads, _) = thread.group_agents(Engine::Bulk);
        let unread =
            |(group, _): &(u32, Site)| !thread.clock.seen.covers(reads, *group, &self.joins.places);
        let in_flight = thread.bulk.filter(unread).map(|(_, at)| at);
        let found = std::mem::take(&mut thread.found);
        found.iter().for_each(|(_, release)| self.acquire(thread, &release.clock));
        self.joins.join(&mut grid.end.borrow_mut(), &thread.clock);
        in_flight
    }

    /// Prepares a thread that starts with what its kernel knows.
    pub(crate) fn start_thread(
        &self,
        thread: &mut ThreadClock,
        (op, block, number): (OpId, u32, u32),
        clock: &Clock,
    ) {
        if !self.on {
            return;
        }
        let agent = Agent { op, block, number: number as u16 };
        let here = self.position(agent);
        *thread = ThreadClock { here, clock: clock.clone(), ..ThreadClock::default() };
    }

    /// Forgets the fences of a block that has ended.
    pub(crate) fn end_block(&self, op: OpId, block: u32) {
        let of_block = Agent { op, block, number: 0 };
        self.block_fences.borrow_mut().remove(&of_block.key());
    }

    /// Adds to `clock` what `other` knows.
    pub(crate) fn join(&self, clock: &mut Clock, other: &Clock) {
        self.joins.join(clock, other);
    }

    /// Forgets the accesses to memory that is freed or used anew.
    pub(crate) fn forget(&self, start: usize, bytes: usize) {
        self.shadow.forget(start, bytes);
        let range = start..start + bytes;
        self.barriers.borrow_mut().retain(|word, _| !range.contains(word));
        self.old.forget(range.clone());
        shadow::remove_range(&mut self.words.borrow_mut(), range, 4);
    }

    /// Forgets where memory is, since addresses have changed their meaning.
    pub(crate) fn remap(&self) {
        self.shadow.remap();
    }
}
