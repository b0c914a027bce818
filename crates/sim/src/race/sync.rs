//! The synchronisation that makes accesses of other threads known: barriers, fences, and reads of
//! atomic words.

use std::cell::RefCell;
use std::rc::Rc;

use cuda_std::arch::{Order, Scope};

use super::clock::{Agent, Clock};
use super::{Races, ThreadClock};

/// A thread's position, which decides whether a scope includes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) gpu: u32,
    pub(super) agent: Agent,
}

/// Returns whether the threads of `scope` around `from` include `to`.
pub(super) fn includes(scope: Scope, from: Position, to: Position) -> bool {
    match scope {
        Scope::Sys => true,
        Scope::Gpu => from.gpu == to.gpu,
        Scope::Cta => (from.agent.op, from.agent.block) == (to.agent.op, to.agent.block),
    }
}

/// The address of no word, for releases that no word carries.
pub(super) const NO_WORD: usize = 0;

/// A release whose effect a word carries: one by the thread that wrote the word, or an earlier one
/// whose value read-modify-writes have changed since.
#[derive(Clone, Debug)]
pub(super) struct Release {
    /// The thread that has released. If releases are joined: one of the threads, if they are of one
    /// block, or else no agent on this GPU.
    pub(super) from: Position,
    pub(super) scope: Scope,
    pub(super) clock: Clock,
}

/// The releases that a read of an atomic word may acquire.
#[derive(Default)]
pub(super) struct AtomicWord {
    pub(super) releases: Vec<Release>,
    /// The releases by the last thread that has released by the word. `releases` has them too, but
    /// joined with those of other threads, and a later store of the thread passes on only its own.
    own: Vec<Release>,
    /// The network's reads that a counter has counted. A thread that reads the counter, with any
    /// order, knows them, since it overwrites their sources only after it has waited.
    pub(super) counted: Option<Clock>,
}

/// Adds a release to others; one that the same threads may acquire is joined with it. If the blocks
/// of the two differ, no fence and no read of a block's scope acquires them any more: it would
/// acquire those of other blocks.
pub(super) fn add_release(
    releases: &mut Vec<Release>,
    release: &Release,
    join: impl Fn(&mut Clock, &Clock),
) {
    let alike = |other: &&mut Release| {
        other.scope == release.scope
            && match release.scope {
                Scope::Sys | Scope::Gpu => other.from.gpu == release.from.gpu,
                Scope::Cta => includes(Scope::Cta, other.from, release.from),
            }
    };
    match releases.iter_mut().find(alike) {
        Some(other) => {
            join(&mut other.clock, &release.clock);
            if !includes(Scope::Cta, other.from, release.from) {
                other.from.agent = Agent::default();
            }
        }
        None => releases.push(release.clone()),
    }
}

impl Races {
    /// Returns what the thread releases: what it knows and what it has done.
    pub(super) fn released(&self, thread: &ThreadClock) -> Clock {
        let mut clock = thread.clock.clone();
        clock.add(thread.here.agent, thread.time, &self.joins.places);
        clock
    }

    pub(super) fn acquire(&self, thread: &mut ThreadClock, clock: &Clock) {
        self.joins.join(&mut thread.clock, clock);
        thread.all = thread.clock.seen.all(thread.here.agent);
    }

    /// Records that the thread has read what `writer` wrote. All that the writer's kernel knew at
    /// its start is visible to all, so each of the kernel's atomic stores releases it.
    pub(super) fn read_start(
        &self,
        thread: &mut ThreadClock,
        word: usize,
        writer: Agent,
        order: Order,
        scope: Scope,
    ) {
        let ops = self.ops.borrow();
        let Some(clock) = &ops[writer.op.index()].start else { return };
        if acquires(order) {
            self.acquire(thread, clock);
        } else {
            let from = self.position(writer);
            record_seen(thread, word, &Release { from, scope, clock: clock.clone() });
        }
    }

    /// Acquires the releases that relaxed reads of the thread have seen, of one word or of all, if
    /// `scope` includes the threads that have released.
    pub(super) fn acquire_seen(&self, thread: &mut ThreadClock, word: Option<usize>, scope: Scope) {
        for (at, release) in std::mem::take(&mut thread.found) {
            let is_meant = word.is_none_or(|word| word == at);
            if is_meant && includes(scope, thread.here, release.from) {
                self.acquire(thread, &release.clock);
            } else {
                thread.found.push((at, release));
            }
        }
    }

