//! Schedules the simulated threads, block by block.
//!
//! In a *pass* each ready block has one *turn*, of up to [`ROUNDS`] *rounds*; a round runs each
//! ready thread of the block once. (With one queue of all threads, each thread's stack would be out
//! of cache when it runs, which is several times slower.) Blocks run in the order in which they
//! became ready, or in random order with a seed.
//!
//! After a pass in which threads wait, the network delivers operations. [`stuck`] handles passes in
//! which threads only wait, and [`limits`] those that go on for too long. In schedules of two kinds
//! passes differ: [`steps`], in which each step of a thread is chosen, and [`lag`], in which some
//! threads are late.

mod choice;
mod fiber;
mod lag;
mod limits;
mod report;
mod residency;
mod steps;
mod stuck;

use std::rc::Rc;

use cuda_std::arch::CTX;
use litemap::LiteMap;

pub(crate) use self::choice::Chooser;
pub(crate) use self::fiber::Fiber;
use self::lag::Lagging;
use self::limits::BusyPeriod;
use self::residency::Gpu;
use self::steps::Steps;
use crate::base::error::{Error, Result};
use crate::base::ids::GridId;
use crate::base::schedule::Choice;
use crate::base::simulation::Simulation;
use crate::base::timeline::Span;
use crate::gpu::barrier;
use crate::gpu::gpus::{Gpus, Step};
use crate::gpu::hooks::SLICE;
use crate::gpu::thread::{Block, Grid, Thread, Wait};
use crate::gpu::warp::{self, Warp};

/// The maximum number of rounds per turn of a block, without a seed.
const ROUNDS: usize = 1000;

/// A lower bound on limits of polls, for each thread: all must have polled a few times.
const POLLS_PER_THREAD: u64 = 64;

/// Initial value of `Scheduler::trace`, and the factor of each step: those of the FNV-1a hash.
const NO_TRACE: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x100_0000_01b3;

/// Counts of one pass.
#[derive(Default)]
struct PassStats {
    /// Polls by threads in a [named wait](crate::gpu::waits).
    waits: u64,
    /// Polls by threads without a named wait.
    spins: u64,
    /// Whether any thread did something other than poll.
    other: bool,
}

/// Identifies a thread by its block's slot and its number in the block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct ThreadAt {
    slot: u32,
    tid: u32,
}

/// The scheduler's state.
pub(crate) struct Scheduler {
    settings: Simulation,
    chooser: Chooser,
    /// The state of a schedule by step.
    steps: Option<Box<Steps>>,
    /// The state of an unfair schedule.
    lagging: Option<Box<Lagging>>,
    gpus: Vec<Gpu>,
    /// GPUs that may have free resources for pending blocks.
    changed: Vec<usize>,
    /// Grids that [`is_done`](Self::is_done) has not reported yet.
    grids: LiteMap<GridId, Rc<Grid>>,
    launched: u64,
    /// Running blocks by slot, and free slots.
    blocks: Vec<Option<Rc<Block>>>,
    free: Vec<usize>,
    /// Warps of ended blocks, for reuse.
    warps: Vec<Box<Warp>>,
    /// Threads of running blocks that have not ended.
    live: usize,
    /// Threads in [`Wait::Inbox`]: they wait for a peer in an LSA barrier.
    at_inbox: Vec<ThreadAt>,
    /// Threads in [`Wait::Network`].
    at_network: Vec<ThreadAt>,
    busy: Option<BusyPeriod>,
    /// Counts of the current pass.
    pass: PassStats,
    /// Consecutive passes in which threads only polled.
    idle_passes: u32,
    /// The blocks of the current pass and the threads of the current round.
    turns: Vec<u32>,
    round: Vec<u32>,
    /// Whether the thread that ran last did more than poll, and whether it has changed something
    /// for others.
    progressed: bool,
    changed_memory: bool,
    /// Hash of the order in which threads ran.
    trace: u64,
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.warps.drain(..).for_each(|warp| warp.end().keep());
    }
}

