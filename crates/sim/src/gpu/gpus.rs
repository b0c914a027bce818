//! The simulated GPUs: launches, running grids and the state that threads and
//! [`hooks`](crate::gpu::hooks) share.
//!
//! A machine has one [`Gpus`]. A [`Launch`] is a grid for one GPU. Its blocks run on
//! multiprocessors with free resources, so grids on one GPU overlap if both fit. [`Gpus::step`]
//! runs the ready blocks once.

mod host;
mod launches;
#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use litemap::LiteMap;

use self::host::HostState;
use self::launches::Launches;
use crate::base::arguments::Arguments;
use crate::base::error::{Error, Result, Site, Stall, ThreadId};
use crate::base::ids::GridId;
use crate::base::mutation::Change;
use crate::base::schedule::Choice;
use crate::base::simulation::Simulation;
use crate::base::timeline::Timeline;
use crate::gpu::copies::Copies;
use crate::gpu::nccl::{self, Network, Unflushed};
use crate::gpu::scheduler::{Chooser, Scheduler};
use crate::gpu::thread::{Grid, OpenSession, Thread};
use crate::gpu::{panics, trap};
use crate::memory::Memory;
use crate::memory::traffic::Counters;
use crate::race::GridClock;

/// One grid on one GPU.
pub(crate) struct Launch {
    /// Name of the kernel, for reports.
    pub(crate) kernel: &'static str,
    /// The package that it is part of.
    pub(crate) package: &'static str,
    pub(crate) gpu: usize,
    /// Blocks in each dimension.
    pub(crate) grid: [u32; 3],
    /// Threads per block in each dimension.
    pub(crate) block: [u32; 3],
    /// The most threads per block that the kernel allows.
    pub(crate) max_threads: u32,
    /// Blocks per cluster.
    pub(crate) cluster: u32,
    /// Dynamic shared memory per block in bytes.
    pub(crate) dynamic_shared: usize,
    /// Whether the grid starts only when all its blocks fit in addition to the running ones.
    pub(crate) cooperative: bool,
    /// The grid during which a dependent launch begins.
    pub(crate) previous: Option<GridId>,
    /// The memory that the arguments refer to, for reports.
    pub(crate) arguments: Rc<Arguments>,
    /// Runs one thread of the kernel on its coroutine; contains the arguments.
    pub(crate) body: Rc<dyn Fn()>,
}

/// Counts of the GPUs' work on a machine.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Activity {
    /// Number of switches to a thread.
    pub switches: u64,
    /// Number of accesses through cuda_std, if [checked](Simulation::watch).
    pub accesses: u64,
    /// A hash of the order in which threads ran: equal for the same program and settings.
    pub trace: u64,
    /// The choices made, with [`Simulation::choices`].
    pub choices: Vec<Choice>,
    /// LSA barrier sessions that kernels did not close: on a GPU, the next kernel that uses such a
    /// barrier misbehaves.
    pub open_sessions: Vec<OpenSession>,
    /// Puts and gets that their kernel did not flush: at most one of each line and block to a peer.
    pub unflushed: Vec<Unflushed>,
    /// Kernels, except devcomm's, that use peers' memory or the network, and that no rank has
    /// launched twice. If such a kernel lacks a barrier at its start, only a second launch shows
    /// that it disturbs a peer's earlier launch.
    pub launched_once: Vec<&'static str>,
}

/// Outcome of a step of the GPUs.
#[derive(Debug)]
pub(crate) enum Step {
    /// A thread or the network made progress.
    Progress,
    /// No grid runs, and no network operation is in flight.
    Idle,
    /// All threads wait, and neither a thread nor the network can wake one. The host or a timeout
    /// ([`Gpus::advance`]) may; otherwise it is a deadlock ([`Gpus::stall`] is the report).
    Stuck,
    /// Threads poll without declaring what they wait for, and nothing has changed for some polls:
    /// time may advance ([`Gpus::advance`]). If nothing changes for long, the step fails with
    /// [`Error::Livelock`].
    Spinning,
    /// A kernel failed or reached a limit, and [`Gpus::reset`] ended all grids.
    Failed(Error),
}

/// An open session on an LSA or GIN barrier.
struct Session {
    /// The kind of barrier.
    kind: &'static str,
    kernel: &'static str,
    grid: GridId,
    /// Index in the block of the thread that opened the session.
    tid: u32,
    open: OpenSession,
}

