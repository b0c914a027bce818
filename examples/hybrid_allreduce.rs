//! All-reduce by a kernel, of GPUs that do not all reach each other by load and store: within each team of them by load and store,
//! between the teams over the network.
//!
//! ```text
//! cargo xtask run hybrid_allreduce                          # every GPU of this machine, or the simulator where there is none
//! NCCL_LSA_TEAM_SIZE=2 cargo xtask run hybrid_allreduce     # teams of two, whatever else load and store would reach
//! cargo xtask run hybrid_allreduce --sim 6 --team 3         # two simulated teams of three
//! torchrun --no-python --nproc-per-node 4 -- ./target/release/hybrid_allreduce
//! ```
//!
//! The kernel is `kernels/src/hybrid_allreduce.rs`. Sizes, grids and blocks are random, in f32, f16 and bf16, into another window or in
//! place. Every element is compared with a sum in f64, and the ranks' bits with each other's; the output ends with `PASS` when all are
//! right.

#[path = "lsa_allreduce/check.rs"]
mod check;
pub mod gin;

use std::iter::repeat_n;
use std::process::ExitCode;

use anyhow::{Result, ensure};
use check::{Number, checksum, count_wrong, inputs};
use devcomm::sim::{self, DevCommConfig};
use devcomm::{
    DevCommRequirements, DevCommResource, GinConnectionType, HostKernel, KERNELS, Kernel,
    LaunchConfig, Rank, device, kernels,
};
use gin::{Options, Random, finish, simulator};
use half::{bf16, f16};

/// Blocks at most: as many barriers and signals are needed.
const BLOCKS: u32 = 8;
/// Each with signals of its own; fewer than blocks, so that some share one.
const CONTEXTS: u32 = 5;
/// Elements at most, and where they are simulated.
const LARGEST: usize = 1 << 20;
const LARGEST_SIMULATED: usize = 1 << 11;
/// Launches with one device communicator in the simulator: signals and barriers go on from one to the next.
const LAUNCHES: usize = 3;

type Args<T> = (device::DevComm, device::Window<T>, device::Window<T>, device::Window<T>, usize);

fn main() -> ExitCode {
    let about = "All-reduce by load and store within teams of GPUs, over the network between them";
    gin::run(about, run_rank, simulate)
}

/// A random launch.
#[derive(Debug)]
struct Shape {
    count: usize,
    blocks: u32,
    threads: u32,
    in_place: bool,
    seed: u64,
}

impl Shape {
    fn random(options: &Options, i: usize, largest: usize, threads: usize) -> Self {
        let mut random = Random::new(options.seed, i);
        Self {
            count: random.size(largest),
            blocks: random.up_to(BLOCKS as usize) as u32,
            threads: random.up_to(threads) as u32,
            in_place: random.up_to(2) == 1,
            seed: random.number(),
        }
    }

    /// Fails unless `rank` has the sums, and nothing of `behind` was written.
    fn check<T: Number>(&self, rank: usize, n_ranks: usize, got: &[T], behind: T) -> Result<u64> {
        let (sums, rest) = got.split_at(self.count);
        // Partial sums are rounded too.
        let roundings = if size_of::<T>() < size_of::<f32>() { 2 } else { 1 };
        let wrong = count_wrong(self.seed, n_ranks, roundings, sums);
        let touched = rest.iter().filter(|x| x.bits() != behind.bits()).count();
        ensure!(
            wrong + touched == 0,
            "rank {rank}, {}, {self:?}: {wrong} elements are wrong, {touched} behind them were written",
            T::NAME
        );
        Ok(checksum(sums))
    }
}

/// The kernel on this rank's GPU.
pub fn run_rank(rank: &Rank, options: &Options) -> Result<()> {
    gin::print_teams(rank)?;
    let requirements = DevCommRequirements::new()
        .gin_connection(GinConnectionType::Rail)
        .gin_contexts(CONTEXTS)
        .gin_signals(BLOCKS)
        .barriers(BLOCKS);
    let dev_comm = rank.communicator()?.create_dev_comm(requirements)?;
    on_gpu(kernels::hybrid_allreduce::<f32>, rank, &dev_comm, options)?;
    on_gpu(kernels::hybrid_allreduce::<f16>, rank, &dev_comm, options)?;
    on_gpu(kernels::hybrid_allreduce::<bf16>, rank, &dev_comm, options)
}