impl Scheduler {
    pub(crate) fn new(settings: &Simulation) -> Self {
        let mut chooser = Chooser::new(settings);
        Self {
            settings: settings.clone(),
            steps: Steps::new(settings, &mut chooser),
            lagging: Lagging::new(settings),
            chooser,
            gpus: (0..settings.gpus).map(|_| Gpu::new(settings)).collect(),
            changed: Vec::new(),
            grids: LiteMap::new(),
            launched: 0,
            blocks: Vec::new(),
            free: Vec::new(),
            warps: Vec::new(),
            live: 0,
            at_inbox: Vec::new(),
            at_network: Vec::new(),
            busy: None,
            pass: PassStats::default(),
            idle_passes: 0,
            turns: Vec::new(),
            round: Vec::new(),
            progressed: false,
            changed_memory: false,
            trace: NO_TRACE,
        }
    }

    /// Ends all grids; the choices and the trace go on. Warps in use are not reused, since their
    /// stacks may be corrupt.
    pub(crate) fn reset(&mut self, gpus: &Gpus) {
        let now = gpus.timeline.now();
        gpus.timeline.extend(self.running_spans(now));
        let new = Self::new(&self.settings);
        let mut old = std::mem::replace(self, new);
        (self.warps, self.launched) = (std::mem::take(&mut old.warps), old.launched);
        std::mem::swap(&mut self.chooser, &mut old.chooser);
        self.trace = old.trace;
    }

    /// Returns what the timeline shows of running blocks.
    pub(crate) fn running_spans(&self, now: u64) -> Vec<Span> {
        self.blocks.iter().flatten().flat_map(|block| block.spans(now)).collect()
    }

    #[cfg(test)]
    pub(crate) fn idle_warps(&self) -> usize {
        self.warps.len()
    }

    pub(crate) fn trace(&self) -> u64 {
        self.trace
    }

    /// Returns the choices made by a list.
    pub(crate) fn choices(&self) -> &[Choice] {
        self.chooser.made()
    }

    /// Returns the rank that lags in an unfair schedule, and whether all others can only wait.
    pub(crate) fn late_rank(&self) -> (Option<usize>, bool) {
        let lagging = self.lagging.as_ref();
        (lagging.and_then(|lagging| lagging.rank()), lagging.is_some_and(|l| l.is_stuck()))
    }

    /// Chooses an index below `n`: 0, or at random with a seed.
    pub(crate) fn choose(&mut self, n: usize) -> usize {
        self.chooser.choose(n)
    }

    /// Runs one pass over the ready blocks, then the network.
    pub(crate) fn pass(&mut self, gpus: &Gpus) -> Result<Step> {
        self.start_blocks(gpus)?;
        if self.live > 0 || !gpus.network.is_idle() {
            gpus.timeline.tick();
        }
        if self.live == 0 {
            return self.step_network(gpus);
        }
        self.begin_pass(gpus);
        self.pass = PassStats::default();
        self.release_late(gpus);
        let idle = match self.steps {
            // `run_some` sets it to this before a thread runs.
            Some(_) => gpus.idle_polls.get().max(1),
            None => gpus.idle_polls.get(),
        };
        match self.steps {
            Some(_) => self.run_steps(gpus)?,
            None => self.run_turns(gpus)?,
        }
        // The end of a grid may have found an error, although no thread runs after it.
        self.check_failure(gpus)?;
        self.deliver(gpus)?;
        self.step_copies(gpus);
        self.wake_arrived(gpus);
        let progressed = self.progressed(gpus, idle);
        if progressed {
            gpus.host.progressed();
        }
        // Also where no thread is ready.
        self.check_limits(gpus)?;
        if self.count_pass(progressed) {
            // The late threads run next, so this is no deadlock.
            self.idle_passes = 0;
            return Ok(Step::Progress);
        }
        let ready = self.steps.as_ref().is_some_and(|steps| steps.has_threads());
        if ready || !gpus.queue.borrow().is_empty() {
            return Ok(self.detect_stuck(gpus, progressed));
        }
        // If a thread did more than poll, it may have let a dependent launch begin.
        let idle = !self.pass.other && self.changed.is_empty() && gpus.network.is_idle();
        let idle = idle && gpus.copies.is_idle();
        Ok(if self.live > 0 && idle { Step::Stuck } else { Step::Progress })
    }