/// The simulated GPUs: threads, network and clock, on one OS thread.
///
/// Threads and hooks share this, so mutable state is in cells. The rest is in the scheduler.
pub(crate) struct Gpus {
    pub(crate) settings: Simulation,
    /// The registry of live memory.
    pub(crate) memory: Rc<Memory>,
    /// Network operations in flight.
    pub(crate) network: Rc<Network>,
    pub(crate) timeline: Rc<Timeline>,
    scheduler: RefCell<Scheduler>,
    /// Asynchronous copies of kernels under way.
    pub(crate) copies: Copies,
    /// The scheduler's chooser, while a thread with weak loads runs.
    pub(crate) chooser: RefCell<Chooser>,
    pub(crate) host: HostState,
    /// Blocks with a ready thread, by slot.
    pub(crate) queue: RefCell<Vec<u32>>,
    pub(crate) failure: RefCell<Option<Error>>,
    pub(crate) printed: RefCell<String>,
    /// Switches to threads.
    pub(crate) switches: Cell<u64>,
    pub(crate) accesses: Cell<u64>,
    /// The data that kernels send to other ranks.
    pub(crate) traffic: Counters,
    /// Hook calls other than accesses and switches.
    pub(crate) calls: Cell<u64>,
    /// All hook calls when the watchdog last checked.
    pub(crate) last_activity: Cell<u64>,
    /// The watchdog's consecutive checks without activity.
    pub(crate) silent: Cell<u32>,
    /// Whether the watchdog has stopped a thread that computes without calls.
    pub(crate) interrupted: Cell<bool>,
    /// Value of [`accesses`](Self::accesses) at which the running thread yields.
    pub(crate) slice_end: Cell<u64>,
    /// The simulated time in nanoseconds, which [`advance`](Self::advance) and kernels that read it
    /// advance.
    pub(crate) clock: Cell<u64>,
    /// Polls since the last [progress](Self::progress).
    pub(crate) idle_polls: Cell<u64>,
    /// Whether the thread that runs has changed something for others.
    pub(crate) changed: Cell<bool>,
    /// The number of such changes so far.
    pub(crate) changes: Cell<u64>,
    /// Number of the current streak, a run of passes in which threads only polled.
    pub(crate) streak: Cell<u64>,
    /// Open sessions by the address of an LSA barrier's epoch, or of a GIN barrier's first signal.
    sessions: RefCell<LiteMap<usize, Session>>,
    /// Sessions left open by grids that have ended.
    left_open: RefCell<Vec<OpenSession>>,
    /// Puts and gets not flushed by grids that have ended.
    unflushed: RefCell<Vec<Unflushed>>,
    launches: Launches,
}

impl Gpus {
    /// Returns idle GPUs with the memory registry `memory`.
    pub(crate) fn new(settings: &Simulation, memory: Rc<Memory>) -> Rc<Self> {
        nccl::install();
        panics::install();
        trap::install();
        let timeline = Rc::new(Timeline::new(settings.timeline.as_deref()));
        Rc::new(Self {
            settings: settings.clone(),
            network: Rc::new(Network::new(Rc::clone(&memory), Rc::clone(&timeline))),
            timeline,
            memory,
            scheduler: RefCell::new(Scheduler::new(settings)),
            copies: Copies::default(),
            chooser: RefCell::new(Chooser::First),
            host: HostState::new(),
            queue: RefCell::default(),
            failure: RefCell::default(),
            printed: RefCell::default(),
            switches: Cell::new(0),
            accesses: Cell::new(0),
            traffic: Counters::default(),
            calls: Cell::new(0),
            last_activity: Cell::new(u64::MAX),
            silent: Cell::new(0),
            interrupted: Cell::new(false),
            slice_end: Cell::new(0),
            clock: Cell::new(0),
            idle_polls: Cell::new(0),
            changed: Cell::new(false),
            changes: Cell::new(0),
            streak: Cell::new(1),
            sessions: RefCell::default(),
            left_open: RefCell::default(),
            unflushed: RefCell::default(),
            launches: Launches::default(),
        })
    }

    /// Launches a grid. It starts when its GPU has free resources and the grids launched before it
    /// have started.
    ///
    /// # Errors
    ///
    /// [`Error::Launch`] for a launch that no GPU accepts.
    pub(crate) fn launch(&self, launch: Launch) -> Result<GridId> {
        let id = self.scheduler.borrow_mut().launch(self, launch)?;
        self.progress();
        Ok(id)
    }

    /// Returns the maximum resident blocks per GPU for `threads` threads and `dynamic_shared` bytes
    /// of dynamic shared memory per block.
    pub(crate) fn resident(&self, gpu: usize, threads: u32, dynamic_shared: usize) -> u32 {
        self.scheduler.borrow().resident(gpu, threads, dynamic_shared)
    }

    /// Runs one pass over the ready blocks, then the network.
    pub(crate) fn step(&self) -> Step {
        let result = self.scheduler.borrow_mut().pass(self);
        result.unwrap_or_else(|error| {
            self.reset();
            Step::Failed(error)
        })
    }

    /// Returns whether grids run or are pending.
    pub(crate) fn has_grids(&self) -> bool {
        !self.scheduler.borrow().is_idle()
    }

