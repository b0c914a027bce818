//! Vector clocks: the accesses that a thread *knows*, as they happen before what it does next. An
//! access has its agent's time, a number that grows; an agent is known up to a time.
//!
//! A clock per thread with an entry per thread would have billions of entries, so entries are
//! compressed by what usually becomes known together:
//!
//! * An *operation* (a kernel, a copy, a network transfer) has a number on a *chain*, such as a
//!   stream. Operations of a chain end in order, so one number stands for all that have ended.
//! * Of a running kernel, each block has an entry ([`BlockView`]): the time up to which all its
//!   threads are known, as after `sync_threads`, and later times of single threads.
//!
//! Threads that have passed the same barrier share one [`View`].

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use cuda_std::arch::Space;

/// Identifies an operation. Operations are numbered from 1 in order of creation; 0 is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct OpId(pub(super) u32);

impl OpId {
    /// Returns its index among all operations; for none, an index that no operation has.
    pub(super) fn index(self) -> usize {
        (self.0 as usize).wrapping_sub(1)
    }
}

/// Identifies a chain of operations that end in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Chain(pub(super) u32);

/// The first number of an asynchronous agent; the threads of a block have smaller numbers.
pub(super) const THREADS: u16 = 1024;

/// An agent of a block: a thread, or a unit that works for threads asynchronously.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Agent {
    pub(super) op: OpId,
    pub(super) block: u32,
    pub(super) number: u16,
}

impl Agent {
    /// Returns the only agent of an operation that is not a kernel, such as a copy.
    pub(super) fn of_op(op: OpId) -> Self {
        Self { op, block: 0, number: 0 }
    }

    pub(super) fn key(self) -> u64 {
        u64::from(self.op.0) << 32 | u64::from(self.block)
    }
}

/// The known times of the agents of a block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct BlockView {
    /// The time up to which every thread is known.
    all: u32,
    /// The later times up to which single threads are known, and those of other agents, by number.
    agents: Vec<(u16, u32)>,
}

impl BlockView {
    fn covers(&self, agent: u16, time: u32) -> bool {
        (agent < THREADS && time <= self.all)
            || self
                .agents
                .binary_search_by_key(&agent, |(agent, _)| *agent)
                .is_ok_and(|at| time <= self.agents[at].1)
    }

    fn contains(&self, other: &Self) -> bool {
        let covers = |(agent, time, last): (&u16, &u32, Option<&u32>)| {
            (*agent < THREADS && *time <= self.all) || last.is_some_and(|last| time <= last)
        };
        other.all <= self.all && zip_sorted(&other.agents, &self.agents).all(covers)
    }

    fn add(&mut self, agent: u16, time: u32) {
        if self.covers(agent, time) {
            return;
        }
        match self.agents.binary_search_by_key(&agent, |(agent, _)| *agent) {
            Ok(at) => self.agents[at].1 = time,
            Err(at) => self.agents.insert(at, (agent, time)),
        }
    }

    fn join(&self, other: &Self) -> Self {
        let all = self.all.max(other.all);
        let later = |agents: &[(u16, u32)]| -> Vec<(u16, u32)> {
            let is_later = |(agent, time): &&(u16, u32)| *agent >= THREADS || *time > all;
            agents.iter().filter(is_later).copied().collect()
        };
        let agents = merge(&later(&self.agents), &later(&other.agents), |a, b| *a.max(b));
        Self { all, agents }
    }
}

/// A set of accesses that have happened.
#[derive(Clone, Debug, Default)]
pub(super) struct View {
    /// The last known operation of each chain, by chain.
    chains: Vec<(Chain, u32)>,
    /// Blocks of operations that `chains` does not cover, by operation and block.
    blocks: Vec<(u64, Rc<BlockView>)>,
}

/// Where each operation is: its chain, and its number there.
#[derive(Default)]
pub(super) struct Places {
    ops: RefCell<Vec<(Chain, u32)>>,
    /// The last operation's number of each chain that has any.
    last: RefCell<HashMap<Chain, u32>>,
}

