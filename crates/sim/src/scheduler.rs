//! Runs the threads of a launch, block by block, until all have ended or none can go on.
//!
//! A turn takes a block and runs its ready threads, round after round, until none is ready or the turn is long enough; then
//! comes the next block. (One queue of all threads would be several times slower: each thread's stack would be out of
//! the cache at its turn.) The order is that of the ranks, blocks and threads, or random by seed.
//!
//! A pass over the blocks in which threads wait gives the network its turn. What happens when they do nothing else is in
//! [`stuck`].

mod report;
mod stuck;

use std::time::{Duration, Instant};

use corosensei::{Coroutine, CoroutineResult};
use cuda_std::arch::{CTX, ThreadCtx};

use crate::barrier;
use crate::error::{Error, Limit, Result};
use crate::hooks::{OPS, SLICE};
use crate::shared::SharedMemory;
use crate::stack::SlabStack;
use crate::thread::{Block, Run, Thread, Wait};
use crate::warp::{self, WARP};

/// A simulated thread's coroutine.
pub(crate) type Fiber = Coroutine<(), (), (), SlabStack>;

/// Rounds of a block before the next block's turn, in order.
const TURN: usize = 1000;

/// Steps between looks at the clock; accesses count a little.
const STEPS_A_LOOK: u64 = 1 << 14;
const ACCESSES_A_STEP: u64 = 16;

/// Polls without any event after which threads that all poll or wait are stuck. Threads that load without being watched are
/// given more, since their stores are not seen.
const MAX_IDLE: u64 = 1 << 20;
const MAX_IDLE_UNWATCHED: u64 = 1 << 26;

/// SplitMix64: the order of a run is a function of its seed.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    /// A number below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(z ^ (z >> 31)) * n as u128) >> 64) as usize
    }
}

/// The threads' coroutines, abandoned when dropped: a thread that never ends has nothing to clean up.
struct Fibers(Vec<Option<Fiber>>);

impl Drop for Fibers {
    fn drop(&mut self) {
        for fiber in self.0.iter_mut().flatten() {
            // SAFETY: the frames given up hold kernel code only, which owns nothing outside its stack but what may leak;
            // no scoped borrow of the host reaches into them.
            unsafe { fiber.force_reset() };
        }
    }
}

/// What happened in a pass over the blocks that can run.
#[derive(Default)]
struct Pass {
    /// Steps of threads that looked in vain for what they wait for.
    looks: u64,
    /// Steps of threads that polled without saying for what.
    spins: u64,
    /// Whether there was any other step.
    other: bool,
}

/// The state of one launch.
pub(crate) struct Scheduler<'a> {
    run: &'a Run,
    /// Makes the coroutine of a thread.
    spawn: &'a dyn Fn(&Thread) -> Fiber,
    dynamic_shared: usize,
    fibers: Fibers,
    rng: Option<Rng>,
    step_limit: Option<u64>,
    time_limit: Option<Duration>,
    started: Instant,
    next_look: u64,
    /// First block of each rank's grid that has not started.
    next_block: Vec<u32>,
    /// Blocks of each rank's grid that have ended.
    ended: Vec<u32>,
    live: usize,
    /// Threads that wait for a peer's word.
    at_inbox: Vec<u32>,
    /// Threads that wait for the network.
    at_network: Vec<u32>,
    /// What the present pass saw.
    pass: Pass,
    /// Passes in a row in which threads only looked for what they wait for.
    quiet: u32,
    batch: Vec<u32>,
    /// Hash of the order so far.
    trace: u64,
}

impl<'a> Scheduler<'a> {
    pub(crate) fn new(
        run: &'a Run,
        spawn: &'a dyn Fn(&Thread) -> Fiber,
        dynamic_shared: usize,
        seed: Option<u64>,
        limits: (Option<u64>, Option<Duration>),
    ) -> Self {
        Self {
            run,
            spawn,
            dynamic_shared,
            fibers: Fibers((0..run.threads.len()).map(|_| None).collect()),
            rng: seed.map(Rng),
            step_limit: limits.0,
            time_limit: limits.1,
            started: Instant::now(),
            next_look: 0,
            next_block: vec![0; run.mode.ranks],
            ended: vec![0; run.mode.ranks],
            live: 0,
            at_inbox: Vec::new(),
            at_network: Vec::new(),
            pass: Pass::default(),
            quiet: 0,
            batch: Vec::new(),
            trace: 0xcbf2_9ce4_8422_2325,
        }
    }