    /// Runs each ready block's turn.
    fn run_turns(&mut self, gpus: &Gpus) -> Result<()> {
        let mut turns = std::mem::take(&mut self.turns);
        std::mem::swap(&mut turns, &mut gpus.queue.borrow_mut());
        for i in 0..turns.len() {
            let k = i + self.choose(turns.len() - i);
            turns.swap(i, k);
            self.turn(gpus, turns[i] as usize)?;
            self.deliver_at_random(gpus)?;
            self.step_copies(gpus);
        }
        turns.clear();
        self.turns = turns;
        Ok(())
    }

    /// Steps the network while no thread runs.
    fn step_network(&mut self, gpus: &Gpus) -> Result<Step> {
        self.busy = None;
        if gpus.network.is_idle() {
            return Ok(Step::Idle);
        }
        self.deliver_some(gpus)?;
        gpus.host.progressed();
        Ok(Step::Progress)
    }

    /// Runs a block's turn.
    fn turn(&mut self, gpus: &Gpus, slot: usize) -> Result<()> {
        let Some(block) = self.blocks[slot].clone() else { return Ok(()) };
        let mut rounds = self.chooser.length().unwrap_or(ROUNDS);
        if self.lagging.as_ref().is_some_and(|lagging| lagging.late_may_run) {
            rounds = 1;
        }
        for _ in 0..rounds {
            self.round.clear();
            std::mem::swap(&mut self.round, &mut block.next.borrow_mut());
            if let Some(lagging) = &mut self.lagging {
                lagging.hold_back(&block, &mut self.round);
            }
            if self.round.is_empty() {
                break;
            }
            let mut only_polls = true;
            for i in 0..self.round.len() {
                let k = i + self.choose(self.round.len() - i);
                self.round.swap(i, k);
                only_polls &= self.run(gpus, &block, block.thread(self.round[i]));
                self.check_failure(gpus)?;
            }
            self.check_limits(gpus)?;
            if only_polls {
                break;
            }
        }
        block.record_waits(&gpus.timeline);
        let ready = !block.next.borrow().is_empty();
        block.queued.set(ready);
        if ready {
            gpus.queue.borrow_mut().push(slot as u32);
        }
        if block.live.get() == 0 {
            drop(block);
            self.end_block(gpus, slot);
        }
        Ok(())
    }

    /// Runs a thread until it suspends; returns whether the thread only polled.
    #[inline(always)]
    fn run(&mut self, gpus: &Gpus, block: &Block, thread: &Thread) -> bool {
        gpus.switches.set(gpus.switches.get() + 1);
        let tid = thread.tid.get();
        let who = u64::from(tid) | (block.gpu as u64) << 16 | u64::from(block.index) << 32;
        self.trace = (self.trace ^ who).wrapping_mul(FNV_PRIME);
        gpus.slice_end.set(gpus.accesses.get() + SLICE);
        thread.wait.set(Wait::Ready);
        gpus.changed.set(false);
        let waits = thread.in_named_wait.get();
        let mut fiber = thread.fiber.borrow_mut();
        CTX.set(std::ptr::from_ref(thread).cast());
        // A thread with weak loads chooses what they see.
        let lends = gpus.settings.weak;
        if lends {
            std::mem::swap(&mut self.chooser, &mut gpus.chooser.borrow_mut());
        }
        // A thread in a queue has a coroutine.
        let ended = fiber.as_mut().is_none_or(Fiber::resume);
        if lends {
            std::mem::swap(&mut self.chooser, &mut gpus.chooser.borrow_mut());
        }
        CTX.set(std::ptr::null());
        (self.progressed, self.changed_memory) = (gpus.idle_polls.get() == 0, gpus.changed.get());
        if ended {
            *fiber = None;
            thread.returned.set(true);
            // If the watchdog has interrupted the thread, the report counts it as running.
            if !gpus.interrupted.get() {
                self.thread_ended(gpus, block, thread);
            }
        } else {
            match thread.wait.get() {
                // A thread that stays in a named wait only polls, also where it is preempted.
                Wait::Ready if !(waits && thread.in_named_wait.get()) => {
                    gpus.reset_idle();
                    block.next.borrow_mut().push(tid);
                }
                Wait::Ready | Wait::Spin { .. } => {
                    gpus.idle_polls.set(gpus.idle_polls.get() + 1);
                    block.next.borrow_mut().push(tid);
                    if waits && thread.in_named_wait.get() {
                        self.pass.waits += 1;
                    } else {
                        self.pass.spins += 1;
                    }
                    return true;
                }
                Wait::Exited => {
                    *fiber = None;
                    self.thread_ended(gpus, block, thread);
                }
                Wait::Inbox(_) => self.at_inbox.push(ThreadAt { slot: block.slot, tid }),
                Wait::Network => self.at_network.push(ThreadAt { slot: block.slot, tid }),
                _ => {}
            }
        }
        self.pass.other = true;
        false
    }

