//! Launches: the checks, the threads' coroutines, and what comes back.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::{Duration, Instant};

use cuda_std::arch::CTX;
use devcomm_types::kernel::{HostKernel, KernelArgs, LaunchArgs};

use crate::dev_comm::CommState;
use crate::error::{Error, Result};
use crate::gpus::{Activity, Launch, Step};
use crate::panics;
use crate::thread::OpenSession;
use crate::world::Simulator;

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
        if !CTX.get().is_null() {
            let reason = "a simulated kernel cannot launch another".to_owned();
            return Err(Error::Launch { kernel: K::NAME, reason });
        }
        let begun = Instant::now();
        let mut comms = Vec::new();
        let mut start = |rank: usize| {
            let args = catch_unwind(AssertUnwindSafe(|| args(rank))).map_err(|payload| {
                Error::Arguments { kernel: K::NAME, rank, message: panics::message(&*payload) }
            })?;
            if let Some(comm) = args.dev_comm() {
                comms.push(self.check_comm(K::NAME, comm, config)?);
            }
            // SAFETY: the arguments are this simulator's, and the contract of the kernel, which is the caller's, is about the rest.
            let args = unsafe { K::Args::from_abi(args.into_abi()) };
            self.gpus.launch(Launch {
                kernel: K::NAME,
                gpu: rank,
                grid: [config.grid, 1, 1],
                block: [config.block, 1, 1],
                dynamic_shared: config.dynamic_shared,
                cooperative: false,
                communicator: None,
                // SAFETY: the caller keeps the kernel's contract, and the scheduler has made a
                // thread current.
                body: Rc::new(move || unsafe { K::call(args) }),
            })
        };
        let started = (0..self.ranks()).try_for_each(|rank| start(rank).map(|_| ()));
        let setup = begun.elapsed();
        let begun = Instant::now();
        let result = started.and_then(|()| self.run());
        self.printed.replace(self.gpus.take_printed());
        let Activity { switches, accesses, trace, open_sessions } = self.gpus.activity();
        let report = Report {
            switches,
            accesses,
            trace,
            printed: self.printed(),
            open_sessions,
            setup,
            elapsed: begun.elapsed(),
        };
        self.gpus.reset();
        if result.is_err() {
            comms.iter().for_each(|comm| comm.poisoned.set(true));
        }
        result.map(|()| report)
    }

    /// Runs what was launched, to its end.
    fn run(&self) -> Result<()> {
        loop {
            let step = self.gpus.step();
            match step {
                Step::Progress => {}
                Step::Idle => return Ok(()),
                Step::Failed(error) => return Err(error),
                Step::Stuck | Step::Spinning => match self.gpus.next_deadline() {
                    Some(deadline) => self.gpus.advance(deadline),
                    None if matches!(step, Step::Spinning) => {}
                    None => return Err(Error::Deadlock(self.gpus.stall())),
                },
            }
        }
    }

    /// Refuses a device communicator with which the launch would hang.
    fn check_comm(
        &self,
        kernel: &'static str,
        comm: &devcomm_types::DevComm,
        LaunchConfig { grid, block, dynamic_shared }: LaunchConfig,
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
        let resident = self.gpus.resident(block, dynamic_shared);
        if grid > resident {
            return refuse(format!(
                "a grid of {grid} blocks, but a GPU holds {resident} of them at one time, and blocks that wait for peers need to run together"
            ));
        }
        Ok(state)
    }
}
