//! Machines that programs run on, and what is said of them.

use std::ops::Range;
use std::process::ExitCode;

use devcomm::{
    DevCommRequirements, Error, GinConnectionType, KERNELS, KernelSet, Rank, Simulation, World,
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
                Some(Error::SeveralLsaTeams { .. }) => {
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

/// Asks for tests on this machine's GPUs: those that run on both are on simulated ones without it.
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

/// As [`on_gpus`], with the world itself: a rank is a thread.
///
/// # Panics
///
/// If the machine is not to blame for there being no such world.
pub fn with_gpus(name: &str, wanted: usize, body: impl FnOnce(&World)) {
    Gpus::new(wanted).with_world(name, body);
}

/// GPUs that a test wants: simulated ones or, with [`TEST_GPUS`] in the environment, this machine's.
#[derive(Clone)]
#[must_use = "GPUs do nothing until something is run on them"]
pub struct Gpus {
    simulation: Simulation,
    gin: GinConnectionType,
    kernels: &'static KernelSet,
}

/// As many as the simulated machine has. Its settings say nothing of real ones.
impl From<Simulation> for Gpus {
    fn from(simulation: Simulation) -> Self {
        Self { simulation, gin: GinConnectionType::None, kernels: &KERNELS }
    }
}

impl Gpus {
    /// So many that all reach each other by load and store.
    pub fn new(wanted: usize) -> Self {
        Simulation::new(wanted).into()
    }

    /// Those whose kernels also reach each other over the network, in LSA teams of any size.
    pub fn with_gin(mut self, connection: GinConnectionType) -> Self {
        self.gin = connection;
        self
    }

    /// Those that run these kernels. Default: the shipped ones.
    pub fn with_kernels(mut self, kernels: &'static KernelSet) -> Self {
        self.kernels = kernels;
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
        self.with_world(name, |world| require(world.run(&body)));
    }

    /// As [`run`](Self::run), with each of the seeds: `body` makes random shapes of it, and each has
    /// a simulated machine of its own, which goes by the seed as well.
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
        if Self::are_real() {
            return self.run(name, |rank| seeds.clone().try_for_each(|seed| body(rank, seed)));
        }
        for seed in seeds {
            let gpus = Self { simulation: self.simulation.clone().seed(seed), ..self.clone() };
            let world = gpus.world().unwrap_or_else(|error| panic!("{error}"));
            if let Err(error) = world.run(|rank| body(rank, seed)) {
                panic!("{name}, {:?}: {error}", gpus.simulation);
            }
        }
    }

    /// As [`run`](Self::run), with the world itself.
    ///
    /// # Panics
    ///
    /// If the machine is not to blame for there being no such world.
    pub fn with_world(&self, name: &str, body: impl FnOnce(&World)) {
        match self.world() {
            Ok(world) => {
                body(&world);
                if Self::are_real() {
                    println!("GPU-TEST {name}: ran");
                }
            }
            Err(error) if Self::are_real() && error.is_of_the_machine() => {
                println!("GPU-TEST {name}: skipped ({error})");
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// A world of them, if they can do what tests rest on.
    ///
    /// # Errors
    ///
    /// What is missing, on real GPUs: tests skip what [`Error::is_of_the_machine`].
    pub fn world(&self) -> Result<World, Error> {
        let wanted = self.simulation.gpus();
        if !Self::are_real() {
            return World::builder().simulate(self.simulation.clone()).threads(wanted);
        }
        let world = World::threads(wanted)?;
        world.run(|rank| self.probe(rank))?;
        Ok(world)
    }

    /// Does, in little, what every test rests on.
    fn probe(&self, rank: &Rank) -> Result<(), Error> {
        rank.load(self.kernels)?;
        let comm = rank.communicator()?;
        if self.gin == GinConnectionType::None {
            comm.require_single_lsa_team()?;
        }
        let requirements = DevCommRequirements::new().lsa_barriers(1).gin_connection(self.gin);
        comm.create_dev_comm(requirements)?;
        comm.window::<u32>(1)?;
        Ok(())
    }
}

fn require<T>(result: Result<T, Error>) {
    if let Err(error) = result {
        panic!("{error}");
    }
}
