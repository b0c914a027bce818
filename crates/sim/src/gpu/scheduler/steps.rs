//! Schedules by step: after each step of a thread, the next thread is chosen among all that can
//! run, of all GPUs. (The other schedules run blocks in turns, which is faster.)
//!
//! A thread that has polled in vain twice since anything has changed is set aside until something
//! changes, or until no other thread can run: it would only delay the others, or starve them. (Once
//! is not enough: a poll may have begun before the change.)

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::choice::Chooser;
use super::{Scheduler, ThreadAt};
use crate::base::error::Result;
use crate::base::schedule::Schedule;
use crate::base::simulation::Simulation;
use crate::gpu::gpus::Gpus;
use crate::gpu::thread::{Thread, Wait};
use crate::gpu::warp::WARP;

/// The number of polls in vain after which a thread is set aside.
const POLLS: u32 = 2;
/// The number of steps after which a thread, or with PCT its warp, gives way to all others, in case
/// it polls in a way that the simulator does not recognise: by plain loads, or for a lock.
const TIRING_STEPS: u32 = 1 << 12;

/// The state of a schedule by step.
pub(super) struct Steps {
    ready: Ready,
    /// Threads that are set aside, the first one first.
    aside: VecDeque<ThreadAt>,
    /// Threads that give way to all others.
    tired: Vec<ThreadAt>,
    /// The state of the threads of running blocks, by slot. (It is not in `Thread`, whose size
    /// matters to the speed of the other schedules.)
    blocks: Vec<Vec<State>>,
    /// The number of steps and events so far that changed something.
    changes: u64,
    /// The number of changes when threads were last taken back from aside.
    taken_back: u64,
    /// The thread that ran last, and whether it polled.
    last: Option<ThreadAt>,
    polled: bool,
}

/// The state of a thread.
#[derive(Clone, Copy, Default)]
struct State {
    /// The number of polls in vain since the change with number `since`.
    polls: u32,
    since: u64,
    /// Number of steps.
    steps: u32,
}

/// The threads that can run.
enum Ready {
    Pct(Pct),
    /// The threads of which one is chosen next, in no order, and the preemptions that are left.
    List {
        threads: Vec<ThreadAt>,
        preemptions: u32,
    },
}

/// The priorities of *probabilistic concurrency testing*.
struct Pct {
    /// The threads that can run, each with its warp's priority when it was added, which may be
    /// lower now, and a random number that orders the warp's threads.
    threads: BinaryHeap<(u64, Reverse<u32>, ThreadAt)>,
    /// The warps' priorities, by slot of the block.
    priorities: Vec<Vec<u64>>,
    /// The steps at which the running warp's priority changes, each with the new priority.
    changes: Vec<(u64, u64)>,
    /// Number of steps so far.
    steps: u64,
    /// The last priority of a warp that has given way; each is below those before it.
    low: u64,
}

/// Warps begin with priorities from `HIGH` on, and give way with some below `LOW`; those of planned
/// changes are the lowest.
const HIGH: u64 = 1 << 63;
const LOW: u64 = 1 << 32;

/// The part of the machine that runs next.
enum Next {
    Thread(ThreadAt),
    Network,
}

impl Steps {
    /// Returns the state for these settings, if their schedule is by step.
    pub(super) fn new(settings: &Simulation, chooser: &mut Chooser) -> Option<Box<Self>> {
        let ready = match settings.schedule {
            Schedule::Pct { depth, steps } => Ready::Pct(Pct::new(depth, steps, chooser)),
            Schedule::Choices(_) => Ready::List {
                threads: Vec::new(),
                preemptions: settings.preemptions.unwrap_or(u32::MAX),
            },
            Schedule::Fair | Schedule::Lag(_) => return None,
        };
        Some(Box::new(Self {
            ready,
            aside: VecDeque::new(),
            tired: Vec::new(),
            blocks: Vec::new(),
            changes: 0,
            taken_back: 0,
            last: None,
            polled: false,
        }))
    }

    /// Returns whether a thread can run.
    pub(super) fn has_threads(&self) -> bool {
        let ready = match &self.ready {
            Ready::Pct(pct) => !pct.threads.is_empty(),
            Ready::List { threads, .. } => !threads.is_empty(),
        };
        ready || !self.aside.is_empty() || !self.tired.is_empty()
    }

    /// Returns the state of a thread of a block of `size` threads.
    fn state(&mut self, at: ThreadAt, size: u32) -> &mut State {
        let (slot, size) = (at.slot as usize, size as usize);
        if self.blocks.len() <= slot {
            self.blocks.resize(slot + 1, Vec::new());
        }
        if self.blocks[slot].len() < size {
            self.blocks[slot].resize(size, State::default());
        }
        &mut self.blocks[slot][at.tid as usize]
    }

    fn is_list(&self) -> bool {
        matches!(self.ready, Ready::List { .. })
    }

