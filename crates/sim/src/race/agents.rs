//! Asynchronous operations: the agents that work for threads, and what their end makes known.

use cuda_std::arch::{Engine, Event};

use super::clock::{Agent, Clock};
use super::{Races, ThreadClock};

/// The kind of an engine's groups.
pub(super) fn group_of(engine: Engine) -> Option<usize> {
    match engine {
        Engine::Bulk => Some(0),
        Engine::CpAsync => Some(1),
        Engine::Wgmma => Some(2),
        Engine::Thread | Engine::Load(_) | Engine::Send(_) => None,
    }
}

// Numbers of the agents that are not threads.
const BARRIERS: u16 = 1024;
const BULK_READS: u16 = 2048;
const BULK_WRITES: u16 = 3072;
const COPIES: u16 = 4096;
const PRODUCTS: u16 = 5120;

/// The agent of the block's `mbarrier` with this number.
pub(super) fn barrier_agent(of: Agent, number: usize) -> Agent {
    Agent { number: BARRIERS + number.min(1023) as u16, ..of }
}

impl ThreadClock {
    /// The agents that read and write for an engine with groups.
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

/// The thread that an agent works for, or the number of its `mbarrier` or warpgroup, and how it
/// accesses memory, for reports.
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
    /// Makes the accesses of copies that end with a phase; its time is the phase's number.
    pub(super) agent: Agent,
    /// Phases that have ended.
    pub(super) phase: u32,
    /// What arrivals of this phase have released.
    pub(super) pending: Clock,
    /// What the end of the last phase makes known.
    pub(super) ended: Clock,
}

impl Barrier {
    pub(super) fn end_phase(&mut self) {
        self.ended = std::mem::take(&mut self.pending);
        self.phase += 1;
    }
}

impl Races {
    /// The agent that performs the thread's next access, its time, and whether it uses the
    /// asynchronous proxy.
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

    /// A step of asynchronous operations.
    pub(crate) fn event(
        &self,
        thread: &mut ThreadClock,
        event: Event,
        number: impl FnOnce() -> usize,
    ) {
        if !self.on {
            return;
        }
        match event {
            Event::Uses(engine) => thread.engine = engine,
            Event::BarrierInit(at) => {
                let me = thread.here.agent;
                let new = Barrier {
                    agent: barrier_agent(me, number()),
                    phase: 0,
                    pending: Clock::default(),
                    ended: Clock::default(),
                };
                self.barriers.borrow_mut().insert(at, new);
            }
            Event::BarrierArrive { barrier, ends } => {
                let mut barriers = self.barriers.borrow_mut();
                let Some(barrier) = barriers.get_mut(&barrier) else { return };
                let clock = &mut barrier.pending;
                self.joins.join(clock, &thread.clock);
                clock.add(thread.here.agent, thread.time, &self.joins.places);
                thread.time += 1;
                if ends {
                    barrier.end_phase();
                }
            }
            Event::BarrierTransaction { barrier, ends } => {
                let mut barriers = self.barriers.borrow_mut();
                let Some(barrier) = barriers.get_mut(&barrier) else { return };
                let (agent, time) = (barrier.agent, barrier.phase + 1);
                barrier.pending.add(agent, time, &self.joins.places);
                if let Engine::Send(_) = thread.engine {
                    // The message comes after what its sender has read.
                    let sender = thread.here.agent;
                    self.joins.pass(&mut barrier.pending, &thread.clock);
                    barrier.pending.add_passed(sender, thread.time, &self.joins.places);
                }
                if ends {
                    barrier.end_phase();
                }
            }
            Event::BarrierWaited(at) => {
                let barriers = self.barriers.borrow();
                let Some(barrier) = barriers.get(&at) else { return };
                self.acquire(thread, &barrier.ended);
            }
            Event::Commit(engine) => {
                if let Some(kind) = group_of(engine) {
                    thread.groups[kind] += 1;
                }
            }
            Event::Wait { engine, pending, reads_only } => {
                let Some(kind) = group_of(engine) else { return };
                let ended = thread.groups[kind].saturating_sub(pending);
                let (reads, writes) = thread.group_agents(engine);
                let places = &self.joins.places;
                thread.clock.add(reads, ended, places);
                if !reads_only {
                    thread.clock.add(writes, ended, places);
                }
            }
            Event::ProxyFence(space) => {
                let clock = self.released(thread);
                *thread.clock.fenced(space) = clock.seen;
                thread.time += 1;
            }
        }
    }
}
