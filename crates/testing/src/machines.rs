//! Selects GPUs or simulated GPUs for programs and tests, and reports what ran.

use std::collections::BTreeMap;
use std::io::Write;
use std::ops::Range;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use devcomm::{
    DevCommError, DevCommRequirements, Error, GinConnectionType, KERNELS, KernelSet, Rank,
    Simulation, World,
};

/// Runs a program on every rank of `world`, and prints `PASS` once if all succeed.
pub fn run(
    world: Result<World, Error>,
    program: impl Fn(&Rank) -> anyhow::Result<()> + Sync,
) -> ExitCode {
    let ran = world.map_err(anyhow::Error::from).and_then(|world| {
        let roots = world.run(|rank| {
            program(rank)?;
            Ok::<_, anyhow::Error>(rank.is_root())
        })?;
        // Printed once, by the process of the root rank.
        match (roots.contains(&true), world.is_simulated()) {
            (false, _) => {}
            (true, false) => println!("PASS"),
            (true, true) => println!("PASS, SIMULATED"),
        }
        Ok(())
    });
    match ran {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let advice = match error.downcast_ref::<Error>() {
                Some(Error::DevComm(DevCommError::SeveralLsaTeams { .. })) => {
                    "\nThis program accesses peers by load and store. `hybrid_allreduce` and \
                     `hybrid_alltoall` also use the network, between the teams."
                }
                Some(error) if error.is_hardware() => {
                    "\nDEVCOMM_SIMULATE=4 runs it on four simulated GPUs."
                }
                _ => "",
            };
            eprintln!("error: {error:#}{advice}");
            ExitCode::FAILURE
        }
    }
}

/// Environment variable that makes tests run on this system's GPUs instead of simulated ones.
pub const TEST_GPUS: &str = "DEVCOMM_TEST_GPUS";

/// Runs `body` on every rank of `wanted` simulated GPUs or, with [`TEST_GPUS`] in the environment,
/// of this system's GPUs, if they are in one LSA team. See [`Gpus::run`].
///
/// # Panics
///
/// If `body` fails.
pub fn on_gpus(name: &str, wanted: usize, body: impl Fn(&Rank) -> Result<(), Error> + Sync) {
    Gpus::new(wanted).run(name, body);
}

/// Gives kernels on GPUs `time` to reach their wait; simulated GPUs need no time.
pub fn give_time(rank: &Rank, time: Duration) {
    if !rank.is_simulated() {
        std::thread::sleep(time);
    }
}

/// The GPUs of a test: simulated ones or, with [`TEST_GPUS`] in the environment, this system's.
#[derive(Clone)]
#[must_use = "GPUs do nothing until something is run on them"]
pub struct Gpus {
    simulation: Simulation,
    kernels: &'static KernelSet,
    gin: GinConnectionType,
    several_teams: bool,
    multimem: bool,
    host_rma: bool,
    checked: bool,
    /// A feature that the test needs and simulated GPUs lack.
    unsimulated: Option<&'static str>,
}

/// Requires the simulation's number of GPUs; its other settings do not apply to real GPUs.
impl From<Simulation> for Gpus {
    fn from(simulation: Simulation) -> Self {
        Self {
            simulation,
            kernels: &KERNELS,
            gin: GinConnectionType::None,
            several_teams: false,
            multimem: false,
            host_rma: false,
            checked: true,
            unsimulated: None,
        }
    }
}

impl Gpus {
    /// Returns `wanted` GPUs in one LSA team.
    pub fn new(wanted: usize) -> Self {
        Simulation::new(wanted).into()
    }

    /// Requires that these kernels load. Default: the shipped ones.
    pub fn with_kernels(mut self, kernels: &'static KernelSet) -> Self {
        self.kernels = kernels;
        self
    }

    /// Requires GIN with this connection type; LSA teams may have any size.
    pub fn with_gin(mut self, connection: GinConnectionType) -> Self {
        self.gin = connection;
        self
    }

    /// Requires several LSA teams, and GIN between them: on real GPUs of one team
    /// `NCCL_LSA_TEAM_SIZE` makes them.
    pub fn with_several_teams(mut self) -> Self {
        self.several_teams = true;
        self.with_gin(GinConnectionType::Rail)
    }

    /// Requires multicast.
    pub fn with_multimem(mut self) -> Self {
        self.multimem = true;
        self
    }

    /// Requires NCCL's host one-sided operations.
    pub fn with_host_rma(mut self) -> Self {
        self.host_rma = true;
        self
    }

    /// Turns off the check that ranks call the same collectives: a rank of the test omits one.
    pub fn unchecked(mut self) -> Self {
        self.checked = false;
        self
    }

    /// Requires real GPUs, since simulated ones lack `what`.
    pub fn only_real(mut self, what: &'static str) -> Self {
        self.unsimulated = Some(what);
        self
    }

    /// Returns whether tests run on this system's GPUs.
    #[must_use]
    pub fn are_real() -> bool {
        std::env::var_os(TEST_GPUS).is_some_and(|value| !value.is_empty() && value != "0")
    }

    /// Runs `body` on every rank.
    ///
    /// On GPUs it prints `GPU-TEST name: ran` for `cargo xtask test`, or
    /// `GPU-TEST name: skipped (reason)` if none are suitable.
    ///
    /// # Panics
    ///
    /// If `body` fails, or its setup for another reason than missing hardware.
    pub fn run(&self, name: &str, body: impl Fn(&Rank) -> Result<(), Error> + Sync) {
        self.with_world(name, |world| {
            if let Err(error) = world.run(body) {
                panic!("{name}, {:?}: {error}", self.simulation);
            }
        });
    }

