//! Worlds: the ranks of a job, either threads of this process, or processes of which this is one.

mod builder;
#[cfg(feature = "simulator")]
mod check;
mod env;
mod gin_loopback;
mod local_job;
mod log;
mod rank;
mod rendezvous;
mod run;
mod signals;
mod threads;

use std::fmt::{self, Display};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

pub use self::builder::WorldBuilder;
#[cfg(feature = "simulator")]
pub use self::check::{
    Check, CheckReport, check, check_exhaustive, check_pct, check_random, replay, run_test,
};
use self::env::{Launched, launched};
pub use self::gin_loopback::GinLoopback;
pub use self::local_job::LocalJob;
pub use self::rank::Rank;
pub use self::rendezvous::SideChannel;
use self::rendezvous::{Peer, RendezvousConfig, host_name};
use self::run::{refuse_within_rank, run_rank, run_threads};
use self::signals::Printer;
use crate::communicator::Library;
use crate::device::gpus_of;
use crate::error::{DriverError, Error, Result};
use crate::machine::Machine;
use crate::sys::fork::Process;
use crate::sys::nccl::DEV_COMM_VERSION;

/// The ranks of a job, one GPU each.
///
/// ```no_run
/// use devcomm_host::{Error, World};
///
/// # fn main() -> Result<(), Error> {
/// let world = World::from_env()?;
/// let sums = world.run(|rank| {
///     let all = rank.all_gather(&[rank.rank() as u8])?;
///     Ok::<_, Error>(all.iter().map(|bytes| u32::from(bytes[0])).sum::<u32>())
/// })?;
/// println!("{sums:?}");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct World {
    machine: Machine,
    library: Library,
    mode: RankMode,
    checked: bool,
    /// How long a call of threads may wait for the other ranks; processes have it in their mode.
    deadline: Option<Duration>,
    /// The simulated machine that was made for this world, if there is one.
    own: Option<Arc<OwnMachine>>,
    /// The process that has made the world.
    process: Process,
}

/// The simulated machine that a world has made. If it or a run has failed, it ends with the last
/// clone of the world: objects that the ranks could not free, since other ranks might use them,
/// would keep it alive.
#[derive(Debug)]
struct OwnMachine {
    machine: Machine,
    /// Whether a run has failed. Read only in `drop`, which the `Arc` orders after all uses.
    failed: AtomicBool,
}

impl Drop for OwnMachine {
    fn drop(&mut self) {
        if *self.failed.get_mut() || self.machine.has_failed() {
            self.machine.end();
        }
    }
}

#[derive(Clone, Debug)]
enum RankMode {
    /// Every rank is a thread; rank `i` is on GPU `i`.
    Threads(usize),
    /// This process is one rank.
    Process { config: RendezvousConfig, local_rank: usize, device: usize },
}