    fn push(&mut self, thread: &Thread, at: ThreadAt, chooser: &mut Chooser) {
        match &mut self.ready {
            Ready::Pct(pct) => pct.push(at, thread.begins(), chooser),
            Ready::List { threads, .. } => threads.push(at),
        }
    }
}

impl Pct {
    fn new(depth: u32, steps: u64, chooser: &mut Chooser) -> Self {
        // The order of a PCT schedule is always random.
        let mut random = |n: u64| chooser.random().map_or(0, |rng| rng.u64(..n));
        let changes = (1..depth).map(|priority| (random(steps), priority.into())).collect();
        let (threads, priorities) = (BinaryHeap::new(), Vec::new());
        Self { threads, priorities, changes, steps: 0, low: LOW }
    }

    /// Returns the priority of a thread's warp.
    fn priority(&mut self, at: ThreadAt) -> &mut u64 {
        let (slot, warp) = (at.slot as usize, (at.tid / WARP) as usize);
        if self.priorities.len() <= slot {
            self.priorities.resize(slot + 1, Vec::new());
        }
        let block = &mut self.priorities[slot];
        if block.len() <= warp {
            block.resize(warp + 1, 0);
        }
        &mut block[warp]
    }

    /// Adds a thread; `begins` says that it has not run yet.
    fn push(&mut self, at: ThreadAt, begins: bool, chooser: &mut Chooser) {
        let mut random = |n| chooser.random().map_or(0, |rng| rng.u64(..n));
        // The threads of a block are added in order.
        if begins && at.tid.is_multiple_of(WARP) {
            *self.priority(at) = HIGH | random(HIGH);
        }
        let order = random(1 << 32) as u32;
        let priority = *self.priority(at);
        self.threads.push((priority, Reverse(order), at));
    }

    /// Removes the first thread of the warp of the highest priority.
    fn pop(&mut self) -> Option<ThreadAt> {
        loop {
            let (priority, order, at) = self.threads.pop()?;
            if let Some(change) = self.changes.iter().position(|(step, _)| *step == self.steps) {
                *self.priority(at) = self.changes.swap_remove(change).1;
            }
            let now = *self.priority(at);
            if now == priority {
                self.steps += 1;
                return Some(at);
            }
            self.threads.push((now, order, at));
        }
    }

    /// Gives the thread's warp the lowest priority except the planned ones.
    fn lower(&mut self, at: ThreadAt) {
        self.low -= 1;
        *self.priority(at) = self.low;
    }
}

impl Scheduler {
    /// Returns the thread, if its block runs.
    fn thread_at(&self, at: ThreadAt) -> Option<&Thread> {
        let block = self.blocks.get(at.slot as usize)?.as_ref()?;
        Some(block.thread(at.tid))
    }

    /// Runs some steps.
    pub(super) fn run_steps(&mut self, gpus: &Gpus) -> Result<()> {
        let Some(mut steps) = self.steps.take() else { return Ok(()) };
        let ran = self.run_some(gpus, &mut steps);
        self.steps = Some(steps);
        ran
    }

    fn run_some(&mut self, gpus: &Gpus, steps: &mut Steps) -> Result<()> {
        self.collect(gpus, steps);
        if gpus.idle_polls.get() == 0 {
            // The host, the network or another thread's end has changed something.
            steps.changes += 1;
            self.take_back(steps);
        }
        // A step that changes something sets it to 0, from which `run` sees the change.
        gpus.idle_polls.set(gpus.idle_polls.get().max(1));
        // With a list only one step runs, since the streams and the host may go on after each step.
        let most = self.chooser.length().unwrap_or(1);
        for _ in 0..most {
            match self.next(gpus, steps) {
                Some(Next::Thread(at)) => self.step_thread(gpus, steps, at)?,
                Some(Next::Network) => {
                    gpus.progress();
                    let chooser = &mut self.chooser;
                    gpus.network.step(&mut |n| chooser.branch(n))?;
                    break;
                }
                None => break,
            }
            self.chooser.check()?;
        }
        Ok(())
    }

    /// Adds the threads that became ready.
    fn collect(&mut self, gpus: &Gpus, steps: &mut Steps) {
        for slot in gpus.queue.take() {
            let Some(block) = &self.blocks[slot as usize] else { continue };
            block.queued.set(false);
            for tid in block.next.take() {
                let at = ThreadAt { slot, tid };
                steps.push(block.thread(tid), at, &mut self.chooser);
            }
        }
    }

    /// Takes all threads back from aside.
    fn take_back(&mut self, steps: &mut Steps) {
        steps.taken_back = steps.changes;
        for at in std::mem::take(&mut steps.aside) {
            if let Some(block) = &self.blocks[at.slot as usize] {
                steps.push(block.thread(at.tid), at, &mut self.chooser);
            }
        }
    }