    /// Does the same as [`run`](Self::run), once per seed: `body` derives random shapes from it,
    /// and a simulated machine schedules threads by it. Real GPUs run the first seed only.
    ///
    /// # Panics
    ///
    /// It panics as [`run`](Self::run).
    pub fn run_seeds(
        &self,
        name: &str,
        seeds: Range<u64>,
        body: impl Fn(&Rank, u64) -> Result<(), Error> + Sync,
    ) {
        for seed in seeds.take(if Self::are_real() { 1 } else { usize::MAX }) {
            let gpus = Self { simulation: self.simulation.clone().seed(seed), ..self.clone() };
            gpus.run(name, |rank| body(rank, seed));
        }
    }

    /// Does the same as [`with_world`](Self::with_world), but only where ranks are threads.
    ///
    /// # Panics
    ///
    /// It panics as [`with_world`](Self::with_world).
    pub fn with_threads(&self, name: &str, body: impl FnOnce(&World)) {
        if !Self::are_real() || !World::is_launched() {
            return self.with_world(name, body);
        }
        report(name, "skipped (ranks are processes)");
    }

    /// Calls `body` with the number of ranks, for a test that starts jobs of processes, which may
    /// share a GPU.
    ///
    /// # Panics
    ///
    /// It panics as [`with_world`](Self::with_world).
    pub fn with_jobs(&self, name: &str, body: impl FnOnce(usize)) {
        let wanted = self.simulation.gpus();
        // Jobs whose processes share GPUs are not probed for a network: a test that needs one goes
        // on to `with_threads`, which skips it where GPUs are missing.
        let needs_network = self.gin != GinConnectionType::None;
        let too_few = || devcomm::visible_gpus().is_ok_and(|n| n < wanted);
        if Self::are_real() && World::may_share_gpus() && !needs_network && too_few() {
            body(wanted);
            return report(name, "ran");
        }
        self.with_threads(name, |world| body(world.n_ranks()));
    }

    /// Does the same as [`run`](Self::run), but calls `body` once in this process, with the world.
    /// Its ranks are threads or, if a launcher started this test on GPUs, processes.
    ///
    /// # Panics
    ///
    /// If the world cannot be created for another reason than missing hardware.
    pub fn with_world(&self, name: &str, body: impl FnOnce(&World)) {
        let skipped = match self.world() {
            Ok(Ok(world)) => {
                body(&world);
                None
            }
            Ok(Err(reason)) => Some(reason),
            Err(error) if Self::are_real() && error.is_hardware() => Some(error.to_string()),
            Err(error) => panic!("{error}"),
        };
        match skipped {
            None if Self::are_real() => report(name, "ran"),
            None => {}
            Some(reason) => report(name, &format!("skipped ({reason})")),
        }
    }

    /// Returns a world of these GPUs, or why none is suitable.
    fn world(&self) -> Result<Result<World, String>, Error> {
        let (wanted, builder) = (self.simulation.gpus(), World::builder().checked(self.checked));
        if !Self::are_real() {
            if let Some(what) = self.unsimulated {
                return Ok(Err(format!("simulated GPUs have no {what}")));
            }
            let builder = builder.simulate(self.simulation.clone());
            return builder.threads(wanted).map(Ok);
        }
        let world =
            if World::is_launched() { builder.from_env()? } else { builder.threads(wanted)? };
        if world.n_ranks() != wanted {
            return Ok(Err(format!("a job of {wanted} processes runs it")));
        }
        Ok(self.missing(&world)?.map_or(Ok(world), Err))
    }

    /// Returns what real GPUs lack, probed once for all tests with the same requirements.
    fn missing(&self, world: &World) -> Result<Option<String>, Error> {
        static KNOWN: Mutex<BTreeMap<String, Option<String>>> = Mutex::new(BTreeMap::new());
        let Self { kernels, gin, several_teams, multimem, host_rma, .. } = self;
        let kernels: *const KernelSet = *kernels;
        let wanted = format!(
            "{} {kernels:p} {gin:?} {several_teams} {multimem} {host_rma}",
            world.n_ranks()
        );
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(missing) = known.get(&wanted) {
            return Ok(missing.clone());
        }
        let missing = match world.run(|rank| self.probe(rank)) {
            Ok(found) => found.into_iter().flatten().next().map(str::to_owned),
            Err(error) if error.is_hardware() => Some(error.to_string()),
            Err(error) => return Err(error),
        };
        known.insert(wanted, missing.clone());
        Ok(missing)
    }

    /// Probes what every test relies on, and the additional requirements; returns what is missing.
    fn probe(&self, rank: &Rank) -> Result<Option<&'static str>, Error> {
        rank.load(self.kernels)?;
        let comm = rank.communicator()?;
        if self.gin == GinConnectionType::None {
            comm.require_single_lsa_team()?;
        }
        let requirements = DevCommRequirements::new().lsa_barriers(1).gin_connection(self.gin);
        drop(comm.create_dev_comm(requirements.lsa_multimem(self.multimem))?);
        drop(comm.window::<u32>(1)?);
        let properties = comm.properties()?;
        if self.host_rma && !properties.host_rma {
            return Ok(Some("NCCL has no one-sided operations here"));
        }
        let is_one = self.several_teams && properties.n_lsa_teams < 2;
        Ok(is_one.then_some("one LSA team; NCCL_LSA_TEAM_SIZE=1 makes several"))
    }
}

/// Reports what became of a test on GPUs.
fn report(name: &str, outcome: &str) {
    // Written to standard output, as the test harness would capture `println!`.
    let _ = writeln!(std::io::stdout(), "GPU-TEST {name}: {outcome}");
}