impl World {
    /// Returns the world that the environment describes. Under a launcher this process is one rank,
    /// on the GPU of its local rank; without one there is a thread, and rank, for every visible
    /// GPU. With `DEVCOMM_SIMULATE=4` the visible GPUs are four simulated ones.
    ///
    /// Launchers can be nested: the first one in this list whose variables are set is the one that
    /// counts.
    ///
    /// 1. torchrun, or any launcher that sets RANK and WORLD_SIZE, with LOCAL_RANK, MASTER_ADDR and
    ///    MASTER_PORT;
    /// 2. mpirun of Open MPI (OMPI_COMM_WORLD_RANK, ...) and of MVAPICH2 (MV2_COMM_WORLD_RANK,
    ///    ...);
    /// 3. mpiexec of MPICH, Intel MPI and PALS (PMI_RANK, ...);
    /// 4. srun of Slurm (SLURM_PROCID, ...), recognized by SLURM_STEP_ID. A batch script, salloc's
    ///    shell, an interactive shell of `srun --pty`, and processes that these start without srun
    ///    are not ranks, though they have most of Slurm's variables.
    ///
    /// Ranks connect to rank 0, at MASTER_ADDR and MASTER_PORT. Both are optional for 2 to 4. The
    /// address is then this host if all ranks are on it, or else the first host of Slurm's list;
    /// MPI's launchers do not provide it, so ranks on several hosts need MASTER_ADDR. The port,
    /// from 20001 to 32767, is derived from the id of the job.
    ///
    /// * `DEVCOMM_PORT`: the port of rank 0's rendezvous. Default: MASTER_PORT, or the next port
    ///   when torchrun's agent uses that; else derived from the job's id.
    /// * `DEVCOMM_TIMEOUT`: seconds that rank 0 waits for all ranks to connect, and they for rank
    ///   0. Default: 60.
    /// * `DEVCOMM_OPERATION_TIMEOUT`: seconds that a call may wait for other ranks, see
    ///   [`WorldBuilder::deadline`]. Default: 600; 0: no limit.
    /// * `DEVCOMM_LOG`: messages on the standard error, such as `warn`, `debug` for each operation
    ///   with its duration, or `devcomm_host=debug,devcomm_sim=warn`. Ignored by a program that has
    ///   a subscriber of `tracing`.
    /// * `DEVCOMM_SIMULATE`: GPUs to simulate, and how: `4`, or `4,team=2,multimem=0,seed=7`, or
    ///   what the message of a failed [`check`](crate::check()) says; not under a launcher.
    /// * `DEVCOMM_JOB_ID`: what distinguishes the job from others, the same for all ranks. Default:
    ///   the launcher's id (TORCHELASTIC_RUN_ID, Slurm's job and step, ...), on one host that of
    ///   the process of MPI's launcher that started the ranks, and the number of the user. Jobs of
    ///   MPICH or MVAPICH2 on several hosts need it.
    /// * `DEVCOMM_JOB_TOKEN`: a secret of the job's ranks, of at least 16 characters, without which
    ///   no process can join; or `DEVCOMM_JOB_TOKEN_FILE`, a file that has it and that only its
    ///   owner can read.
    ///
    /// # Errors
    ///
    /// [`WorldError::Environment`](crate::WorldError::Environment), also when both a launcher and
    /// DEVCOMM_SIMULATE are found; [`DriverError::NoDriver`], [`DriverError::NoGpu`],
    /// [`DriverError::TooFewGpus`], [`NcclError::NotFound`](crate::NcclError::NotFound).
    pub fn from_env() -> Result<Self> {
        Self::builder().from_env()
    }

    /// Returns `n` ranks on simulated GPUs, as threads of this process. Programs run as on GPUs,
    /// and errors are found and reported, but the speed tells nothing about GPUs.
    /// [`builder`](Self::builder) has more settings.
    ///
    /// The ranks run one at a time, in an order that is a function of the simulation's seed, and
    /// deadlines use the machine's virtual clock.
    ///
    /// ```
    /// use devcomm_host::{Error, World};
    ///
    /// let ranks = World::simulated(4)?.run(|rank| Ok::<_, Error>(rank.rank()))?;
    /// assert_eq!(ranks, [0, 1, 2, 3]);
    /// # Ok::<_, Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for 0 ranks.
    #[cfg(feature = "simulator")]
    pub fn simulated(n: usize) -> Result<Self> {
        Self::builder().simulate(devcomm_sim::Simulation::new(n)).threads(n)
    }

    /// Returns a builder, for settings that NCCL and the CUDA driver read when they are loaded:
    /// `World::builder().gin_loopback(GinLoopback::new()).from_env()`, and for simulated machines:
    /// `World::builder().simulate(Simulation::new(4).team_size(2)).from_env()`.
    pub fn builder() -> WorldBuilder {
        WorldBuilder::default()
    }