    fn next(&mut self, gpus: &Gpus, steps: &mut Steps) -> Option<Next> {
        let next = match &mut steps.ready {
            Ready::Pct(pct) => pct.pop().map(Next::Thread),
            Ready::List { threads, .. } => {
                if threads.is_empty() {
                    threads.append(&mut steps.tired);
                }
                self.next_of_list(gpus, steps)
            }
        };
        // All others wait too: the one that was set aside first polls again.
        next.or_else(|| steps.aside.pop_front().map(Next::Thread))
    }

    fn next_of_list(&mut self, gpus: &Gpus, steps: &mut Steps) -> Option<Next> {
        let Ready::List { threads, preemptions } = &mut steps.ready else { return None };
        // A thread's first step ends before its first atomic access: its order does not matter.
        let begins = |at: &ThreadAt| self.thread_at(*at).is_some_and(Thread::begins);
        if let Some(first) = threads.iter().position(begins) {
            return Some(Next::Thread(threads.swap_remove(first)));
        }
        let continues = steps.last.filter(|last| !steps.polled && threads.contains(last));
        if let Some(last) = continues.filter(|_| *preemptions == 0) {
            threads.retain(|at| *at != last);
            return Some(Next::Thread(last));
        }
        // The thread that ran last comes first, and the others in an order without slots, which may
        // differ between runs with the same choices so far.
        threads.sort_by_cached_key(|at| {
            let block = self.blocks[at.slot as usize].as_ref();
            let key = block.map(|block| (block.gpu, block.grid.id, block.index, at.tid));
            (Some(*at) != steps.last, key)
        });
        let network = !gpus.network.is_idle();
        if threads.is_empty() {
            return network.then_some(Next::Network);
        }
        let taken = self.chooser.branch(threads.len() + usize::from(network));
        if taken == threads.len() {
            return Some(Next::Network);
        }
        if continues.is_some() && taken > 0 {
            *preemptions -= 1;
        }
        Some(Next::Thread(threads.remove(taken)))
    }

    /// Runs a step of a thread.
    fn step_thread(&mut self, gpus: &Gpus, steps: &mut Steps, at: ThreadAt) -> Result<()> {
        let Some(block) = self.blocks[at.slot as usize].clone() else { return Ok(()) };
        let thread = block.thread(at.tid);
        let begins = thread.begins();
        let polled = self.run(gpus, &block, thread);
        self.check_failure(gpus)?;
        gpus.idle_polls.set(gpus.idle_polls.get().max(1));
        let changes = steps.changes;
        let state = steps.state(at, block.size);
        if begins {
            *state = State::default();
        }
        // An end and an arrival at a barrier are changes too.
        let waits = !matches!(thread.wait.get(), Wait::Ready | Wait::Spin { .. });
        let changed = self.changed_memory || waits;
        let polled = polled && !changed && !self.progressed;
        let in_vain = polled && state.polls_in_vain(changes) >= POLLS;
        state.steps = state.steps.wrapping_add(1);
        let tired = state.steps.is_multiple_of(TIRING_STEPS);
        // A first step is not a choice, so its thread is not the one that ran last. Nor is a thread
        // that has ended, whose slot and number another one may get.
        if !begins {
            let ended = matches!(thread.wait.get(), Wait::Done);
            (steps.last, steps.polled) = ((!ended).then_some(at), polled);
        }
        for tid in block.next.take() {
            let ready = ThreadAt { slot: at.slot, tid };
            match &mut steps.ready {
                _ if tid == at.tid && in_vain => steps.aside.push_back(ready),
                Ready::List { .. } if tid == at.tid && tired => steps.tired.push(ready),
                Ready::Pct(pct) if tid == at.tid && tired => {
                    pct.lower(ready);
                    pct.push(ready, false, &mut self.chooser);
                }
                _ => steps.push(block.thread(tid), ready, &mut self.chooser),
            }
        }
        block.record_waits(&gpus.timeline);
        self.collect(gpus, steps);
        if changed {
            steps.changes += 1;
            // Each thread that is taken back polls. Many threads are taken back only after several
            // changes, so that not all steps are polls; but with a list after each change.
            let many = if steps.is_list() { 0 } else { steps.aside.len() as u64 / 4 };
            if steps.changes - steps.taken_back > many {
                self.take_back(steps);
            }
        }
        if block.live.get() == 0 {
            drop(block);
            self.end_block(gpus, at.slot as usize);
            self.collect(gpus, steps);
        }
        Ok(())
    }
}

impl Thread {
    /// Returns whether the thread has not run yet.
    fn begins(&self) -> bool {
        self.fiber.borrow().as_ref().is_some_and(|fiber| !fiber.has_begun())
    }
}

impl State {
    /// Counts a poll in vain; returns the number of them since change number `changes`.
    fn polls_in_vain(&mut self, changes: u64) -> u32 {
        self.polls = if self.since == changes { self.polls + 1 } else { 1 };
        self.since = changes;
        self.polls
    }
}