    /// Runs the launch to its end; a hash of the order in which threads ran.
    pub(crate) fn run(mut self) -> Result<u64> {
        for slot in 0..self.run.blocks.len() {
            self.start_block(slot);
        }
        let mut pass = Vec::new();
        loop {
            std::mem::swap(&mut pass, &mut self.run.queue.borrow_mut());
            self.pass = Pass::default();
            let idle = self.run.idle.get();
            for i in 0..pass.len() {
                if let Some(rng) = &mut self.rng {
                    let k = i + rng.below(pass.len() - i);
                    pass.swap(i, k);
                }
                self.turn(pass[i] as usize)?;
                self.deliver_at_random();
            }
            pass.clear();
            self.deliver();
            self.wake_arrived();
            if self.run.queue.borrow().is_empty() {
                if self.live == 0 {
                    self.run.network.drain(self.rng.as_mut());
                    return Ok(self.trace);
                }
                if self.run.network.is_idle() && !self.time_out() {
                    return Err(Error::Deadlock(self.stall()));
                }
            } else {
                self.look_for_news(idle)?;
            }
        }
    }

    /// Gives a slot the next block of its rank's grid, if there is one.
    fn start_block(&mut self, slot: usize) {
        let run = self.run;
        let block = &run.blocks[slot];
        let index = self.next_block[block.rank];
        if index >= run.mode.grid {
            return;
        }
        self.next_block[block.rank] = index + 1;
        block.index.set(index);
        block.live.set(run.mode.block);
        barrier::reset(block);
        for (i, warp) in block.warps.iter().enumerate() {
            warp.reset(run.mode.block - i as u32 * WARP);
        }
        let shared = SharedMemory::new(self.dynamic_shared);
        let dynamic_shared = shared.dynamic();
        block.shared.replace(shared);
        for thread in block.threads(run) {
            thread.ctx.set(ThreadCtx {
                thread_idx: [thread.tid, 0, 0],
                block_idx: [index, 0, 0],
                block_dim: [run.mode.block, 1, 1],
                grid_dim: [run.mode.grid, 1, 1],
                dynamic_shared,
                watch: run.mode.watch,
                ops: &OPS,
            });
            thread.wait.set(Wait::Ready);
            thread.updating.set(false);
            thread.polled.set([0; 4]);
            thread.waits.set(false);
            run.waits[thread.id as usize].over.set(false);
            let fiber = (self.spawn)(thread);
            thread.trap.set(Some(fiber.trap_handler()));
            self.fibers.0[thread.id as usize] = Some(fiber);
            run.enqueue(thread);
        }
        self.live += run.mode.block as usize;
    }

    /// A block's turn.
    fn turn(&mut self, slot: usize) -> Result<()> {
        let run = self.run;
        let block = &run.blocks[slot];
        let mut rounds = TURN;
        if let Some(rng) = &mut self.rng {
            rounds = 1 + rng.below(64);
        }
        for _ in 0..rounds {
            self.batch.clear();
            std::mem::swap(&mut self.batch, &mut block.next.borrow_mut());
            if self.batch.is_empty() {
                break;
            }
            let mut only_polls = true;
            for i in 0..self.batch.len() {
                if let Some(rng) = &mut self.rng {
                    let k = i + rng.below(self.batch.len() - i);
                    self.batch.swap(i, k);
                }
                let thread = &run.threads[self.batch[i] as usize];
                only_polls &= self.step(block, thread);
                self.check_failure()?;
            }
            self.look_at_limits()?;
            if only_polls {
                break;
            }
        }
        if block.live.get() == 0 && self.next_block[block.rank] < run.mode.grid {
            self.start_block(slot);
        }
        let ready = !block.next.borrow().is_empty();
        block.queued.set(ready);
        if ready {
            run.queue.borrow_mut().push(slot as u32);
        }
        Ok(())
    }

