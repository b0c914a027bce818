//! The simulated GPUs: what they run, and how they are driven.
//!
//! [`Gpus`] live as long as their machine. A [`Launch`] gives one GPU a grid; its blocks go to the GPU's multiprocessors as
//! these have room, so that grids of one GPU overlap where they fit. [`Gpus::step`] runs all that can run for a while.

use std::rc::Rc;
use std::time::Duration;

use crate::error::{Error, Result, Stall};
use crate::memory::Memory;
use crate::thread::OpenSession;

/// How GPUs are made, and how they run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) gpus: usize,
    /// Multiprocessors of a GPU.
    pub(crate) multiprocessors: u32,
    /// Runs threads and blocks in a random order that is a function of the seed; without, in order.
    pub(crate) seed: Option<u64>,
    /// Whether other threads may run between any two accesses.
    pub(crate) preempt: bool,
    /// Whether every access is checked.
    pub(crate) watch: bool,
    /// Bytes of a thread's stack.
    pub(crate) stack_size: usize,
    /// Switches between threads in one busy period, at most.
    pub(crate) step_limit: Option<u64>,
    /// Processor time of one busy period, at most.
    pub(crate) time_limit: Option<Duration>,
}

/// One grid on one GPU.
pub(crate) struct Launch {
    /// Name of the kernel, for reports.
    pub(crate) kernel: &'static str,
    pub(crate) gpu: usize,
    /// Blocks, by dimension.
    pub(crate) grid: [u32; 3],
    /// Threads of a block, by dimension.
    pub(crate) block: [u32; 3],
    /// Dynamic shared memory of a block in bytes.
    pub(crate) dynamic_shared: usize,
    /// Whether all blocks run at once: the grid starts when all of them fit beside what runs.
    pub(crate) cooperative: bool,
    /// Runs one thread of the kernel, on its coroutine. The arguments are inside.
    pub(crate) body: Rc<dyn Fn()>,
}

/// A grid that was launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GridId(u64);

/// What a step of the GPUs did.
#[derive(Debug)]
pub(crate) enum Step {
    /// Something happened.
    Progress,
    /// Nothing is on the GPUs, and nothing is under way between them.
    Idle,
    /// All threads wait for something that neither a thread nor the network will do. The host may, or a deadline may pass
    /// ([`Gpus::advance`]); otherwise it is a deadlock ([`Gpus::stall`] says of whom).
    Stuck,
    /// Threads poll without saying for what, and nothing has happened for a while: time may pass ([`Gpus::advance`]). If
    /// nothing happens for long, the step fails with [`Error::Livelock`].
    Spinning,
    /// A kernel broke a rule or met a limit: everything that ran on the GPUs has been ended, as by [`Gpus::reset`].
    Failed(Error),
}

/// The simulated GPUs: their threads, their network, their clock. They live on one OS thread.
pub(crate) struct Gpus {}

#[allow(unused_variables)]
impl Gpus {
    /// GPUs with nothing on them, over `memory`.
    pub(crate) fn new(settings: Settings, memory: Rc<Memory>) -> Rc<Self> {
        todo!()
    }

    /// Takes a grid, which starts when those that its GPU took before have started and as there is room.
    ///
    /// # Errors
    ///
    /// [`Error::Launch`] for what no GPU takes.
    pub(crate) fn launch(&self, launch: Launch) -> Result<GridId> {
        todo!()
    }

    /// How many blocks of `threads` threads with so much dynamic shared memory a GPU holds at one time.
    pub(crate) fn resident(&self, threads: u32, dynamic_shared: usize) -> u32 {
        todo!()
    }

    /// One pass over the blocks that can run, and the network's turn.
    pub(crate) fn step(&self) -> Step {
        todo!()
    }

    /// Whether nothing is on the GPUs, and nothing is under way between them.
    pub(crate) fn is_idle(&self) -> bool {
        todo!()
    }

    /// Refuses what no GPU takes.
    pub(crate) fn check(&self, launch: &Launch) -> Result<()> {
        todo!()
    }

    /// Whether a grid has ended; one that has is forgotten, and stays done.
    pub(crate) fn is_done(&self, grid: GridId) -> bool {
        todo!()
    }

    /// Ends everything that runs, waits to run or is under way, and begins anew, with the seed too.
    pub(crate) fn reset(&self) {
        todo!()
    }

    /// The host did something that threads may be polling for: stored to their memory, or launched.
    pub(crate) fn progress(&self) {
        todo!()
    }

    /// The simulated time in nanoseconds.
    pub(crate) fn now(&self) -> u64 {
        todo!()
    }

    /// When the first of the kernels' waits with a timeout is over.
    pub(crate) fn next_deadline(&self) -> Option<u64> {
        todo!()
    }

    /// Moves the clock on to `to`, unless it is later already, and ends the first of the kernels' waits whose time is over then. (One
    /// at a time: what its thread does next may be what others wait for.)
    pub(crate) fn advance(&self, to: u64) {
        todo!()
    }

    /// Who waits for what now.
    pub(crate) fn stall(&self) -> Box<Stall> {
        todo!()
    }

    /// What kernels have printed since this was last asked.
    pub(crate) fn take_printed(&self) -> String {
        todo!()
    }

    /// LSA barrier sessions that grids left open when they ended, since this was last asked.
    pub(crate) fn take_open_sessions(&self) -> Vec<OpenSession> {
        todo!()
    }
}