fn on_gpu<T: Number, K: Kernel<Args = Args<T>>>(
    kernel: K,
    rank: &Rank,
    dev_comm: &DevCommResource,
    options: &Options,
) -> Result<()> {
    let (comm, me, n_ranks) = (rank.communicator()?, rank.rank(), rank.n_ranks());
    let properties = comm.properties()?;
    let (team, teams) = (properties.lsa_size(), properties.n_lsa_teams);
    let (compiled, stream) = (rank.load(&KERNELS)?, rank.stream()?);
    let (send, out) = (comm.window::<T>(LARGEST)?, comm.window::<T>(LARGEST)?);
    let partial = comm.window::<T>(kernels::hybrid_allreduce_partials(LARGEST, team, teams))?;
    let behind = T::nearest(7.0);
    let untouched: Vec<T> = repeat_n(behind, LARGEST).collect();
    let mut got = untouched.clone();
    for i in 0..options.iterations {
        let shape = Shape::random(options, i, LARGEST, 512);
        let recv = if shape.in_place { &send } else { &out };
        recv.copy_from_host(&untouched)?;
        send.copy_from_host(&inputs::<T>(shape.seed, me, shape.count))?;
        // Peers write this rank's window as soon as they begin.
        rank.barrier()?;
        let args = (dev_comm, &send, recv, &partial, shape.count);
        let config = LaunchConfig::new(shape.blocks, shape.threads);
        // SAFETY: the windows have room for `LARGEST` elements and their partial sums, and live until the ranks have met below;
        // nobody touches them until then.
        unsafe { compiled.launch(&stream, kernel, config, args)? };
        finish(&stream)?;
        rank.barrier()?;
        recv.copy_to_host(&mut got)?;
        let sum = shape.check(me, n_ranks, &got, behind)?;
        let sums = rank.all_gather(&sum.to_le_bytes())?;
        ensure!(sums.iter().all(|other| *other == sums[0]), "{shape:?}: the ranks' results differ");
    }
    if rank.is_root() {
        println!("{n_ranks} ranks, {:4} x {} shapes: 0 wrong", T::NAME, options.iterations);
    }
    Ok(())
}

/// The kernel on simulated GPUs, in another order of threads and deliveries each time.
pub fn simulate(ranks: usize, team: usize, options: &Options) -> Result<()> {
    simulated(kernels::hybrid_allreduce::<f32>, ranks, team, options)?;
    simulated(kernels::hybrid_allreduce::<f16>, ranks, team, options)?;
    simulated(kernels::hybrid_allreduce::<bf16>, ranks, team, options)
}

fn simulated<T: Number, K: HostKernel<Args = Args<T>>>(
    kernel: K,
    ranks: usize,
    team: usize,
    options: &Options,
) -> Result<()> {
    for first in (0..options.iterations).step_by(LAUNCHES) {
        let sim = simulator(options, ranks, team, first)?;
        let partials = kernels::hybrid_allreduce_partials(LARGEST_SIMULATED, team, ranks / team);
        let window = |len| sim.window::<T>(len);
        let (send, out) = (window(LARGEST_SIMULATED)?, window(LARGEST_SIMULATED)?);
        let (partial, behind) = (window(partials)?, T::nearest(7.0));
        let untouched: Vec<T> = repeat_n(behind, LARGEST_SIMULATED).collect();
        let comm = sim.dev_comm(DevCommConfig {
            gin_connection: GinConnectionType::Rail,
            gin_contexts: CONTEXTS,
            gin_signals: BLOCKS,
            barriers: BLOCKS,
            ..DevCommConfig::default()
        })?;
        for i in first..options.iterations.min(first + LAUNCHES) {
            let shape = Shape::random(options, i, LARGEST_SIMULATED, 72);
            let recv = if shape.in_place { &send } else { &out };
            for rank in 0..ranks {
                recv.write(rank, &untouched)?;
                send.write(rank, &inputs::<T>(shape.seed, rank, shape.count))?;
            }
            let config = sim::LaunchConfig::new(shape.blocks, shape.threads);
            // SAFETY: the windows have room for as many elements and their partial sums, and nothing else uses them.
            unsafe {
                sim.launch(kernel, config, |rank| {
                    let (send, recv) = (send.rank(rank), recv.rank(rank));
                    (comm.rank(rank), send, recv, partial.rank(rank), shape.count)
                })
            }?;
            let check = |rank| shape.check(rank, ranks, &recv.read(rank), behind);
            let sums = (0..ranks).map(check).collect::<Result<Vec<_>>>()?;
            ensure!(sums.iter().all(|sum| *sum == sums[0]), "{shape:?}: the ranks' results differ");
        }
    }
    println!(
        "{ranks} ranks in teams of {team}, {:4} x {} shapes: 0 wrong",
        T::NAME,
        options.iterations
    );
    Ok(())
}
