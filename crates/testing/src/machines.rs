//! Machines that programs run on, and what is said of them.

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

/// Runs a program in every rank of `world`, and prints `PASS`, once, when all of them are right.
pub fn run(
    world: Result<World, Error>,
    program: impl Fn(&Rank) -> anyhow::Result<()> + Sync,
) -> ExitCode {
    let ran = world.map_err(anyhow::Error::from).and_then(|world| {
        let roots = world.run(|rank| {
            program(rank)?;
            Ok::<_, anyhow::Error>(rank.is_root())
        })?;
        // After all ranks, and in one process.
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
                    "\nThis program works by load and store alone. `hybrid_allreduce` and \
                     `hybrid_alltoall` also go over the network, between the teams."
                }
                Some(error) if error.is_of_the_machine() => {
                    "\nDEVCOMM_SIMULATE=4 runs it on four simulated GPUs."
                }
                _ => "",
            };
            eprintln!("error: {error:#}{advice}");
            ExitCode::FAILURE
        }
    }
}

/// Asks for tests on this machine's GPUs, of all tests whose bodies run on both machines.
pub const TEST_GPUS: &str = "DEVCOMM_TEST_GPUS";

/// Runs `body` in every rank of `wanted` simulated GPUs or, with [`TEST_GPUS`] in the environment,
/// of this machine's, which all reach each other by load and store. See [`Gpus::run`].
///
/// # Panics
///
/// If `body` fails.
pub fn on_gpus(name: &str, wanted: usize, body: impl Fn(&Rank) -> Result<(), Error> + Sync) {
    Gpus::new(wanted).run(name, body);
}

/// Gives real GPUs some time to get to where they wait. Simulated ones need none.
pub fn give_time(rank: &Rank, time: Duration) {
    if !rank.is_simulated() {
        std::thread::sleep(time);
    }
}

/// GPUs that a test wants: simulated ones or, with [`TEST_GPUS`] in the environment, this
/// machine's.
#[derive(Clone)]
#[must_use = "GPUs do nothing until something is run on them"]
pub struct Gpus {
    simulation: Simulation,
    kernels: &'static KernelSet,
    gin: GinConnectionType,
    multimem: bool,
    host_rma: bool,
    /// What simulated ones lack for the test.
    unsimulated: Option<&'static str>,
}

/// As many as the simulated machine has. Its settings say nothing of real ones.
impl From<Simulation> for Gpus {
    fn from(simulation: Simulation) -> Self {
        Self {
            simulation,
            kernels: &KERNELS,
            gin: GinConnectionType::None,
            multimem: false,
            host_rma: false,
            unsimulated: None,
        }
    }
}

impl Gpus {
    /// So many that all reach each other by load and store.
    pub fn new(wanted: usize) -> Self {
        Simulation::new(wanted).into()
    }

    /// Those that run these kernels. Default: the shipped ones.
    pub fn with_kernels(mut self, kernels: &'static KernelSet) -> Self {
        self.kernels = kernels;
        self
    }

    /// Those whose kernels also reach each other over the network, in LSA teams of any size.
    pub fn with_gin(mut self, connection: GinConnectionType) -> Self {
        self.gin = connection;
        self
    }

    /// Those that have multicast addresses.
    pub fn with_multimem(mut self) -> Self {
        self.multimem = true;
        self
    }

    /// Those for which NCCL has one-sided operations of the host.
    pub fn with_host_rma(mut self) -> Self {
        self.host_rma = true;
        self
    }

    /// Real ones alone: simulated ones have no `what`.
    pub fn only_real(mut self, what: &'static str) -> Self {
        self.unsimulated = Some(what);
        self
    }

    /// Whether tests are run on this machine's GPUs.
    #[must_use]
    pub fn are_real() -> bool {
        std::env::var_os(TEST_GPUS).is_some_and(|value| !value.is_empty() && value != "0")
    }

