//! The simulated GPUs: what they run, and how they are driven.
//!
//! [`Gpus`] live as long as their machine. A [`Launch`] gives one GPU a grid; its blocks go to the
//! GPU's multiprocessors as these have room, so that grids of one GPU overlap where they fit.
//! [`Gpus::step`] runs all that can run for a while.

#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use litemap::LiteMap;

use crate::error::{Error, Result, Site, Stall, ThreadId};
use crate::memory::Memory;
use crate::nccl::{self, Network};
use crate::scheduler::Scheduler;
use crate::simulation::Simulation;
use crate::thread::{OpenSession, Thread};
use crate::{panics, trap};

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
pub(crate) struct GridId(pub(crate) u64);

/// What the GPUs of a machine have done.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Activity {
    /// How often a thread got its turn.
    pub switches: u64,
    /// Accesses that went through cuda_std, if they were watched.
    pub accesses: u64,
    /// A hash of the order in which threads ran: the same program has the same for the same seed.
    pub trace: u64,
    /// LSA barrier sessions that kernels have left open: on a GPU, the next kernel that uses such a
    /// barrier misbehaves.
    pub open_sessions: Vec<OpenSession>,
}

/// What a step of the GPUs did.
#[derive(Debug)]
pub(crate) enum Step {
    /// Something happened.
    Progress,
    /// Nothing is on the GPUs, and nothing is under way between them.
    Idle,
    /// All threads wait for something that neither a thread nor the network will do. The host may,
    /// or a deadline may pass ([`Gpus::advance`]); otherwise it is a deadlock ([`Gpus::stall`] says
    /// of whom).
    Stuck,
    /// Threads poll without saying for what, and nothing has happened for a while: time may pass
    /// ([`Gpus::advance`]). If nothing happens for long, the step fails with [`Error::Livelock`].
    Spinning,
    /// A kernel broke a rule or met a limit: everything that ran on the GPUs has been ended, as by
    /// [`Gpus::reset`].
    Failed(Error),
}

/// An LSA barrier session that is open.
struct Session {
    kernel: &'static str,
    grid: GridId,
    /// Number of the thread that opened it.
    tid: u32,
    open: OpenSession,
}

/// The simulated GPUs: their threads, their network, their clock. They live on one OS thread.
///
/// Threads and hooks share it, so that everything that changes is in a cell. What only the
/// scheduler looks at is its own.
pub(crate) struct Gpus {
    pub(crate) settings: Simulation,
    /// Keeps the live ranges.
    pub(crate) memory: Rc<Memory>,
    /// What is under way between the GPUs.
    pub(crate) network: Rc<Network>,
    scheduler: RefCell<Scheduler>,
    /// Blocks with a thread that can run, by slot.
    pub(crate) queue: RefCell<Vec<u32>>,
    pub(crate) failure: RefCell<Option<Error>>,
    pub(crate) printed: RefCell<String>,
    /// How often threads got their turn.
    pub(crate) switches: Cell<u64>,
    pub(crate) accesses: Cell<u64>,
    /// Calls that are neither.
    pub(crate) calls: Cell<u64>,
    /// Calls of all kinds when the watchdog last looked.
    pub(crate) last_activity: Cell<u64>,
    /// Whether the watchdog stopped a thread.
    pub(crate) interrupted: Cell<bool>,
    /// [`accesses`](Self::accesses) at which the running thread gives way.
    pub(crate) slice_end: Cell<u64>,
    pub(crate) clock: Cell<u64>,
    /// How often threads polled since something last happened.
    pub(crate) idle: Cell<u64>,
    /// Number of the present streak of passes in which threads only looked for what they wait for.
    pub(crate) streak: Cell<u64>,
    /// Sessions by address of the barrier's epoch word.
    sessions: RefCell<LiteMap<usize, Session>>,
    /// Sessions whose grids have ended.
    left_open: RefCell<Vec<OpenSession>>,
}

impl Gpus {
    /// GPUs with nothing on them, over `memory`.
    pub(crate) fn new(settings: &Simulation, memory: Rc<Memory>) -> Rc<Self> {
        nccl::install();
        panics::install();
        trap::install();
        Rc::new(Self {
            settings: settings.clone(),
            network: Rc::new(Network::new(Rc::clone(&memory))),
            memory,
            scheduler: RefCell::new(Scheduler::new(settings)),
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
            sessions: RefCell::default(),
            left_open: RefCell::default(),
        })
    }

    /// Takes a grid. It starts as its GPU has room, when the grids that the GPU took before have
    /// started.
    ///
    /// # Errors
    ///
    /// [`Error::Launch`] for what no GPU takes.
    pub(crate) fn launch(&self, launch: Launch) -> Result<GridId> {
        let id = self.scheduler.borrow_mut().launch(launch)?;
        self.progress();
        Ok(id)
    }

    /// How many blocks of `threads` threads with so much dynamic shared memory in bytes a GPU holds
    /// at one time.
    pub(crate) fn resident(&self, threads: u32, dynamic_shared: usize) -> u32 {
        self.scheduler.borrow().resident(threads, dynamic_shared)
    }

    /// One pass over the blocks that can run, and the network's turn.
    pub(crate) fn step(&self) -> Step {
        let result = self.scheduler.borrow_mut().pass(self);
        result.unwrap_or_else(|error| {
            self.reset();
            Step::Failed(error)
        })
    }