impl Places {
    pub(super) fn add(&self, chain: Chain, number: u32) -> OpId {
        self.last.borrow_mut().insert(chain, number);
        let mut ops = self.ops.borrow_mut();
        ops.push((chain, number));
        OpId(ops.len() as u32)
    }

    pub(super) fn of(&self, op: OpId) -> (Chain, u32) {
        // No operation: a place that no clock has.
        self.ops.borrow().get(op.index()).copied().unwrap_or((Chain(u32::MAX), u32::MAX))
    }

    /// Returns whether all operations of a chain have ended for those that know `clock`.
    pub(super) fn have_ended(&self, chain: Chain, clock: &Clock) -> bool {
        self.last.borrow().get(&chain).is_none_or(|last| *last <= clock.seen.chain(chain))
    }
}

impl View {
    fn chain(&self, chain: Chain) -> u32 {
        match self.chains.binary_search_by_key(&chain, |(chain, _)| *chain) {
            Ok(at) => self.chains[at].1,
            Err(_) => 0,
        }
    }

    fn has_ended(&self, op: OpId, places: &Places) -> bool {
        let (chain, number) = places.of(op);
        number <= self.chain(chain)
    }

    fn block(&self, key: u64) -> Option<&Rc<BlockView>> {
        let at = self.blocks.binary_search_by_key(&key, |(key, _)| *key).ok()?;
        Some(&self.blocks[at].1)
    }

    /// Returns whether `agent` is known up to `time`.
    pub(super) fn covers(&self, agent: Agent, time: u32, places: &Places) -> bool {
        self.block(agent.key()).is_some_and(|block| block.covers(agent.number, time))
            || self.has_ended(agent.op, places)
    }

    /// Returns the time up to which all threads of `agent`'s block are known.
    pub(super) fn all(&self, agent: Agent) -> u32 {
        self.block(agent.key()).map_or(0, |block| block.all)
    }

    fn contains(&self, other: &Self, places: &Places) -> bool {
        let has = |(key, block, own): (&u64, &Rc<BlockView>, Option<&Rc<BlockView>>)| {
            own.is_some_and(|own| Rc::ptr_eq(own, block) || own.contains(block))
                || self.has_ended(OpId((key >> 32) as u32), places)
        };
        zip_sorted(&other.chains, &self.chains)
            .all(|(_, number, own)| own.is_some_and(|own| number <= own))
            && zip_sorted(&other.blocks, &self.blocks).all(has)
    }

    fn change_block(&mut self, key: u64, change: impl FnOnce(&mut BlockView)) {
        let at = self.blocks.binary_search_by_key(&key, |(key, _)| *key).unwrap_or_else(|at| {
            self.blocks.insert(at, (key, Rc::default()));
            at
        });
        change(Rc::make_mut(&mut self.blocks[at].1));
    }

    /// Adds that `agent` is known up to `time`.
    fn add(&mut self, agent: Agent, time: u32) {
        self.change_block(agent.key(), |block| block.add(agent.number, time));
    }

    /// Adds that all threads of `agent`'s block are known up to `time`.
    fn add_all(&mut self, agent: Agent, time: u32) {
        self.change_block(agent.key(), |block| {
            block.all = block.all.max(time);
            block.agents.retain(|(agent, time)| *agent >= THREADS || *time > block.all);
        });
    }

    /// Adds that the operations of a chain up to `number` have ended.
    fn end(&mut self, chain: Chain, number: u32, places: &Places) {
        match self.chains.binary_search_by_key(&chain, |(chain, _)| *chain) {
            Ok(at) => self.chains[at].1 = self.chains[at].1.max(number),
            Err(at) => self.chains.insert(at, (chain, number)),
        }
        self.forget_ended(places);
    }

    /// Removes the blocks that `chains` covers.
    fn forget_ended(&mut self, places: &Places) {
        let mut blocks = std::mem::take(&mut self.blocks);
        blocks.retain(|(key, _)| !self.has_ended(OpId((key >> 32) as u32), places));
        self.blocks = blocks;
    }