    /// Runs a thread until it gives way; says whether it polls.
    #[inline]
    fn step(&mut self, block: &Block, thread: &Thread) -> bool {
        let run = self.run;
        run.switches.set(run.switches.get() + 1);
        let who = u64::from(thread.id) | u64::from(block.index.get()) << 32;
        self.trace = (self.trace ^ who).wrapping_mul(0x100_0000_01b3);
        run.slice_end.set(run.accesses.get() + SLICE);
        thread.wait.set(Wait::Ready);
        let waits = thread.waits.get();
        let fiber = &mut self.fibers.0[thread.id as usize];
        CTX.set(std::ptr::from_ref(thread).cast());
        let result = fiber.as_mut().map(|fiber| fiber.resume(()));
        CTX.set(std::ptr::null());
        match result {
            Some(CoroutineResult::Yield(())) => match thread.wait.get() {
                Wait::Ready if !(waits && thread.waits.get()) => {
                    run.progress();
                    block.next.borrow_mut().push(thread.id);
                }
                Wait::Ready | Wait::Spin { .. } => {
                    run.idle.set(run.idle.get() + 1);
                    block.next.borrow_mut().push(thread.id);
                    if waits && thread.waits.get() {
                        self.pass.looks += 1;
                    } else {
                        self.pass.spins += 1;
                    }
                    return true;
                }
                Wait::Exited => {
                    // SAFETY: as in the drop of `Fibers`.
                    fiber.iter_mut().for_each(|fiber| unsafe { fiber.force_reset() });
                    *fiber = None;
                    self.thread_ended(block, thread);
                }
                Wait::Inbox(_) => self.at_inbox.push(thread.id),
                Wait::Network => self.at_network.push(thread.id),
                _ => {}
            },
            Some(CoroutineResult::Return(())) | None => {
                *fiber = None;
                if !run.interrupted.get() {
                    self.thread_ended(block, thread);
                }
            }
        }
        self.pass.other = true;
        false
    }

    fn thread_ended(&mut self, block: &Block, thread: &Thread) {
        let run = self.run;
        thread.wait.set(Wait::Done);
        run.progress();
        self.live -= 1;
        block.live.set(block.live.get() - 1);
        warp::thread_ended(run, block, thread.tid);
        barrier::thread_ended(run, block);
        if run.slab.overflowed(thread.id as usize) {
            run.fail(thread.overflow(run));
        }
        if block.live.get() > 0 {
            return;
        }
        self.ended[block.rank] += 1;
        if let Some((what, bytes)) = block.shared.borrow().overrun() {
            let (kernel, rank, block) = (run.mode.kernel, block.rank, block.index.get());
            run.fail(Error::SharedOverrun { kernel, rank, block, what, bytes });
        }
    }

    /// Wakes the threads whose peer has arrived, or for which the network has delivered.
    fn wake_arrived(&mut self) {
        let run = self.run;
        self.at_inbox.retain(|id| {
            let over = match run.threads[*id as usize].wait.get() {
                Wait::Inbox(wait) => wait.over(),
                _ => true,
            };
            if over {
                run.wake(*id);
            }
            !over
        });
        self.at_network.retain(|id| {
            let state = &run.waits[*id as usize];
            let over = state.over.get() || state.until.get().is_none_or(|until| until.holds(run));
            if over {
                run.wake(*id);
            }
            !over
        });
    }

    fn look_at_limits(&mut self) -> Result<()> {
        let run = self.run;
        let allowed = if run.mode.watch { MAX_IDLE } else { MAX_IDLE_UNWATCHED };
        if run.idle.get() > allowed.max(64 * self.live as u64) {
            return Err(Error::Livelock(self.stall()));
        }
        let steps = run.switches.get();
        if let Some(limit) = self.step_limit.filter(|limit| steps >= *limit) {
            return Err(Error::Limit { limit: Limit::Steps(limit), stall: self.stall() });
        }
        let work = steps + run.accesses.get() / ACCESSES_A_STEP;
        if work < self.next_look {
            return Ok(());
        }
        self.next_look = work + STEPS_A_LOOK;
        match self.time_limit.filter(|limit| self.started.elapsed() >= *limit) {
            Some(limit) => Err(Error::Limit { limit: Limit::Time(limit), stall: self.stall() }),
            None => Ok(()),
        }
    }

    /// The error of the thread that ran last, if it made one.
    #[inline]
    fn check_failure(&self) -> Result<()> {
        let run = self.run;
        if run.interrupted.get() {
            let limit = Limit::Time(self.time_limit.unwrap_or_default());
            return Err(Error::Limit { limit, stall: self.stall() });
        }
        match run.failed() {
            true => run.failure.take().map_or(Ok(()), Err),
            false => Ok(()),
        }
    }
}

impl Thread {
    /// The error of a thread that has used up its stack.
    pub(crate) fn overflow(&self, run: &Run) -> Error {
        let (low, high) = run.stack_of(self.id);
        let (kernel, thread) = (run.mode.kernel, self.who(run));
        Error::StackOverflow { kernel, thread, stack: high - low }
    }
}
