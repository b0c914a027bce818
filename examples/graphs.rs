//! CUDA graphs: a sequence of collectives and kernels, captured once and launched many times.
//!
//! ```text
//! cargo xtask run graphs  # every GPU of this machine
//! torchrun --no-python --nproc-per-node 4 -- ./graphs
//! ```

use std::process::ExitCode;

use anyhow::{Result, ensure};
use devcomm::{DevCommRequirements, Error, KERNELS, Rank, StateError, World, kernels};
use devcomm_testing::machines::run;

const COUNT: usize = 4096;
const BLOCKS: u32 = 4;
/// Captured steps in a graph, and launches of the graph.
const STEPS: usize = 10;
const LAUNCHES: usize = 10;

fn main() -> ExitCode {
    run(World::from_env(), run_rank)
}

fn run_rank(rank: &Rank) -> Result<()> {
    let (comm, stream, n) = (rank.communicator()?, rank.stream()?, rank.n_ranks());
    comm.require_single_lsa_team()?;
    rank.load(&KERNELS)?;
    let dev_comm = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(BLOCKS))?;
    let (a, b) = (comm.window::<f32>(COUNT)?, comm.window::<f32>(COUNT)?);
    // NCCL's premul-sum operator. The second sum of a step adds `n` equal first sums, so that with
    // this factor the result is the average.
    let scale = comm.pre_mul_sum(1.0 / (n * n) as f32)?;

    // One step: devcomm's kernel sums `a` to `b`, NCCL sums `b` to `a` and scales.
    let step = || {
        let sum = kernels::lsa_allreduce::args(&dev_comm, &a, &b, COUNT);
        sum.grid(BLOCKS).block(128).launch(&stream)?;
        comm.all_reduce(&b, &a, &scale, &stream)
    };

    // The closure's work is captured instead of run. Every rank captures the same operations.
    let graph = stream.capture(|| (0..STEPS).try_for_each(|_| step()))?;
    // A graph contains only GPU work: host operations fail during a capture.
    let refused = stream.capture(|| comm.mem_alloc::<f32>(1).map(drop));
    ensure!(matches!(refused, Err(Error::State(StateError::Capturing { .. }))), "{refused:?}");

    a.copy_from_host(&[(rank.rank() + 1) as f32; COUNT])?;
    for _ in 0..LAUNCHES {
        graph.launch(&stream)?;
    }
    let mut averages = vec![0.0; COUNT];
    stream.copy_to_host(&a, &mut averages)?;
    let expected = (n + 1) as f32 / 2.0;
    let wrong = averages.iter().filter(|&&x| (x - expected).abs() > 1e-3 * expected).count();
    ensure!(wrong == 0, "{wrong} averages are not {expected}, but {}", averages[0]);
    if rank.is_root() {
        println!("{LAUNCHES} launches of a graph of {} operations", graph.len());
    }
    // Frees the graph, as dropping it or closing its communicator does.
    graph.close()?;
    Ok(())
}
