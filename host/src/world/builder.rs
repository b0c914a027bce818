//! The builder of worlds: settings that must be made before the GPUs are used.

use std::sync::Arc;
use std::time::Duration;

use super::env::launched;
use super::run::refuse_within_rank;
use super::{GinLoopback, OwnMachine, RankMode, World, log};
use crate::error::{Error, Result, WorldError};
use crate::machine::{Machine, VARIABLE, variables};

/// Settings of a [`World`]: the machine, and environment variables that NCCL and the CUDA driver
/// read once. See [`World::builder`].
#[derive(Clone, Debug, Default)]
#[must_use = "a builder makes a world only by from_env, threads or spawn_local"]
pub struct WorldBuilder {
    gin_loopback: Option<GinLoopback>,
    checked: Option<bool>,
    /// What [`deadline`](Self::deadline) was called with, if it was.
    deadline: Option<Option<Duration>>,
    #[cfg(feature = "simulator")]
    simulation: Option<devcomm_sim::Simulation>,
}

impl WorldBuilder {
    /// Uses devcomm's NCCL plugin for GIN (network communication by kernels), without a network
    /// card. A simulated machine simulates its network, and uses only the LSA team size set here.
    pub fn gin_loopback(mut self, loopback: GinLoopback) -> Self {
        self.gin_loopback = Some(loopback);
        self
    }

    /// Sets whether the ranks compare each collective of NCCL before it starts: function, count,
    /// type, operator and root. If they differ, it starts on no rank, and all get
    /// [`WorldError::CallsDiffer`]; without the comparison NCCL hangs, or writes beyond the end of
    /// a buffer. Default: yes in debug builds. Ranks compare only if this is set on all of them.
    ///
    /// The operations of `devcomm::Collectives` and `devcomm::ExpertParallel` that kernels perform
    /// are compared too; other launches are not. Options of what ranks create together are compared
    /// in every world.
    ///
    /// With the comparison, a collective waits, on the host, until all ranks have called it.
    /// Captured collectives, sends and receives are not compared.
    ///
    /// ```
    /// use devcomm_host::{Buffer, Error, ReduceOp, Simulation, World, WorldError};
    ///
    /// let world = World::builder().checked(true).simulate(Simulation::new(2)).from_env()?;
    /// let failed = world.run(|rank| {
    ///     let (comm, stream) = (rank.communicator()?, rank.stream()?);
    ///     let count = 100 + rank.rank(); // not the same on all ranks
    ///     let part = comm.window::<f32>(200)?.slice(..count)?;
    ///     comm.all_reduce(&part, &part, ReduceOp::Sum, &stream)
    /// });
    /// assert!(matches!(failed, Err(Error::World(WorldError::CallsDiffer { .. }))));
    /// # Ok::<_, Error>(())
    /// ```
    pub fn checked(mut self, checked: bool) -> Self {
        self.checked = Some(checked);
        self
    }

    /// Sets how long a call may wait for the other ranks: [barriers](crate::Rank::barrier) and
    /// other exchanges on the host, and calls that create or end communicators, windows and device
    /// communicators. Then the job fails: every rank gets [`WorldError::RankLost`], which names a
    /// rank that has not come, and the rank and call that waited for it. A process that sends
    /// nothing for this time, or for 20 s, such as a stopped one, counts as lost too. `None`: no
    /// limit, also of silence, so that processes can be stopped in a debugger. Default:
    /// `DEVCOMM_OPERATION_TIMEOUT`, or else 10 minutes; on simulated GPUs none, since deadlocks are
    /// found there.
    ///
    /// Streams have no deadline but [`synchronize_within`](crate::Stream::synchronize_within), and
    /// a rank that has ended waits for the others as long as they run.
    ///
    /// ```no_run
    /// use std::time::Duration;
    ///
    /// let deadline = Some(Duration::from_secs(60));
    /// let world = devcomm_host::World::builder().deadline(deadline).from_env()?;
    /// # Ok::<_, devcomm_host::Error>(())
    /// ```
    pub fn deadline(mut self, deadline: Option<Duration>) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Runs the ranks on a simulated machine, as threads. DEVCOMM_SIMULATE is ignored.
    ///
    /// ```
    /// use devcomm_host::{Error, Simulation, World};
    ///
    /// let machine = Simulation::new(4).team_size(2).seed(7);
    /// let teams = World::builder().simulate(machine).from_env()?.run(|rank| {
    ///     Ok::<_, Error>(rank.communicator()?.properties()?.n_lsa_teams)
    /// })?;
    /// assert_eq!(teams, [2; 4]);
    /// # Ok::<_, Error>(())
    /// ```
    #[cfg(feature = "simulator")]
    pub fn simulate(mut self, simulation: devcomm_sim::Simulation) -> Self {
        self.simulation = Some(simulation);
        self
    }

