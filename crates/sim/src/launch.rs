//! Launches: the checks, the threads' coroutines, and what comes back.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::{Duration, Instant};

use corosensei::Coroutine;
use cuda_std::arch::{CTX, ThreadCtx};
use devcomm_types::kernel::{HostKernel, KernelArgs, LaunchArgs};

use crate::barrier::BlockBarrier;
use crate::dev_comm::CommState;
use crate::error::{Error, Result};
use crate::hooks::OPS;
use crate::nccl::Network;
use crate::panics;
use crate::scheduler::{Fiber, Scheduler};
use crate::shared::{MAX_SHARED, SharedMemory};
use crate::stack::Slab;
use crate::thread::{Block, Mode, OpenSession, Run, Thread, Wait};
use crate::trap::{self, Watchdog};
use crate::waits::WaitState;
use crate::warp::{WARP, Warp};
use crate::world::Simulator;

/// Threads of a block, at most.
const MAX_BLOCK: u32 = 1024;
/// Threads that are simulated at one time: their stacks take 4 KiB each at least.
const MAX_THREADS: usize = 1 << 22;
/// Threads and blocks that a multiprocessor holds.
const MULTIPROCESSOR_THREADS: u32 = 2048;
const MULTIPROCESSOR_BLOCKS: u32 = 32;

/// The shape of a launch, the same in every rank. Blocks and grids have one dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchConfig {
    /// Blocks.
    pub grid: u32,
    /// Threads of a block.
    pub block: u32,
    /// Dynamic shared memory of a block in bytes.
    pub dynamic_shared: usize,
}

impl LaunchConfig {
    /// `grid` blocks of `block` threads without dynamic shared memory.
    pub fn new(grid: u32, block: u32) -> Self {
        Self { grid, block, dynamic_shared: 0 }
    }
}

/// What a launch did.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// How often a thread got its turn.
    pub switches: u64,
    /// Accesses that went through cuda_std, if they were watched.
    pub accesses: u64,
    /// A hash of the order in which threads ran: the same seed, simulator and kernel give the same.
    pub trace: u64,
    /// What the kernel printed.
    pub printed: String,
    /// LSA barrier sessions that were not closed: on a GPU, the next kernel that uses the barrier misbehaves.
    pub open_sessions: Vec<OpenSession>,
    /// Time to make the memory of the launch.
    pub setup: Duration,
    /// Time to make the threads and to run them.
    pub elapsed: Duration,
}

impl Simulator {
    /// Runs `kernel` in every rank at once; `args` makes the arguments of a rank. Returns when all threads have ended.
    ///
    /// # Errors
    ///
    /// [`Error::Launch`] for what a GPU or the host library refuses; the other variants for what goes wrong while the
    /// kernel runs. After such an error the simulator, windows and buffers stay usable; a device communicator that was an
    /// argument does not, since its barriers may stand anywhere.
    ///
    /// # Safety
    ///
    /// The kernel's contract. Windows and buffers live until the launch returns.
    pub unsafe fn launch<K: HostKernel, A: LaunchArgs<K::Args>>(
        &self,
        kernel: K,
        config: LaunchConfig,
        mut args: impl FnMut(usize) -> A,
    ) -> Result<Report> {
        // The item only names the kernel.
        let _ = kernel;
        let begun = Instant::now();
        self.printed.borrow_mut().clear();
        let resident = self.check_shape(K::NAME, config)?;
        let mut of_rank = Vec::with_capacity(self.ranks());
        let mut comms = Vec::new();
        for rank in 0..self.ranks() {
            let args = catch_unwind(AssertUnwindSafe(|| args(rank))).map_err(|payload| {
                Error::Arguments { kernel: K::NAME, rank, message: panics::message(&*payload) }
            })?;
            if let Some(comm) = args.dev_comm() {
                comms.push(self.check_comm(K::NAME, comm, config.grid, resident)?);
            }
            // SAFETY: the arguments are this simulator's, and the contract of the kernel, which is the caller's, is about the rest.
            of_rank.push(unsafe { K::Args::from_abi(args.into_abi()) });
        }
        let mode = Mode {
            kernel: K::NAME,
            block: config.block,
            grid: config.grid,
            ranks: self.ranks(),
            watch: self.settings.watch,
            preempt: self.settings.preempt,
            random: self.settings.seed.is_some(),
        };
        let run = self.prepare(mode, resident.min(config.grid))?;
        panics::install();
        trap::install();
        let spawn = |thread: &Thread| spawn::<K>(&run, thread, of_rank[thread.block(&run).rank]);
        let limits = (self.settings.step_limit, self.settings.time_limit);
        let setup = begun.elapsed();
        let begun = Instant::now();
        let scheduler =
            Scheduler::new(&run, &spawn, config.dynamic_shared, self.settings.seed, limits);
        let watchdog = Watchdog::new(self.settings.time_limit);
        let result = scheduler.run();
        drop(watchdog);
        let report = self.finish(run, result, setup, begun.elapsed());
        if report.is_err() {
            comms.iter().for_each(|comm| comm.poisoned.set(true));
        }
        report
    }