    /// Records that a thread reads a word atomically.
    pub(super) fn read_word(
        &self,
        thread: &mut ThreadClock,
        word: usize,
        order: Order,
        scope: Scope,
    ) {
        let words = self.words.borrow();
        if let Some(found) = words.get(&word) {
            if let Some(counted) = &found.counted {
                self.acquire(thread, counted);
            }
            self.read_releases(thread, word, &found.releases, order, scope);
        }
    }

    /// Records that a thread has read a value of a word that carries these releases.
    pub(super) fn read_releases(
        &self,
        thread: &mut ThreadClock,
        word: usize,
        releases: &[Release],
        order: Order,
        scope: Scope,
    ) {
        for release in releases {
            let here = thread.here;
            if !includes(release.scope, release.from, here) || !includes(scope, here, release.from)
            {
                continue;
            }
            if acquires(order) {
                self.acquire(thread, &release.clock);
            } else {
                record_seen(thread, word, release);
            }
        }
    }

    /// Records that a thread writes a word atomically: which releases the word carries from now on.
    pub(super) fn write_word(
        &self,
        thread: &mut ThreadClock,
        word: usize,
        (order, scope): (Order, Scope),
        is_rmw: bool,
    ) {
        let from = thread.here;
        let mut words = self.words.borrow_mut();
        let carries = releases(order) || !thread.released.is_empty();
        if !carries && !words.contains_key(&word) {
            return;
        }
        let found = words.entry(word).or_default();
        if releases(order) || !is_rmw {
            // A later store by the thread that has released belongs to its release pattern (PTX).
            found.own.retain(|own| own.from == from && (is_rmw || !releases(order)));
        }
        if !is_rmw {
            let narrowed =
                |own: &Release| Release { scope: narrower(scope, own.scope), ..own.clone() };
            found.releases = found.own.iter().map(narrowed).collect();
            if !carries && found.releases.is_empty() {
                words.remove(&word);
            }
        }
        if !carries {
            return;
        }
        let found = words.entry(word).or_default();
        let join = |clock: &mut Clock, other: &Clock| self.joins.join(clock, other);
        if releases(order) {
            let release = Release { from, scope, clock: self.released(thread) };
            add_release(&mut found.releases, &release, join);
            add_release(&mut found.own, &release, join);
            return;
        }
        for (fence_scope, clock) in &thread.released {
            let scope = narrower(scope, *fence_scope);
            add_release(&mut found.releases, &Release { from, scope, clock: clock.clone() }, join);
        }
    }

    /// Records a fence of a thread.
    pub(crate) fn fence(&self, thread: &mut ThreadClock, order: Order, scope: Scope) {
        if !self.on {
            return;
        }
        if acquires(order) {
            self.acquire_seen(thread, None, scope);
        }
        if releases(order) && scope == Scope::Sys {
            let clock = self.released(thread);
            self.joins.make_visible(&mut thread.clock, &clock);
        }
        if order == Order::SeqCst {
            // Such fences have one order, that of the run: each acquires what earlier ones release.
            let join = |clock: &mut Clock, other: &Clock| self.joins.join(clock, other);
            let mut of_blocks = self.block_fences.borrow_mut();
            let of_block = of_blocks.entry(thread.here.agent.key()).or_default();
            self.acquire(thread, of_block);
            if scope != Scope::Cta {
                let mut fences = self.fences.borrow_mut();
                self.read_releases(thread, NO_WORD, &fences, Order::Acquire, scope);
                let release = Release { from: thread.here, scope, clock: self.released(thread) };
                add_release(&mut fences, &release, join);
            }
            join(of_block, &self.released(thread));
        }
        if releases(order) {
            let clock = self.released(thread);
            // An earlier fence is superseded, unless its scope is wider.
            thread.released.retain(|(other, _)| narrower(*other, scope) != *other);
            thread.released.push((scope, clock));
            thread.time += 1;
        }
    }