    /// Does the same as [`World::from_env`].
    ///
    /// # Errors
    ///
    /// The errors are those of [`World::from_env`]; [`WorldError::GinLoopbackNotFound`],
    /// [`WorldError::EnvironmentInUse`], [`WorldError::Environment`].
    pub fn from_env(self) -> Result<World> {
        let (machine, launched) = (self.machine()?, launched(&|name| std::env::var_os(name))?);
        let world = match launched {
            None => World::of_threads(machine, None),
            Some(launched) if machine.is_simulated() => Err(no_processes(launched.variable)),
            Some(launched) => World::of_launcher(launched),
        };
        world.map(|world| self.set(world))
    }

    /// Does the same as [`World::threads`].
    ///
    /// # Errors
    ///
    /// The errors are those of [`World::threads`], and as [`from_env`](Self::from_env) for the
    /// settings.
    pub fn threads(self, n: usize) -> Result<World> {
        World::of_threads(self.machine()?, Some(n)).map(|world| self.set(world))
    }

    /// Returns the world with the settings that it reads itself.
    fn set(&self, world: World) -> World {
        let mut world = World { checked: self.checked.unwrap_or(world.checked), ..world };
        if self.owns_machine() {
            world.own =
                Some(Arc::new(OwnMachine { machine: world.machine.clone(), failed: false.into() }));
        }
        if let Some(deadline) = self.deadline {
            world.deadline = deadline;
            if let RankMode::Process { config, .. } = &mut world.mode {
                config.deadline = deadline;
            }
        }
        world
    }

    /// Does the same as [`World::spawn_local`]. The processes inherit the plugin's environment
    /// variables; the other settings each makes itself, by the builder of its own world.
    ///
    /// # Errors
    ///
    /// The errors are those of [`World::spawn_local`], and as [`from_env`](Self::from_env) for the
    /// settings.
    pub fn spawn_local(self, n: usize) -> Result<()> {
        if self.machine()?.is_simulated() {
            return Err(no_processes("World::spawn_local"));
        }
        World::start_processes(n)
    }

    /// Starts the log and returns the machine. With GPUs, sets the environment variables of the
    /// plugin.
    fn machine(&self) -> Result<Machine> {
        refuse_within_rank()?;
        log::start(&|name| std::env::var_os(name))?;
        variables::check(&|name| std::env::var_os(name))?;
        #[cfg(feature = "simulator")]
        if let Some(simulation) = &self.simulation {
            return Machine::simulate(simulation, self.lsa_team_size());
        }
        if let Some(machine) = Machine::from_env(self.lsa_team_size())? {
            return Ok(machine);
        }
        self.gin_loopback.as_ref().map_or(Ok(()), GinLoopback::enable)?;
        Ok(Machine::Gpus)
    }

    /// Returns whether the world makes its own simulated machine; that of the environment is the
    /// process's.
    fn owns_machine(&self) -> bool {
        #[cfg(feature = "simulator")]
        return self.simulation.is_some();
        #[cfg(not(feature = "simulator"))]
        false
    }

    fn lsa_team_size(&self) -> Option<usize> {
        self.gin_loopback.as_ref().and_then(GinLoopback::team_size)
    }
}

/// Returns the error of a simulated machine whose ranks would be processes because of `cause`.
fn no_processes(cause: &str) -> Error {
    let why = format!(
        "the ranks of a simulated machine are threads of one process, but with {cause} each is a \
         process; use only one of the two"
    );
    match std::env::var_os(VARIABLE) {
        None => Error::invalid(format!("a World that simulates its machine: {why}")),
        Some(value) => {
            let value = Some(value.to_string_lossy().into_owned());
            Error::World(WorldError::Environment { variable: VARIABLE, value, why })
        }
    }
}