    /// Refuses what no GPU takes; returns how many blocks a GPU holds.
    fn check_shape(&self, kernel: &'static str, config: LaunchConfig) -> Result<u32> {
        let LaunchConfig { grid, block, dynamic_shared } = config;
        let refuse = |reason: String| Err(Error::Launch { kernel, reason });
        if !CTX.get().is_null() {
            return refuse("a simulated kernel cannot launch another".to_owned());
        }
        if grid == 0 {
            return refuse("a grid of no blocks".to_owned());
        }
        if !(1..=MAX_BLOCK).contains(&block) {
            return refuse(format!(
                "blocks of {block} threads, where 1 to {MAX_BLOCK} are possible"
            ));
        }
        if dynamic_shared > MAX_SHARED {
            return refuse(format!(
                "{dynamic_shared} bytes of dynamic shared memory, where a block has at most {MAX_SHARED}"
            ));
        }
        let threads = block.next_multiple_of(WARP);
        let blocks = (MULTIPROCESSOR_THREADS / threads).min(MULTIPROCESSOR_BLOCKS);
        Ok(self.settings.multiprocessors.saturating_mul(blocks))
    }

    /// Refuses a device communicator with which the launch would hang.
    fn check_comm(
        &self,
        kernel: &'static str,
        comm: &devcomm_types::DevComm,
        grid: u32,
        resident: u32,
    ) -> Result<Rc<CommState>> {
        let refuse = |reason: String| Err(Error::Launch { kernel, reason });
        let Some(state) = self.find_comm(comm) else {
            return refuse("the device communicator is another simulator's".to_owned());
        };
        if state.poisoned.get() {
            return refuse(
                "a kernel with this device communicator failed, and left its barriers anywhere; make a new one"
                    .to_owned(),
            );
        }
        if grid > resident {
            return refuse(format!(
                "a grid of {grid} blocks, but a GPU holds {resident} of them at one time, and blocks that wait for peers need to run together"
            ));
        }
        Ok(state)
    }