    /// Executes a barrier of threads. If `whole`, they are all threads of their blocks.
    pub(crate) fn barrier<'a, I>(&self, threads: impl Fn() -> I, whole: bool)
    where
        I: Iterator<Item = &'a RefCell<ThreadClock>>,
    {
        if !self.on {
            return;
        }
        let mut joined: Option<Clock> = None;
        let mut last = 0;
        for thread in threads() {
            let thread = thread.borrow();
            match &mut joined {
                None => joined = Some(thread.clock.clone()),
                Some(joined) => self.joins.join(joined, &thread.clock),
            }
            last = last.max(thread.time);
        }
        let Some(mut joined) = joined else { return };
        let mut block = None;
        for thread in threads() {
            let Agent { op, block: index, .. } = thread.borrow().here.agent;
            if !whole {
                let thread = thread.borrow();
                joined.add(thread.here.agent, thread.time, &self.joins.places);
            } else if block != Some((op, index)) {
                block = Some((op, index));
                joined.add_all(thread.borrow().here.agent, last);
            }
        }
        // The threads go on with equal times, so that one time stands for a block's.
        for thread in threads() {
            let mut thread = thread.borrow_mut();
            thread.all = joined.seen.all(thread.here.agent);
            thread.clock = joined.clone();
            thread.time = last + 1;
        }
    }

    /// Records that threads have waited for each other although nothing orders their accesses: at a
    /// shuffle, a vote, or a relaxed barrier. Their reads before it have ended, though.
    pub(crate) fn meet<'a, I>(&self, threads: impl Fn() -> I)
    where
        I: Iterator<Item = &'a RefCell<ThreadClock>>,
    {
        if !self.on {
            return;
        }
        let mut all = Clock::default();
        let mut is_known = true;
        let mut first: Option<Clock> = None;
        for thread in threads() {
            let ThreadClock { here, clock, time, .. } = &*thread.borrow();
            let first = first.get_or_insert_with(|| clock.clone());
            is_known &= Rc::ptr_eq(&first.passed, &clock.passed)
                && Rc::ptr_eq(&first.seen, &clock.seen)
                && clock.passed.covers(here.agent, *time, &self.joins.places);
            self.joins.pass(&mut all, clock);
        }
        if is_known {
            // The threads have met with the same clocks before.
            return;
        }
        for thread in threads() {
            let ThreadClock { here, time, .. } = &*thread.borrow();
            all.add_passed(here.agent, *time, &self.joins.places);
        }
        for thread in threads() {
            let mut thread = thread.borrow_mut();
            thread.clock.passed = all.passed.clone();
            thread.has_met = true;
        }
    }

    /// Orders a thread after everything in `clock`.
    pub(crate) fn learn(&self, thread: &mut ThreadClock, clock: &Clock) {
        if self.on {
            self.acquire(thread, clock);
        }
    }

    /// Orders a thread after what another one knows.
    pub(crate) fn learn_from(&self, thread: &RefCell<ThreadClock>, other: &RefCell<ThreadClock>) {
        self.learn(&mut thread.borrow_mut(), &other.borrow().clock);
    }

    /// Records that a thread has waited for the previous kernel of its stream, after whose end
    /// `clock` is known. As at the start of a kernel, all of that is visible to all, so each of the
    /// thread's atomic stores releases it.
    pub(crate) fn learn_end(&self, thread: &mut ThreadClock, clock: &Clock) {
        self.learn(thread, clock);
        if self.on {
            self.joins.make_visible(&mut thread.clock, clock);
            thread.released.push((Scope::Sys, clock.clone()));
        }
    }
}

/// Records a release that a relaxed read of a word has seen.
fn record_seen(thread: &mut ThreadClock, word: usize, release: &Release) {
    let is_same =
        |(at, other): &(usize, Release)| *at == word && other.clock.is_same(&release.clock);
    if !thread.found.iter().any(is_same) {
        thread.found.push((word, release.clone()));
    }
}

pub(super) fn acquires(order: Order) -> bool {
    matches!(order, Order::Acquire | Order::AcqRel | Order::SeqCst)
}

pub(super) fn releases(order: Order) -> bool {
    matches!(order, Order::Release | Order::AcqRel | Order::SeqCst)
}

/// Returns the scope that includes fewer threads.
fn narrower(a: Scope, b: Scope) -> Scope {
    match (a, b) {
        (Scope::Cta, _) | (_, Scope::Cta) => Scope::Cta,
        (Scope::Gpu, _) | (_, Scope::Gpu) => Scope::Gpu,
        _ => Scope::Sys,
    }
}