    /// Returns a world of processes that a launcher started.
    fn of_launcher(launched: Launched) -> Result<Self> {
        let machine = Machine::Gpus;
        let device = device_of(launched.local_rank, gpus_of(&machine)?)?;
        let library = Library::open_on(&machine, None, DEV_COMM_VERSION)?;
        let peer = Peer { host: host_name(), nccl: library.version().code() };
        let local_rank = launched.local_rank;
        let config = RendezvousConfig::new(launched, peer);
        let mode = RankMode::Process { config, local_rank, device };
        let (checked, deadline) = (cfg!(debug_assertions), None);
        let process = Process::current();
        Ok(Self { machine, library, mode, checked, deadline, own: None, process })
    }

    /// Returns a world of `n` threads, or of one per GPU.
    fn of_threads(machine: Machine, n: Option<usize>) -> Result<Self> {
        let n = match n {
            None => gpus_of(&machine)?,
            Some(n) => require_gpus(&machine, n)?,
        };
        let library = Library::open_on(&machine, None, DEV_COMM_VERSION)?;
        let mode = RankMode::Threads(n);
        let (checked, deadline) = (cfg!(debug_assertions), machine.deadline()?);
        let process = Process::current();
        Ok(Self { machine, library, mode, checked, deadline, own: None, process })
    }

    /// Returns `n` ranks as threads of this process, rank `i` on GPU `i`.
    ///
    /// # Errors
    ///
    /// [`DriverError::TooFewGpus`]; [`DriverError::NoDriver`],
    /// [`DriverError::NoGpu`], [`NcclError::NotFound`](crate::NcclError::NotFound);
    /// [`Error::InvalidInput`] for 0 ranks.
    pub fn threads(n: usize) -> Result<Self> {
        Self::builder().threads(n)
    }

    /// Returns whether a launcher started this process as one rank, by the rules of
    /// [`from_env`](Self::from_env). A program that starts its own ranks checks this first.
    #[must_use]
    pub fn is_launched() -> bool {
        !matches!(launched(&|name| std::env::var_os(name)), Ok(None))
    }

    /// Returns whether several ranks that are processes may share a GPU, by NCCL's variable
    /// `NCCL_MULTI_RANK_GPU_ENABLE`; see [`spawn_local`](Self::spawn_local).
    #[must_use]
    pub fn may_share_gpus() -> bool {
        let value = std::env::var(MULTI_RANK).unwrap_or_default();
        value.trim().parse::<i64>().is_ok_and(|value| value != 0)
    }

    /// Starts `n` copies of this program on this host, one per GPU, with the same arguments, and
    /// waits for them. In each of them [`is_launched`](Self::is_launched) is true and
    /// [`from_env`](Self::from_env) makes it one rank. See [`LocalJob`].
    ///
    /// With `NCCL_MULTI_RANK_GPU_ENABLE=1` there may be more ranks than GPUs: rank `i` uses GPU `i`
    /// modulo their number. Their kernels run at the same time only under CUDA's Multi-Process
    /// Service (MPS), where each process gets its part of the multiprocessors unless
    /// `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` is set; without MPS they take turns of about 2 ms.
    ///
    /// # Errors
    ///
    /// Before anything is started, [`DriverError::TooFewGpus`],
    /// [`NcclError::NotFound`](crate::NcclError::NotFound) and similar, and
    /// [`WorldError::Environment`](crate::WorldError::Environment) with DEVCOMM_SIMULATE, because
    /// simulated ranks are threads of one process; then as [`LocalJob::run`].
    pub fn spawn_local(n: usize) -> Result<()> {
        Self::builder().spawn_local(n)
    }

