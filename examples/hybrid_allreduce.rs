//! All-reduce by a kernel over GPUs in several LSA teams: by load and store within each team, over
//! the network (GIN) between the teams.
//!
//! ```text
//! cargo xtask run hybrid_allreduce                            # every GPU, or four simulated ones
//! NCCL_LSA_TEAM_SIZE=2 cargo xtask run hybrid_allreduce       # teams of two
//! DEVCOMM_SIMULATE=6,team=3 cargo xtask run hybrid_allreduce  # two simulated teams of three
//! torchrun --no-python --nproc-per-node 4 -- ./hybrid_allreduce
//! ```
//!
//! The kernel is `examples/kernels/src/hybrid_allreduce.rs`. Every element is compared with a sum
//! in f64, and all ranks must have the same bits.

use std::process::ExitCode;

use anyhow::{Result, ensure};
use devcomm::{DevCommRequirements, GinConnectionType, GinLoopback, Rank, World};
use devcomm_examples::{KERNELS, kernels};
use devcomm_testing::machines::run;
use devcomm_testing::numbers::{checksum, count_wrong, inputs};

/// Each block has its own signal. There are fewer GIN contexts, so that some blocks share one.
const BLOCKS: u32 = 8;
const CONTEXTS: u32 = 5;
const THREADS: u32 = 128;
/// Elements: powers of two, and numbers that fill neither slices nor vectors.
const COUNTS: [usize; 6] = [1, 7, 64, 1001, 4096, 65_537];

fn main() -> ExitCode {
    // This sets NCCL's environment variables, so it must precede other uses of a GPU or NCCL.
    let world = World::builder().gin_loopback(GinLoopback::unless_rdma()).from_env();
    run(world, all_reduces)
}

fn all_reduces(rank: &Rank) -> Result<()> {
    let (comm, me, n_ranks) = (rank.communicator()?, rank.rank(), rank.n_ranks());
    let properties = comm.properties()?;
    let (teams, team) = (properties.n_lsa_teams, properties.lsa_size());
    if rank.is_root() {
        println!("{n_ranks} ranks: {teams} LSA teams of {team}");
    }
    let requirements = DevCommRequirements::new()
        .gin_connection(GinConnectionType::Rail)
        .gin_contexts(CONTEXTS)
        .gin_signals(BLOCKS)
        .barriers(BLOCKS);
    let dev_comm = comm.create_dev_comm(requirements)?;
    rank.load(&KERNELS)?;
    let stream = rank.stream()?;
    for count in COUNTS {
        let (send, recv) = (comm.window::<f32>(count)?, comm.window::<f32>(count)?);
        let partial = comm.window::<f32>(kernels::hybrid_allreduce_partials(count, team, teams))?;
        send.copy_from_host(&inputs::<f32>(count as u64, me, count))?;
        // An element that no rank writes stays NaN.
        recv.fill_bytes(0xff)?;
        // SAFETY: the windows have room for the elements and the partial sums, and live until the
        // ranks' all-gather below. The kernel begins with a barrier of all ranks.
        unsafe {
            let exchange =
                kernels::hybrid_allreduce::args(&dev_comm, &send, &recv, &partial, count);
            exchange.grid(BLOCKS).block(THREADS).launch(&stream)?;
        }

        let mut got = vec![0.0; count];
        stream.copy_to_host(&recv, &mut got)?;
        let roundings = 1; // Of the sum, to f32.
        let wrong = count_wrong(count as u64, n_ranks, roundings, &got);
        ensure!(wrong == 0, "rank {me}, {count} elements: {wrong} are wrong");
        let sums = rank.all_gather(&[checksum(&got)])?;
        ensure!(sums.iter().all(|sum| *sum == sums[0]), "the ranks' results differ");
        if rank.is_root() {
            println!("{count:6} elements: 0 wrong");
        }
    }
    Ok(())
}