    /// Checks a launch as [`launch`](Self::launch) does.
    pub(crate) fn check(&self, launch: &Launch) -> Result<()> {
        self.scheduler.borrow().check(launch).map(drop)
    }

    /// Returns the clock that an unfinished grid shares with later operations.
    pub(crate) fn clock_of(&self, grid: GridId) -> Option<GridClock> {
        self.scheduler.borrow().clock_of(grid)
    }

    /// Returns whether a grid has ended.
    pub(crate) fn is_done(&self, grid: GridId) -> bool {
        self.scheduler.borrow_mut().is_done(grid)
    }

    /// Returns whether a running grid lets a dependent launch begin.
    pub(crate) fn have_all_triggered(&self, grid: GridId) -> bool {
        self.scheduler.borrow().have_all_triggered(grid)
    }

    /// Ends all running and pending grids, and drops operations in flight.
    pub(crate) fn reset(&self) {
        self.scheduler.borrow_mut().reset(self);
        self.network.clear();
        self.copies.clear();
        self.queue.borrow_mut().clear();
        self.failure.take();
        self.sessions.borrow_mut().clear();
        self.left_open.borrow_mut().clear();
        self.unflushed.borrow_mut().clear();
        self.interrupted.set(false);
        self.switches.set(0);
        self.accesses.set(0);
        self.progress();
    }

    /// Records progress, such as a change of memory: polling threads may no longer be stuck. Also
    /// called after the host has stored to a GPU's memory.
    #[inline]
    pub(crate) fn progress(&self) {
        self.changed.set(true);
        self.changes.set(self.changes.get() + 1);
        self.idle_polls.set(0);
    }

    /// Records that a thread does more than poll, although it changes nothing for others.
    #[inline]
    pub(crate) fn reset_idle(&self) {
        self.idle_polls.set(0);
    }

    /// Makes threads poll again before they count as [stuck](Step::Stuck) or livelocked: host
    /// threads ran and may have written what kernels wait for.
    pub(crate) fn recheck_waits(&self) {
        self.reset_idle();
        self.scheduler.borrow_mut().recheck_waits();
    }

    /// Returns the rank that lags in an unfair schedule, and whether all others can only wait.
    pub(crate) fn late_rank(&self) -> (Option<usize>, bool) {
        self.scheduler.borrow().late_rank()
    }

    /// Chooses an index below `n`: 0, or at random with a seed. All random choices use the same
    /// generator, so that a run is a function of its seed.
    pub(crate) fn choose(&self, n: usize) -> usize {
        self.scheduler.borrow_mut().choose(n)
    }

    /// Returns the simulated time in nanoseconds.
    pub(crate) fn now(&self) -> u64 {
        self.clock.get()
    }

    /// Returns the first deadline of a kernel's wait.
    pub(crate) fn next_deadline(&self) -> Option<u64> {
        self.scheduler.borrow().next_deadline()
    }

    /// Advances the clock to `to`, if that is later, and times out the kernels' wait with the first
    /// deadline. It times out one wait at a time, since its thread may then complete other waits.
    pub(crate) fn advance(&self, to: u64) {
        self.clock.set(self.now().max(to));
        self.scheduler.borrow_mut().time_out(self);
    }

    /// Returns what every thread waits for now.
    pub(crate) fn stall(&self) -> Box<Stall> {
        self.scheduler.borrow().stall()
    }

    /// Writes the timeline, if there is one.
    pub(crate) fn write_timeline(&self) {
        if self.timeline.is_on() {
            self.timeline.write(self.scheduler.borrow().running_spans(self.timeline.now()));
        }
    }

    /// Removes and returns what kernels have printed.
    pub(crate) fn take_printed(&self) -> String {
        self.printed.take()
    }

    /// Returns the activity: switches, accesses, sessions and unflushed operations since the last
    /// [reset](Self::reset), the rest since creation.
    pub(crate) fn activity(&self) -> Activity {
        let mut open_sessions = self.left_open.borrow().clone();
        let mut unflushed = self.unflushed.borrow().clone();
        unflushed.sort_by_key(|left| (left.thread.rank, left.thread.block, left.at.line()));
        open_sessions.sort_by_key(|session| (session.rank, session.block, session.index));
        Activity {
            switches: self.switches.get(),
            accesses: self.accesses.get(),
            trace: self.scheduler.borrow().trace(),
            choices: self.scheduler.borrow().choices().to_vec(),
            open_sessions,
            unflushed,
            launched_once: self.launches.launched_once(),
        }
    }
}

/// Calls by threads and hooks.
impl Gpus {
    /// Chooses an index below `n` for the running thread: 0 unless loads are weak.
    pub(crate) fn chosen(&self, n: usize) -> usize {
        self.chooser.borrow_mut().branch(n)
    }

