//! Asynchronous operations: the agents that work for threads, and the clocks of their ends.

use cuda_std::arch::{Engine, Event};

use super::clock::{Agent, Clock, OpId};
use super::shadow::TOLD_APART;
use super::{Races, ThreadClock};
use crate::base::error::Site;

/// Returns the index of an engine's groups in [`ThreadClock::groups`].
pub(super) fn group_of(engine: Engine) -> Option<usize> {
    match engine {
        Engine::Bulk => Some(0),
        Engine::CpAsync => Some(1),
        Engine::Wgmma => Some(2),
        Engine::Thread | Engine::Load(_) | Engine::Send(_) => None,
    }
}

// The first numbers of the agents that are not threads: 1024 per kind, since a block has at most
// 1024 threads. If a block has more than 1024 `mbarrier`s, the further ones share the last number.
const BARRIERS: u16 = 1024;
const BULK_READS: u16 = 2048;
const BULK_WRITES: u16 = 3072;
const COPIES: u16 = 4096;
const PRODUCTS: u16 = 5120;

/// Returns the agent of the block's `mbarrier` with this number.
pub(super) fn barrier_agent(of: Agent, number: usize) -> Agent {
    Agent { number: BARRIERS + number.min(1023) as u16, ..of }
}

impl ThreadClock {
    /// Returns the agents that read and write for an engine with groups.
    pub(super) fn group_agents(&self, engine: Engine) -> (Agent, Agent) {
        let me = self.here.agent;
        let number = |first: u16| Agent { number: first + me.number, ..me };
        match engine {
            Engine::Bulk => (number(BULK_READS), number(BULK_WRITES)),
            Engine::CpAsync => (number(COPIES), number(COPIES)),
            // A warpgroup executes the instruction together.
            Engine::Wgmma => {
                let warpgroup = Agent { number: PRODUCTS + me.number / 128, ..me };
                (warpgroup, warpgroup)
            }
            Engine::Thread | Engine::Load(_) | Engine::Send(_) => (me, me),
        }
    }
}

/// Returns the thread that an agent works for, or the number of its `mbarrier` or warpgroup, and
/// how it accesses memory, for reports.
pub(super) fn performer_of(agent: u16) -> (u32, &'static str) {
    let (first, how) = match agent {
        ..BARRIERS => (0, ""),
        BARRIERS..BULK_READS => (BARRIERS, " by a copy that ends at an mbarrier"),
        BULK_READS..BULK_WRITES => (BULK_READS, " by a bulk copy"),
        BULK_WRITES..COPIES => (BULK_WRITES, " by a bulk copy"),
        COPIES..PRODUCTS => (COPIES, " by cp.async"),
        PRODUCTS.. => return (u32::from(agent - PRODUCTS) * 128, " by wgmma"),
    };
    (u32::from(agent - first), how)
}

/// An `mbarrier`.
pub(super) struct Barrier {
    /// The agent of copies that end with a phase; its time is the phase's number.
    pub(super) agent: Agent,
    /// The number of phases that have ended.
    pub(super) phase: u32,
    /// The clock that arrivals of this phase have released.
    pub(super) pending: Clock,
    /// The clock of the end of the last phase.
    pub(super) ended: Clock,
    /// The agent that has initialised it, its time and its line.
    init: (Agent, u32, Site),
    /// Whether `fence.mbarrier_init` has followed.
    is_fenced: bool,
    /// The last copy that ends at it: the number of its phase, from 1, and its line.
    copy: Option<(u32, Site)>,
    /// The last phase that a thread has waited for.
    waited: u32,
}

impl Barrier {
    fn new(agent: Agent, init: (Agent, u32, Site)) -> Self {
        let (pending, ended) = (Clock::default(), Clock::default());
        Self { agent, phase: 0, pending, ended, init, is_fenced: false, copy: None, waited: 0 }
    }

    pub(super) fn end_phase(&mut self) {
        self.ended = std::mem::take(&mut self.pending);
        self.phase += 1;
    }
}

impl Races {
    /// Returns the agent that performs the thread's next access, its time, and whether it uses the
    /// asynchronous proxy. The time of an asynchronous access is the number, from 1, of the group
    /// or of the `mbarrier`'s phase that it ends with.
    pub(super) fn performer(&self, thread: &ThreadClock, writes: bool) -> (Agent, u32, bool) {
        match thread.engine {
            Engine::Thread => (thread.here.agent, thread.time, false),
            Engine::Load(barrier) | Engine::Send(barrier) => {
                let is_async = matches!(thread.engine, Engine::Load(_));
                match self.barriers.borrow().get(&barrier) {
                    Some(barrier) => (barrier.agent, barrier.phase + 1, is_async),
                    None => (thread.here.agent, thread.time, is_async),
                }
            }
            Engine::Bulk | Engine::CpAsync | Engine::Wgmma => {
                let (reads, stores) = thread.group_agents(thread.engine);
                let group = group_of(thread.engine).map_or(0, |kind| thread.groups[kind]);
                let agent = if writes { stores } else { reads };
                (agent, group + 1, thread.engine != Engine::CpAsync)
            }
        }
    }