    fn join(&self, other: &Self, places: &Places) -> Self {
        let chains = merge(&self.chains, &other.chains, |a, b| *a.max(b));
        let blocks = merge(&self.blocks, &other.blocks, |a, b| {
            if Rc::ptr_eq(a, b) || a.contains(b) {
                Rc::clone(a)
            } else if b.contains(a) {
                Rc::clone(b)
            } else {
                Rc::new(a.join(b))
            }
        });
        let mut joined = Self { chains, blocks };
        joined.forget_ended(places);
        joined
    }
}

/// Returns the entries of a sorted map, each with the value that another map has for its key.
fn zip_sorted<'a, K: Ord, V>(
    map: &'a [(K, V)],
    mut other: &'a [(K, V)],
) -> impl Iterator<Item = (&'a K, &'a V, Option<&'a V>)> {
    map.iter().map(move |(key, value)| {
        while let [(before, _), rest @ ..] = other
            && before < key
        {
            other = rest;
        }
        (key, value, other.first().filter(|(found, _)| found == key).map(|(_, value)| value))
    })
}

/// Merges two sorted maps; `both` combines the values of a key that both have.
fn merge<K: Ord + Copy, V: Clone>(
    a: &[(K, V)],
    b: &[(K, V)],
    both: impl Fn(&V, &V) -> V,
) -> Vec<(K, V)> {
    let mut merged = Vec::with_capacity(a.len() + b.len());
    let (mut i, mut j) = (0, 0);
    while i < a.len() && j < b.len() {
        match a[i].0.cmp(&b[j].0) {
            std::cmp::Ordering::Less => {
                merged.push(a[i].clone());
                i += 1;
            }
            std::cmp::Ordering::Greater => {
                merged.push(b[j].clone());
                j += 1;
            }
            std::cmp::Ordering::Equal => {
                merged.push((a[i].0, both(&a[i].1, &b[j].1)));
                (i, j) = (i + 1, j + 1);
            }
        }
    }
    merged.extend_from_slice(&a[i..]);
    merged.extend_from_slice(&b[j..]);
    merged
}

/// The accesses that a thread or an operation knows.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock {
    /// The accesses that happened before.
    pub(super) seen: Rc<View>,
    /// The part of `seen` that a `fence.proxy.async` separates from what follows: the writes to
    /// shared and to global memory that asynchronous copies and `wgmma` may read.
    pub(super) fenced: [Rc<View>; 2],
    /// The part of `seen` that is visible to all GPUs: what precedes the start of a kernel, or a
    /// fence of the system's scope. A thread that acquires the signal of a network operation knows
    /// this part of its poster's clock, even if the operation releases nothing.
    pub(super) visible: Rc<View>,
    /// The accesses that have ended although nothing makes them visible, as after a shuffle or a
    /// relaxed barrier. A later write does not race with one of them that is a read, or that an
    /// asynchronous agent has made, since it can no longer change what that access reads or writes.
    pub(super) passed: Rc<View>,
}

/// The number of results of joins that are cached.
const CACHED: usize = 256;

/// Joins clocks, with a cache of results: the threads of a block often join the same two.
pub(super) struct Joins {
    pub(super) places: Places,
    /// Two views and their union. The cache owns them, so that no other view gets their addresses,
    /// and none of them is changed in place (`Rc::make_mut`).
    cache: RefCell<Vec<Option<[Rc<View>; 3]>>>,
}

impl Default for Joins {
    fn default() -> Self {
        Self { places: Places::default(), cache: RefCell::new(vec![None; CACHED]) }
    }
}