    /// Whether grids run or wait for room.
    pub(crate) fn has_grids(&self) -> bool {
        !self.scheduler.borrow().is_idle()
    }

    /// Refuses what [`launch`](Self::launch) refuses.
    pub(crate) fn check(&self, launch: &Launch) -> Result<()> {
        self.scheduler.borrow().check(launch).map(drop)
    }

    /// Whether a grid has ended; one that has is forgotten, and stays done.
    pub(crate) fn is_done(&self, grid: GridId) -> bool {
        self.scheduler.borrow_mut().is_done(grid)
    }

    /// Ends everything that runs, waits to run or is under way. The order of what comes begins
    /// anew, with the seed too.
    pub(crate) fn reset(&self) {
        self.scheduler.borrow_mut().reset();
        self.network.clear();
        self.queue.borrow_mut().clear();
        self.failure.take();
        self.sessions.borrow_mut().clear();
        self.left_open.borrow_mut().clear();
        self.interrupted.set(false);
        self.switches.set(0);
        self.accesses.set(0);
        self.progress();
    }

    /// Something happened: whoever polls may find it. For the host too, when it has stored to a
    /// GPU's memory.
    #[inline]
    pub(crate) fn progress(&self) {
        self.idle.set(0);
    }

    /// Host threads have run, who may have written what kernels wait for: nothing is
    /// [stuck](Step::Stuck) before its threads have looked again.
    pub(crate) fn look_again(&self) {
        self.scheduler.borrow_mut().look_again();
    }

    /// One of `n`: the first, or with a seed any. All that is left to chance asks here, so that a
    /// run is a function of its seed.
    pub(crate) fn choose(&self, n: usize) -> usize {
        self.scheduler.borrow_mut().choose(n)
    }

    /// The simulated time in nanoseconds.
    pub(crate) fn now(&self) -> u64 {
        self.clock.get()
    }

    /// When the first of the kernels' waits with a timeout is over.
    pub(crate) fn next_deadline(&self) -> Option<u64> {
        self.scheduler.borrow().next_deadline()
    }

    /// Moves the clock on to `to`, if that is later, and ends the first of the kernels' waits that
    /// is over then. (One at a time: what its thread does next may be what others wait for.)
    pub(crate) fn advance(&self, to: u64) {
        self.clock.set(self.now().max(to));
        self.scheduler.borrow_mut().time_out(self);
    }

    /// Who waits for what now.
    pub(crate) fn stall(&self) -> Box<Stall> {
        self.scheduler.borrow().stall()
    }

    /// What kernels have printed since this was last asked.
    pub(crate) fn take_printed(&self) -> String {
        self.printed.take()
    }

    /// What they have done since they were made or [reset](Self::reset).
    pub(crate) fn activity(&self) -> Activity {
        let mut open_sessions = self.left_open.borrow().clone();
        open_sessions.sort_by_key(|session| (session.rank, session.block, session.index));
        Activity {
            switches: self.switches.get(),
            accesses: self.accesses.get(),
            trace: self.scheduler.borrow().trace(),
            open_sessions,
        }
    }
}

/// What threads, and what they wait for, say.
impl Gpus {
    /// Whether threads run in random order.
    pub(crate) fn random(&self) -> bool {
        self.settings.seed.is_some()
    }

    /// Records an error; the first one counts.
    pub(crate) fn fail(&self, error: Error) {
        self.failure.borrow_mut().get_or_insert(error);
    }

    pub(crate) fn failed(&self) -> bool {
        self.failure.borrow().is_some()
    }

    /// Counts a call that is no access.
    pub(crate) fn called(&self) {
        self.calls.set(self.calls.get() + 1);
    }

    /// A coop's first thread opens a session on the barrier whose epoch is at `word`.
    pub(crate) fn session_opened(&self, thread: &Thread, word: usize, index: u32, at: Site) {
        let ThreadId { rank, block, thread: tid } = thread.who();
        let (kernel, grid) = (thread.kernel(), thread.block().grid.id);
        let mut sessions = self.sessions.borrow_mut();
        let other = sessions
            .get(&word)
            .filter(|other| (other.grid, other.open.block, other.tid) != (grid, block, tid));
        if let Some(Session { kernel, grid: of, open, .. }) = other {
            let of = if *of == grid { String::new() } else { format!(" of {kernel}") };
            let OpenSession { block, at: there, .. } = open;
            let what = format!("LSA barrier {index} is in use by block {block}{of} ({there})");
            drop(sessions);
            thread.misuse(at, what);
        }
        let open = OpenSession { rank, block, index, at };
        sessions.insert(word, Session { kernel, grid, tid, open });
    }

    /// The session on the barrier whose epoch is at `word` is closed.
    pub(crate) fn session_closed(&self, word: usize) {
        self.sessions.borrow_mut().remove(&word);
    }

    /// A grid has ended: what it left open is nobody's.
    pub(crate) fn grid_ended(&self, grid: GridId) {
        let mut left_open = self.left_open.borrow_mut();
        self.sessions.borrow_mut().retain(|_, session| {
            if session.grid == grid {
                left_open.push(session.open);
            }
            session.grid != grid
        });
    }
}