    fn thread_ended(&mut self, gpus: &Gpus, block: &Block, thread: &Thread) {
        thread.wait.set(Wait::Done);
        gpus.progress();
        thread.end_all_copies();
        let races = &gpus.memory.races;
        if let Some(at) = races.end_thread(&mut thread.race.borrow_mut(), &block.grid.clock) {
            let what = "it ends while a bulk copy that it has started may still read the shared \
                        memory of its block: commit the copy, and wait for its group"
                .to_owned();
            gpus.fail(thread.misuse_error(at, what));
        }
        if let Some(at) = thread.products.borrow_mut().end() {
            let what = "it ends without the sums of this product: `wgmma::wait_groups` for its \
                        group, and then `wgmma::fence_operand` of the sums, are missing"
                .to_owned();
            gpus.fail(thread.misuse_error(at, what));
        }
        self.live -= 1;
        block.live.set(block.live.get() - 1);
        warp::thread_ended(thread);
        barrier::thread_ended(block, thread);
        block.cluster.thread_ended();
        if thread.overflowed() {
            gpus.fail(thread.overflow_error());
        }
        if block.live.get() > 0 {
            return;
        }
        if let Some((what, bytes)) = block.shared.borrow().overrun() {
            let (kernel, rank, block) = (block.grid.launch.kernel, block.gpu, block.index);
            gpus.fail(Error::SharedOverrun { kernel, rank, block, what, bytes });
        }
        if let Some(error) = block.unwritten.take() {
            gpus.fail(error);
        }
        if let Some((at, what)) = block.incomplete_call() {
            gpus.fail(thread.misuse_error(at, what));
        }
        if let Some(at) = races.copy_in_flight(block.grid.clock.op, block.index) {
            let what = "its block ends while a copy may still write to its shared memory: a wait \
                        for the phase of the copy's mbarrier is missing"
                .to_owned();
            gpus.fail(thread.misuse_error(at, what));
        }
    }

    /// Wakes the threads whose peer has arrived at an LSA barrier, or whose network wait is over.
    fn wake_arrived(&mut self, gpus: &Gpus) {
        let blocks = &self.blocks;
        // Returns whether the thread still waits.
        let wake = |at: &ThreadAt, over: &dyn Fn(&Thread) -> bool| {
            let Some(block) = &blocks[at.slot as usize] else { return false };
            let thread = block.thread(at.tid);
            let over = over(thread);
            if over {
                thread.wake();
            }
            !over
        };
        let arrived = |thread: &Thread| match thread.wait.get() {
            Wait::Inbox(wait) => wait.is_over(),
            _ => true,
        };
        self.at_inbox.retain(|at| wake(at, &arrived));
        let delivered = |thread: &Thread| {
            let state = &thread.state;
            state.timed_out.get() || state.until.get().is_none_or(|until| until.holds(gpus))
        };
        self.at_network.retain(|at| wake(at, &delivered));
    }
}