    /// Runs `body` in every rank.
    ///
    /// On real GPUs it prints `GPU-TEST name: ran` for `cargo xtask test`, or
    /// `GPU-TEST name: skipped (reason)` where there are none that can run it.
    ///
    /// # Panics
    ///
    /// If `body` fails, or anything before it that the machine is not to blame for.
    pub fn run(&self, name: &str, body: impl Fn(&Rank) -> Result<(), Error> + Sync) {
        self.with_world(name, |world| {
            if let Err(error) = world.run(body) {
                panic!("{name}, {:?}: {error}", self.simulation);
            }
        });
    }

    /// As [`run`](Self::run), once for each seed: `body` makes random shapes of it, and a simulated
    /// machine of its own goes by it too. Real GPUs, whose order nobody chooses, run the first.
    ///
    /// # Panics
    ///
    /// As [`run`](Self::run).
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

    /// As [`run`](Self::run), with the world itself, of which each rank is a thread.
    ///
    /// # Panics
    ///
    /// If the machine is not to blame for there being no such world.
    pub fn with_world(&self, name: &str, body: impl FnOnce(&World)) {
        let skipped = match self.world() {
            Ok(Ok(world)) => {
                body(&world);
                None
            }
            Ok(Err(reason)) => Some(reason),
            Err(error) if Self::are_real() && error.is_of_the_machine() => Some(error.to_string()),
            Err(error) => panic!("{error}"),
        };
        let outcome = match skipped {
            None if Self::are_real() => "ran".to_owned(),
            None => return,
            Some(reason) => format!("skipped ({reason})"),
        };
        // Past the test harness, to whoever counts.
        let _ = writeln!(std::io::stdout(), "GPU-TEST {name}: {outcome}");
    }

    /// A world of them, or why there is none that can do what tests rest on.
    fn world(&self) -> Result<Result<World, String>, Error> {
        let wanted = self.simulation.gpus();
        if !Self::are_real() {
            if let Some(what) = self.unsimulated {
                return Ok(Err(format!("simulated GPUs have no {what}")));
            }
            return World::builder().simulate(self.simulation.clone()).threads(wanted).map(Ok);
        }
        let world = World::threads(wanted)?;
        Ok(self.missing(&world)?.map_or(Ok(world), Err))
    }

    /// What real GPUs lack, found out once for all tests that want the same.
    fn missing(&self, world: &World) -> Result<Option<String>, Error> {
        static KNOWN: Mutex<BTreeMap<String, Option<String>>> = Mutex::new(BTreeMap::new());
        let Self { kernels, gin, multimem, host_rma, .. } = self;
        let kernels: *const KernelSet = *kernels;
        let wanted = format!("{} {kernels:p} {gin:?} {multimem} {host_rma}", world.n_ranks());
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(missing) = known.get(&wanted) {
            return Ok(missing.clone());
        }
        let missing = match world.run(|rank| self.probe(rank)) {
            Ok(found) if found.contains(&false) => {
                Some("NCCL has no one-sided operations here".to_owned())
            }
            Ok(_) => None,
            Err(error) if error.is_of_the_machine() => Some(error.to_string()),
            Err(error) => return Err(error),
        };
        known.insert(wanted, missing.clone());
        Ok(missing)
    }

    /// Does, in little, what every test rests on; whether there is what was asked for besides.
    fn probe(&self, rank: &Rank) -> Result<bool, Error> {
        rank.load(self.kernels)?;
        let comm = rank.communicator()?;
        if self.gin == GinConnectionType::None {
            comm.require_single_lsa_team()?;
        }
        let requirements = DevCommRequirements::new().lsa_barriers(1).gin_connection(self.gin);
        comm.create_dev_comm(requirements.lsa_multimem(self.multimem))?;
        comm.window::<u32>(1)?;
        Ok(!self.host_rma || comm.properties()?.host_rma)
    }
}