impl Joins {
    /// Replaces `a` by the union of both.
    fn views(&self, a: &mut Rc<View>, b: &Rc<View>) {
        if Rc::ptr_eq(a, b) {
            return;
        }
        let hash = (Rc::as_ptr(a).addr() >> 4).wrapping_mul(31) ^ Rc::as_ptr(b).addr() >> 4;
        // The highest 8 of 64 bits are an index below `CACHED`.
        let at = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15_u64 as usize) >> 56;
        let mut cache = self.cache.borrow_mut();
        if let Some([x, y, joined]) = &cache[at]
            && Rc::ptr_eq(x, a)
            && Rc::ptr_eq(y, b)
        {
            *a = Rc::clone(joined);
            return;
        }
        let joined = if a.contains(b, &self.places) {
            Rc::clone(a)
        } else if b.contains(a, &self.places) {
            Rc::clone(b)
        } else {
            Rc::new(a.join(b, &self.places))
        };
        cache[at] = Some([Rc::clone(a), Rc::clone(b), Rc::clone(&joined)]);
        *a = joined;
    }

    /// Adds to `clock` what `other` knows.
    pub(super) fn join(&self, clock: &mut Clock, other: &Clock) {
        self.views(&mut clock.seen, &other.seen);
        for (view, other) in clock.fenced.iter_mut().zip(&other.fenced) {
            self.views(view, other);
        }
        self.views(&mut clock.visible, &other.visible);
        self.views(&mut clock.passed, &other.passed);
    }

    /// Adds all that `other` knows to what is visible to all.
    pub(super) fn make_visible(&self, clock: &mut Clock, other: &Clock) {
        self.views(&mut clock.visible, &other.seen);
    }

    /// Adds all that `other` knows to the accesses that have `passed`.
    pub(super) fn pass(&self, clock: &mut Clock, other: &Clock) {
        self.views(&mut clock.passed, &other.passed);
        self.views(&mut clock.passed, &other.seen);
    }

    /// Adds that the operations of a chain up to `number` have ended: to `seen` and to both of
    /// `fenced`, since the end of an operation orders its writes before accesses of all kinds.
    pub(super) fn end(&self, clock: &mut Clock, chain: Chain, number: u32) {
        for view in std::iter::once(&mut clock.seen).chain(&mut clock.fenced) {
            if view.chain(chain) < number {
                Rc::make_mut(view).end(chain, number, &self.places);
            }
        }
    }
}

impl Clock {
    /// Adds that `agent` is known up to `time`.
    pub(super) fn add(&mut self, agent: Agent, time: u32, places: &Places) {
        if !self.seen.covers(agent, time, places) {
            Rc::make_mut(&mut self.seen).add(agent, time);
        }
    }

    /// Adds that `agent`'s accesses up to `time` have ended.
    pub(super) fn add_passed(&mut self, agent: Agent, time: u32, places: &Places) {
        if !self.passed.covers(agent, time, places) {
            Rc::make_mut(&mut self.passed).add(agent, time);
        }
    }

    /// Adds that all threads of `agent`'s block are known up to `time`.
    pub(super) fn add_all(&mut self, agent: Agent, time: u32) {
        Rc::make_mut(&mut self.seen).add_all(agent, time);
    }

    /// Returns whether `agent`'s accesses up to `time` have ended.
    pub(super) fn has_passed(&self, agent: Agent, time: u32, places: &Places) -> bool {
        self.passed.covers(agent, time, places) || self.seen.covers(agent, time, places)
    }

    /// Returns whether both are clones of the clock of the same release. Clones share `seen`, and
    /// the clocks of two releases do not, since each release makes a new view.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.seen, &other.seen)
    }

    /// Returns the part that `fence.proxy.async` separates from what follows.
    pub(super) fn fenced(&mut self, space: Space) -> &mut Rc<View> {
        &mut self.fenced[space as usize]
    }

    /// Separates all that is known from what follows, and makes it visible to all.
    pub(super) fn fence_all(&mut self) {
        self.fenced = [Rc::clone(&self.seen), Rc::clone(&self.seen)];
        self.visible = Rc::clone(&self.seen);
    }

    /// Returns what is visible to all.
    pub(super) fn visible_part(&self) -> Self {
        let mut clock = Self { seen: Rc::clone(&self.visible), ..Self::default() };
        clock.fence_all();
        clock
    }
}
