//! Worlds of real or simulated ranks that run test kernels.

use std::time::Duration;

use devcomm::{Error, GinConnectionType, Rank, Simulation, World};
use devcomm_testing::machines::Gpus;

use crate::KERNELS;
use crate::job::{Job, Setup, TestKernel};

/// The time limit of a kernel. After it, the error says what the kernel's blocks wait for.
const LIMIT: Duration = Duration::from_secs(30);

/// A world, and the size of its LSA teams.
pub struct TestWorld<'a> {
    world: &'a World,
    /// The simulation, for error messages.
    simulation: &'a Simulation,
    lsa_size: usize,
}

/// Returns GPUs that run the test kernels, with these GIN connections.
pub fn gpus(simulation: Simulation, gin: GinConnectionType) -> Gpus {
    Gpus::from(simulation).with_kernels(&KERNELS).with_gin(gin)
}

/// Runs a test case on 2 and on 4 GPUs. Without GPUs it runs in simulations with `seeds` seeds,
/// which take the `worlds` (numbers of GPUs and sizes of LSA teams) in turn, and for some seeds
/// also with a possible thread switch at every access.
pub fn in_worlds(
    name: &str,
    worlds: &[(usize, usize)],
    seeds: u64,
    gpus: impl Fn(Simulation) -> Gpus,
    case: impl Fn(&TestWorld),
) {
    let run = |name: &str, simulation: Simulation| {
        let gpus = gpus(simulation.clone());
        gpus.with_world(name, |world| case(&TestWorld::new(world, &simulation)));
    };
    if Gpus::are_real() {
        return [2, 4].iter().for_each(|&n| run(&format!("{name} on {n}"), Simulation::new(n)));
    }
    for (seed, (n, team)) in (0..seeds).zip(worlds.iter().cycle()) {
        run(name, Simulation::new(*n).team_size(*team).seed(seed));
    }
    for seed in 0..seeds.div_ceil(16) {
        run(name, Simulation::new(4).team_size(2).seed(seed).preempt(true));
    }
}

impl<'a> TestWorld<'a> {
    /// Determines the sizes of a world.
    ///
    /// # Panics
    ///
    /// If creating a communicator fails.
    pub fn new(world: &'a World, simulation: &'a Simulation) -> Self {
        if world.is_simulated() {
            return Self { world, simulation, lsa_size: simulation.team() };
        }
        let size = |rank: &Rank| Ok::<_, Error>(rank.communicator()?.properties()?.lsa_size());
        let sizes = world.run(size).unwrap_or_else(|error| panic!("{error}"));
        Self { world, simulation, lsa_size: sizes[0] }
    }

    /// Returns the number of ranks.
    pub fn n_ranks(&self) -> usize {
        self.world.n_ranks()
    }

    /// Returns the number of ranks in an LSA team.
    pub fn lsa_size(&self) -> usize {
        self.lsa_size
    }

    /// Returns how often to launch a kernel that may fail only sometimes. On simulated GPUs, the
    /// seeds vary the order of threads instead.
    pub fn launches(&self) -> usize {
        if self.world.is_simulated() { 2 } else { 100 }
    }

    /// Launches a kernel in every rank with one device communicator, once for each parameter of
    /// `ns`, each time after the previous launch has ended in every rank. Returns each rank's
    /// second window after the last launch.
    ///
    /// # Panics
    ///
    /// If anything fails.
    pub fn run<K: TestKernel>(&self, setup: &Setup, ns: &[u32]) -> Vec<Vec<u64>> {
        self.run_two::<K, K>(setup, &[], ns)
    }

    /// Does the same as [`run`](Self::run), after launches of another kernel with the same device
    /// communicator and the parameters `before`.
    ///
    /// # Panics
    ///
    /// If anything fails.
    pub fn run_two<P: TestKernel, K: TestKernel>(
        &self,
        setup: &Setup,
        before: &[u32],
        ns: &[u32],
    ) -> Vec<Vec<u64>> {
        self.run_each_after::<P, K>(setup, before, ns).pop().expect("at least one launch")
    }

    /// Does the same as [`run`](Self::run), but returns the second windows after each launch.
    ///
    /// # Panics
    ///
    /// If anything fails.
    pub fn run_each<K: TestKernel>(&self, setup: &Setup, ns: &[u32]) -> Vec<Vec<Vec<u64>>> {
        self.run_each_after::<K, K>(setup, &[], ns)
    }

    /// Does the same as [`run_each`](Self::run_each), with [`launches`](Self::launches) launches
    /// with the same parameter.
    ///
    /// # Panics
    ///
    /// If anything fails.
    pub fn run_often<K: TestKernel>(&self, setup: &Setup, n: u32) -> Vec<Vec<Vec<u64>>> {
        self.run_each::<K>(setup, &vec![n; self.launches()])
    }

    fn run_each_after<P: TestKernel, K: TestKernel>(
        &self,
        setup: &Setup,
        before: &[u32],
        ns: &[u32],
    ) -> Vec<Vec<Vec<u64>>> {
        // For each launch, what every rank has found.
        let run = |rank: &Rank| -> Result<Vec<Vec<Vec<u64>>>, Error> {
            let job = Job::new(rank, setup)?;
            rank.barrier()?;
            for &n in before {
                job.launch::<P>(setup, n)?;
                job.stream().synchronize_within(LIMIT)?;
                rank.barrier()?;
            }
            let one = |&n: &u32| {
                job.launch::<K>(setup, n)?;
                job.stream().synchronize_within(LIMIT)?;
                rank.all_gather(&job.out()?)
            };
            ns.iter().map(one).collect()
        };
        let found = self.world.run(run);
        let mut found = found.unwrap_or_else(|error| panic!("{:?}: {error}", self.simulation));
        // All ranks have the same.
        found.swap_remove(0)
    }
}