    fn start_processes(n: usize) -> Result<()> {
        let sharing = if n > 0 && Self::may_share_gpus() {
            n.div_ceil(gpus_of(&Machine::Gpus)?)
        } else {
            require_gpus(&Machine::Gpus, n)?;
            1
        };
        // Otherwise every rank would fail with the same error.
        Library::open_on(&Machine::Gpus, None, DEV_COMM_VERSION)?;
        let mut job = LocalJob::new(n)?;
        if sharing > 1 && std::env::var_os(MPS_SHARE).is_none() {
            // CUDA then also reports this part of the multiprocessors, by which plans are chosen.
            job = job.env(MPS_SHARE, (100 / sharing).max(1).to_string());
        }
        job.run()
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn n_ranks(&self) -> usize {
        match &self.mode {
            RankMode::Threads(n) => *n,
            RankMode::Process { config, .. } => config.n_ranks,
        }
    }

    /// Returns whether ranks are processes, of which this is one, and not threads of this process.
    #[must_use]
    pub fn is_of_processes(&self) -> bool {
        matches!(self.mode, RankMode::Process { .. })
    }

    /// Returns whether its GPUs are simulated. Times measured there tell nothing about GPUs.
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        self.machine.is_simulated()
    }

    /// Returns the simulated machine; `None` for real GPUs. It reports errors in the simulation and
    /// records the calls of the driver and of NCCL, and a test can make such calls fail.
    ///
    /// ```no_run
    /// use devcomm_host::{Effect, Error, Fault, NcclError, World};
    ///
    /// let world = World::simulated(2)?;
    /// let machine = world.simulated_machine().expect("the GPUs are simulated");
    /// let (function, effect) = ("ncclMemAlloc", Effect::Fail(1));
    /// machine.inject(Fault { function, gpu: Some(1), nth: None, effect });
    /// let failed = world.run(|rank| rank.communicator()?.mem_alloc::<f32>(8).map(drop));
    /// assert!(matches!(failed, Err(Error::Nccl(NcclError::Failed { code: 1, .. }))));
    /// # Ok::<_, Error>(())
    /// ```
    #[cfg(feature = "simulator")]
    #[must_use]
    pub fn simulated_machine(&self) -> Option<&devcomm_sim::Machine> {
        self.machine.simulated()
    }

    /// Returns the NCCL library in use.
    #[must_use]
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// Runs `f` on every rank of this process, and returns the results: those of all ranks, in
    /// order, if ranks are threads; that of this rank alone if ranks are processes. Returns when
    /// all ranks of the world are done.
    ///
    /// When a rank fails, the waits of the other ranks end with
    /// [`WorldError::RankLost`](crate::WorldError::RankLost); the result is the error of the rank
    /// that failed first. A kernel that fails is an error of its rank, also if no thread waits for
    /// its stream; so is one that waits forever on simulated GPUs.
    ///
    /// # Errors
    ///
    /// The first failing rank's error; [`Error::InvalidInput`] within the function of a rank;
    /// [`WorldError::RankPanicked`](crate::WorldError::RankPanicked) if `f` panicked;
    /// [`WorldError::RankLost`](crate::WorldError::RankLost) if another process failed; from
    /// the rendezvous, [`WorldError::RanksMissing`](crate::WorldError::RanksMissing),
    /// [`NcclError::VersionsDiffer`](crate::NcclError::VersionsDiffer),
    /// [`WorldError::Rendezvous`](crate::WorldError::Rendezvous).
    pub fn run<T, E, F>(&self, f: F) -> Result<Vec<T>, E>
    where
        F: Fn(&Rank) -> Result<T, E> + Sync,
        T: Send,
        E: From<Error> + Display + Send,
    {
        self.process.require()?;
        // Only this part is compiled for each caller, not how ranks run.
        let results = Mutex::new(Vec::new());
        results.lock().resize_with(self.local_ranks(), || None);
        let outcome = self.run_ranks(&|index, rank| {
            let result = f(rank);
            let failure = result.as_ref().err().map(E::to_string);
            results.lock()[index] = Some(result);
            failure.map_or(Ok(()), |message| Err(Failure::OfFunction { index, message }))
        });
        if let Some(own) = self.own.as_ref().filter(|_| outcome.is_err()) {
            own.failed.store(true, Ordering::Relaxed);
        }
        let mut results: Vec<Option<Result<T, E>>> = results.into_inner();
        match outcome {
            Ok(()) => {}
            // The first error of the results is returned.
            Err(Failure::OfFunction { index, .. }) => results.swap(0, index),
            Err(Failure::Other(error)) => return Err(error.into()),
        }
        results.into_iter().flatten().collect()
    }