    /// Records a step of asynchronous operations. `number` returns the number, in its block, of an
    /// `mbarrier` that the step initialises.
    pub(crate) fn event(
        &self,
        thread: &mut ThreadClock,
        event: Event,
        at: Site,
        number: impl FnOnce() -> usize,
    ) {
        if !self.on {
            return;
        }
        match event {
            Event::Uses(engine) => {
                thread.engine = engine;
                thread.copy = match engine {
                    Engine::Thread | Engine::Wgmma => 0,
                    _ => self.copies.replace((self.copies.get() + 1) % TOLD_APART),
                };
            }
            Event::BarrierInit(word) => {
                let init = (thread.here.agent, thread.time, at);
                let new = Barrier::new(barrier_agent(init.0, number()), init);
                self.barriers.borrow_mut().insert(word, new);
            }
            Event::BarrierFence => {
                let me = thread.here.agent;
                let mut barriers = self.barriers.borrow_mut();
                let own = barriers.values_mut().filter(|barrier| barrier.init.0 == me);
                own.for_each(|barrier| barrier.is_fenced = true);
            }
            Event::RegisterFence => {}
            Event::BarrierArrive { barrier, ends } => {
                let mut barriers = self.barriers.borrow_mut();
                let Some(barrier) = barriers.get_mut(&barrier) else { return };
                self.arrive(thread, barrier);
                if ends {
                    barrier.end_phase();
                }
            }
            Event::BarrierTransaction { barrier, ends } => {
                let mut barriers = self.barriers.borrow_mut();
                let Some(barrier) = barriers.get_mut(&barrier) else { return };
                self.complete_copy(thread, barrier, at);
                if ends {
                    barrier.end_phase();
                }
            }
            Event::BarrierWaited(word) => {
                let mut barriers = self.barriers.borrow_mut();
                let Some(barrier) = barriers.get_mut(&word) else { return };
                barrier.waited = barrier.phase;
                self.acquire(thread, &barrier.ended);
            }
            Event::Commit(engine) => {
                if let Some(kind) = group_of(engine) {
                    thread.groups[kind] += 1;
                }
            }
            Event::Wait { engine, pending, reads_only } => {
                self.wait_groups(thread, engine, pending, reads_only);
            }
            Event::ProxyFence(space) => {
                let clock = self.released(thread);
                *thread.clock.fenced(space) = clock.seen;
                thread.time += 1;
            }
        }
    }
}

impl Races {
    /// Records a wait for all groups of the thread but the last `pending` ones.
    fn wait_groups(
        &self,
        thread: &mut ThreadClock,
        engine: Engine,
        pending: u32,
        reads_only: bool,
    ) {
        let Some(kind) = group_of(engine) else { return };
        let ended = thread.groups[kind].saturating_sub(pending);
        let (reads, writes) = thread.group_agents(engine);
        let places = &self.joins.places;
        thread.clock.add(reads, ended, places);
        if !reads_only {
            thread.clock.add(writes, ended, places);
        }
    }

    /// Adds what the thread has done to the `mbarrier`'s phase.
    fn arrive(&self, thread: &mut ThreadClock, barrier: &mut Barrier) {
        let clock = &mut barrier.pending;
        self.joins.join(clock, &thread.clock);
        clock.add(thread.here.agent, thread.time, &self.joins.places);
        thread.time += 1;
    }

    /// Adds a copy, which was started at line `at`, to the `mbarrier`'s phase.
    fn complete_copy(&self, thread: &mut ThreadClock, barrier: &mut Barrier, at: Site) {
        let (agent, time) = (barrier.agent, barrier.phase + 1);
        barrier.pending.add(agent, time, &self.joins.places);
        barrier.copy = Some((time, at));
        if let Engine::Send(_) = thread.engine {
            // The message comes after what its sender has read.
            let sender = thread.here.agent;
            self.joins.pass(&mut barrier.pending, &thread.clock);
            barrier.pending.add_passed(sender, thread.time, &self.joins.places);
            thread.has_met = true;
        }
    }

    /// Checks that the `mbarrier` at `word` is initialised for what the thread does with it.
    ///
    /// # Errors
    ///
    /// Returns the reason why it may not be, as the end of a sentence that names the `mbarrier`.
    pub(crate) fn check_barrier(&self, thread: &ThreadClock, word: usize) -> Result<(), String> {
        if !self.on {
            return Ok(());
        }
        let barriers = self.barriers.borrow();
        let Some(barrier) = barriers.get(&word) else {
            return Err("which nothing has initialised: `MBarrier::init`, `mbarrier::fence_init` \
                        and a barrier of all its users come first"
                .to_owned());
        };
        let (by, time, at) = barrier.init;
        let (me, places) = (thread.here.agent, &self.joins.places);
        let is_of_block = (by.op, by.block) == (me.op, me.block);
        let is_known = by == me
            || (is_of_block && time <= thread.all)
            || thread.clock.seen.covers(by, time, places)
            // After `fence.mbarrier_init`, a release, a relaxed barrier of the cluster is enough.
            || (barrier.is_fenced && thread.clock.has_passed(by, time, places));
        if !is_known {
            return Err(format!(
                "which thread {} initialises ({at}), and nothing orders the two: a `sync_threads`, \
                 or a barrier of the cluster, between them is missing",
                by.number
            ));
        }
        let by_tma = matches!(thread.engine, Engine::Load(_));
        if !barrier.is_fenced && (by_tma || !is_of_block) {
            let who = if by_tma { "TMA" } else { "another block of the cluster" };
            return Err(format!(
                "but an `mbarrier::fence_init` after its `init` ({at}), which makes it visible to \
                 {who}, is missing"
            ));
        }
        Ok(())
    }

    /// Returns the line of a copy, at an `mbarrier` of the block, whose end no thread waited for.
    pub(crate) fn copy_in_flight(&self, op: OpId, block: u32) -> Option<Site> {
        let barriers = self.barriers.borrow();
        let of_block = barriers.values().filter(|b| (b.agent.op, b.agent.block) == (op, block));
        let mut copies = of_block.filter_map(|b| b.copy.filter(|(phase, _)| *phase > b.waited));
        copies.next().map(|(_, at)| at)
    }
}