    /// Returns the change that a mutation makes at `at`.
    #[inline]
    pub(crate) fn change_at(&self, at: Site) -> Option<Change> {
        self.settings.mutation.as_ref().and_then(|mutation| mutation.at(at))
    }

    /// Returns whether a mutation removes operations at `at`.
    #[inline]
    pub(crate) fn removes(&self, at: Site) -> bool {
        self.settings.mutation.as_ref().is_some_and(|mutation| mutation.removes(at))
    }

    /// Returns whether a mutation removes waits at `at`.
    #[inline]
    pub(crate) fn skips_wait(&self, at: Site) -> bool {
        self.settings.mutation.as_ref().is_some_and(|mutation| mutation.skips_wait(at))
    }

    /// Returns whether threads run in random order.
    pub(crate) fn random(&self) -> bool {
        self.settings.seed.is_some()
    }

    /// Records an error, unless there is one.
    pub(crate) fn fail(&self, error: Error) {
        self.failure.borrow_mut().get_or_insert(error);
    }

    pub(crate) fn failed(&self) -> bool {
        self.failure.borrow().is_some()
    }

    /// Counts a hook call that is not an access.
    pub(crate) fn called(&self) {
        self.calls.set(self.calls.get() + 1);
    }

    /// Records that a coop's first thread opened a session on a barrier of this kind and index,
    /// with its epoch or first signal at `word`.
    pub(crate) fn session_opened(
        &self,
        thread: &Thread,
        word: usize,
        (kind, index): (&'static str, u32),
        at: Site,
    ) {
        let ThreadId { rank, block, thread: tid } = thread.id();
        let (kernel, grid) = (thread.kernel(), thread.block().grid.id);
        let mut sessions = self.sessions.borrow_mut();
        let open = sessions.get(&word);
        let (own, other) = match open.map(|open| (open.grid, open.open.block, open.tid)) {
            Some(id) if id == (grid, block, tid) => (open, None),
            _ => (None, open),
        };
        // The destructor of a session opens it once more, to close it: the first line counts.
        let opened_at = own.map_or(at, |own| own.open.at);
        if let Some(Session { kernel, grid: other_grid, open, .. }) = other {
            let of = if *other_grid == grid { String::new() } else { format!(" of {kernel}") };
            let OpenSession { block, at: there, .. } = open;
            let what = format!("{kind} {index} is in use by block {block}{of} ({there})");
            drop(sessions);
            thread.misuse(at, what);
        }
        let open = OpenSession { rank, block, index, at: opened_at };
        sessions.insert(word, Session { kind, kernel, grid, tid, open });
        drop(sessions);
        self.use_session(thread, word, (kind, index), opened_at);
    }

    /// Records that the session on the barrier at `word` was closed.
    pub(crate) fn session_closed(
        &self,
        thread: &Thread,
        word: usize,
        barrier: (&'static str, u32),
        at: Site,
    ) {
        // Reports name the line that opened it, since a destructor closes it.
        let closed = self.sessions.borrow_mut().remove(&word);
        self.use_session(thread, word, barrier, closed.map_or(at, |closed| closed.open.at));
    }

    /// Fails the thread if another session on the barrier is ordered neither before nor after its
    /// own.
    fn use_session(
        &self,
        thread: &Thread,
        word: usize,
        (kind, index): (&'static str, u32),
        at: Site,
    ) {
        let races = &self.memory.races;
        let used = races.use_session(self.memory.as_ref(), &mut thread.race.borrow_mut(), word, at);
        if let Err(other) = used {
            let by = other.thread.map_or_else(String::new, |by| format!(" by block {}", by.block));
            let there = other.at.map_or_else(String::new, |at| format!(" ({at})"));
            let what = format!(
                "{kind} {index} is in use{by} of {}{there}: nothing orders the two sessions, so \
                 each needs a barrier of its own",
                other.operation
            );
            thread.misuse(at, what);
        }
    }

    /// Records the sessions that a grid left open when it ended, and its unflushed operations.
    pub(crate) fn grid_ended(&self, grid: &Grid) {
        let unflushed = self.network.take_unflushed(grid);
        if let Some(left) = unflushed.first().filter(|_| self.settings.flush) {
            let Unflushed { thread, at, .. } = *left;
            let what = format!("its kernel ends, and {}", left.what());
            self.fail(Error::Misuse { kernel: grid.launch.kernel, thread, what, at });
        }
        self.unflushed.borrow_mut().extend(unflushed);
        self.launches.ended(grid);
        let grid = grid.id;
        let mut left_open = self.left_open.borrow_mut();
        self.sessions.borrow_mut().retain(|_, session| {
            // A GIN barrier may stay open: it has no epoch that closing would store.
            if session.grid == grid && session.kind == "LSA barrier" {
                left_open.push(session.open);
            }
            session.grid != grid
        });
    }
}