    /// Fails on a thread that runs the function of a rank, where no world can be made or run.
    /// Functions that make and [run](Self::run) worlds check that themselves; this is for callers
    /// that run worlds on other threads.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`].
    pub fn refuse_nested() -> Result<()> {
        refuse_within_rank()
    }

    /// Returns the number of ranks that this process runs.
    fn local_ranks(&self) -> usize {
        if let RankMode::Threads(n) = self.mode { n } else { 1 }
    }

    /// Runs `f` in every rank of this process, with the rank's index among them.
    fn run_ranks(
        &self,
        f: &(dyn Fn(usize, &Rank) -> Result<(), Failure> + Sync),
    ) -> Result<(), Failure> {
        Self::refuse_nested()?;
        let _printer = Printer::start();
        let f = |index, rank: &Rank| {
            f(index, rank)?;
            Ok(rank.context().end_work()?)
        };
        match &self.mode {
            RankMode::Process { config, local_rank, device } => {
                // This runs on a thread of its own, since a connection that is not answered takes
                // seconds, and so may the look-up of a name: neither is interruptible.
                let (joining, config) = (self.machine.clone(), config.clone());
                let joining = joining.spawn("devcomm-join", move || config.join())?;
                let rendezvous = joining.wait(None, || Ok(()))??;
                let library = self.library.clone();
                let make =
                    || Rank::new(rendezvous.clone(), library, *local_rank, *device, self.checked);
                run_rank(&rendezvous, make, |rank| f(0, rank))
            }
            RankMode::Threads(n) => run_threads(&self.machine, *n, self.deadline, |rendezvous| {
                let (index, library) = (rendezvous.rank(), self.library.clone());
                let make = || Rank::new(rendezvous.clone(), library, index, index, self.checked);
                run_rank(rendezvous, make, |rank| f(index, rank))
            })
            .map(drop),
        }
    }
}

/// Why a rank has failed.
enum Failure {
    /// The function returned an error with this message, which is among the results.
    OfFunction {
        index: usize,
        message: String,
    },
    Other(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OfFunction { message, .. } => f.write_str(message),
            Self::Other(error) => error.fmt(f),
        }
    }
}

/// Returns `asked`, if the machine has that many GPUs.
fn require_gpus(machine: &Machine, asked: usize) -> Result<usize> {
    if asked == 0 {
        return Err(Error::invalid("a world of 0 ranks"));
    }
    let visible = gpus_of(machine)?;
    if asked > visible { Err(DriverError::TooFewGpus { asked, visible }.into()) } else { Ok(asked) }
}

/// NCCL's variable that lets ranks share a GPU.
const MULTI_RANK: &str = "NCCL_MULTI_RANK_GPU_ENABLE";
/// The part of a GPU's multiprocessors that a process may use under CUDA's Multi-Process Service,
/// in percent.
const MPS_SHARE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";

/// Returns the GPU of a rank that is a process: that of its local rank, or the only visible one if
/// the launcher shows each process a single GPU. Where ranks share GPUs, they take turns.
fn device_of(local_rank: usize, visible: usize) -> Result<usize> {
    match (local_rank < visible, visible) {
        (true, _) => Ok(local_rank),
        (false, 1) => Ok(0),
        (false, _) if World::may_share_gpus() => Ok(local_rank % visible),
        (false, _) => Err(DriverError::TooFewGpus { asked: local_rank + 1, visible }.into()),
    }
}