    /// The objects of a launch, with `slots` blocks of each rank at one time.
    fn prepare(&self, mode: Mode, slots: u32) -> Result<Run> {
        let blocks = self.ranks() * slots as usize;
        let threads = blocks.saturating_mul(mode.block as usize);
        if threads > MAX_THREADS {
            return Err(Error::Launch {
                kernel: mode.kernel,
                reason: format!(
                    "{threads} threads at one time, where the simulator takes {MAX_THREADS}; launch fewer blocks, or set Builder::multiprocessors lower"
                ),
            });
        }
        let size = self.settings.stack_size;
        let kept = self.slab.take().filter(|slab| slab.fits(threads, size));
        let slab = match kept {
            Some(slab) => slab,
            None => Slab::new(threads, size).map_err(|source| Error::Stacks {
                threads,
                bytes: size,
                source,
            })?,
        };
        let block = |i: usize| Block {
            rank: i / slots as usize,
            index: Cell::new(0),
            first: i as u32 * mode.block,
            live: Cell::new(0),
            next: RefCell::new(Vec::with_capacity(mode.block as usize)),
            queued: Cell::new(false),
            barriers: std::array::from_fn(|_| BlockBarrier::default()),
            warps: (0..mode.block.div_ceil(WARP)).map(|_| Warp::default()).collect(),
            shared: RefCell::new(SharedMemory::default()),
        };
        let thread = |id: usize| Thread {
            ctx: Cell::new(idle_context()),
            run: Cell::new(std::ptr::null()),
            yielder: Cell::new(std::ptr::null()),
            wait: Cell::new(Wait::Done),
            result: Cell::new((0, false)),
            updating: Cell::new(false),
            waits: Cell::new(false),
            unwinding: Cell::new(false),
            polled: Cell::new([0; 4]),
            trap: Cell::new(None),
            id: id as u32,
            tid: id as u32 % mode.block,
            slot: id as u32 / mode.block,
        };
        Ok(Run {
            mode,
            threads: (0..threads).map(thread).collect(),
            blocks: (0..blocks).map(block).collect(),
            queue: RefCell::default(),
            failure: RefCell::default(),
            printed: RefCell::default(),
            switches: Cell::new(0),
            accesses: Cell::new(0),
            calls: Cell::new(0),
            last_activity: Cell::new(u64::MAX),
            interrupted: Cell::new(false),
            slice_end: Cell::new(0),
            clock: Cell::new(0),
            idle: Cell::new(0),
            streak: Cell::new(1),
            waits: (0..threads).map(|_| WaitState::default()).collect(),
            network: Network::default(),
            sessions: RefCell::new(BTreeMap::new()),
            memory: Rc::clone(&self.memory),
            slab,
        })
    }

    /// Keeps what lasts, and reports.
    fn finish(
        &self,
        run: Run,
        result: Result<u64>,
        setup: Duration,
        elapsed: Duration,
    ) -> Result<Report> {
        let printed = run.printed.take();
        self.printed.replace(printed.clone());
        // A stack that was overrun shows by its canary, which is gone now.
        if !matches!(result, Err(Error::StackOverflow { .. })) {
            self.slab.replace(Some(run.slab));
        }
        let trace = result?;
        Ok(Report {
            switches: run.switches.get(),
            accesses: run.accesses.get(),
            trace,
            printed,
            open_sessions: run.sessions.take().into_values().map(|(_, session)| session).collect(),
            setup,
            elapsed,
        })
    }
}

/// The context of a thread that has not started.
fn idle_context() -> ThreadCtx {
    ThreadCtx {
        thread_idx: [0; 3],
        block_idx: [0; 3],
        block_dim: [0; 3],
        grid_dim: [0; 3],
        dynamic_shared: (std::ptr::null_mut(), 0),
        watch: false,
        ops: &OPS,
    }
}

/// The coroutine that runs `K` as `thread`.
fn spawn<K: HostKernel>(run: &Run, thread: &Thread, args: K::Args) -> Fiber {
    thread.run.set(std::ptr::from_ref(run));
    thread.unwinding.set(false);
    // SAFETY: the thread's own stack, of which the slab has one a thread; its last coroutine has ended, or there was none. The
    // run holds the slab and outlives the scheduler, which holds the coroutine.
    let stack = unsafe { run.slab.stack(thread.id as usize) };
    Coroutine::with_stack(stack, move |yielder, ()| {
        let (thread, run) = Thread::current();
        thread.yielder.set(std::ptr::from_ref(yielder));
        // SAFETY: the launch's caller keeps the kernel's contract, and the scheduler has made this thread current.
        let result = catch_unwind(AssertUnwindSafe(|| unsafe { K::call(args) }));
        if let Err(payload) = result {
            panics::report(run, thread, &*payload);
        }
    })
}
