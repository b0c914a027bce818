//! All-to-all by a kernel that stores to the GPUs of its own team, and puts over the network to those of other teams.
//!
//! ```text
//! cargo xtask run hybrid_alltoall                          # every GPU of this machine, or the simulator where there is none
//! NCCL_LSA_TEAM_SIZE=2 cargo xtask run hybrid_alltoall     # teams of two, whatever else load and store would reach
//! cargo xtask run hybrid_alltoall --sim 6 --team 3         # two simulated teams of three
//! torchrun --no-python --nproc-per-node 4 -- ./target/release/hybrid_alltoall
//! ```
//!
//! The kernel is `kernels/src/hybrid_alltoall.rs`. Sizes, grids and blocks are random, and odd: a message may begin at any byte. Every
//! element is checked, and that nothing behind them is written; the output ends with `PASS` when all are right.

pub mod gin;

use std::process::ExitCode;

use anyhow::Result;
use devcomm::sim::DevCommConfig;
use devcomm::{DevCommRequirements, GinConnectionType, Rank, kernels};
use gin::Options;
use gin::alltoall::{self, BLOCKS};

/// Each with signals of its own; fewer than blocks, so that some share one.
const CONTEXTS: u32 = 5;

fn main() -> ExitCode {
    let about = "All-to-all by load and store within teams of GPUs, over the network between them";
    gin::run(about, run_rank, simulate)
}

/// The kernel on this rank's GPU.
pub fn run_rank(rank: &Rank, options: &Options) -> Result<()> {
    let comm = rank.communicator()?;
    gin::print_teams(rank)?;
    let requirements = DevCommRequirements::new()
        .gin_connection(GinConnectionType::Full)
        .gin_contexts(CONTEXTS)
        .gin_signals(BLOCKS)
        .barriers(BLOCKS);
    let dev_comm = comm.create_dev_comm(requirements)?;
    alltoall::on_gpu(kernels::hybrid_alltoall::<u8>, rank, &dev_comm, options)?;
    alltoall::on_gpu(kernels::hybrid_alltoall::<f32>, rank, &dev_comm, options)
}

/// The kernel on simulated GPUs.
pub fn simulate(ranks: usize, team: usize, options: &Options) -> Result<()> {
    let config = DevCommConfig {
        gin_connection: GinConnectionType::Full,
        gin_contexts: CONTEXTS,
        gin_signals: BLOCKS,
        barriers: BLOCKS,
        ..DevCommConfig::default()
    };
    alltoall::simulated(kernels::hybrid_alltoall::<u8>, (ranks, team), &config, options)?;
    alltoall::simulated(kernels::hybrid_alltoall::<f32>, (ranks, team), &config, options)
}
