//! All-to-all by a kernel that puts every message over the network itself.
//!
//! ```text
//! cargo xtask run gin_alltoall                      # every GPU of this machine, or the simulator where there is none
//! cargo xtask run gin_alltoall --sim 3              # three simulated GPUs
//! cargo xtask run gin_alltoall --iterations 100     # more random shapes
//! torchrun --no-python --nproc-per-node 4 -- ./target/release/gin_alltoall
//! ```
//!
//! The kernel is `kernels/src/gin_alltoall.rs`. Sizes, grids and blocks are random, and odd: a message may begin at any byte. Every
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
    gin::run("All-to-all over the network, by puts and signals of a kernel", run_rank, simulate)
}

/// The kernel on this rank's GPU.
pub fn run_rank(rank: &Rank, options: &Options) -> Result<()> {
    let requirements = DevCommRequirements::new()
        .gin_connection(GinConnectionType::Full)
        .gin_contexts(CONTEXTS)
        .gin_signals(BLOCKS)
        .world_gin_barriers(BLOCKS);
    let dev_comm = rank.communicator()?.create_dev_comm(requirements)?;
    alltoall::on_gpu(kernels::gin_alltoall::<u8>, rank, &dev_comm, options)?;
    alltoall::on_gpu(kernels::gin_alltoall::<f32>, rank, &dev_comm, options)
}

/// The kernel on simulated GPUs.
pub fn simulate(ranks: usize, team: usize, options: &Options) -> Result<()> {
    let config = DevCommConfig {
        gin_connection: GinConnectionType::Full,
        gin_contexts: CONTEXTS,
        gin_signals: BLOCKS,
        world_gin_barriers: BLOCKS,
        ..DevCommConfig::default()
    };
    alltoall::simulated(kernels::gin_alltoall::<u8>, (ranks, team), &config, options)?;
    alltoall::simulated(kernels::gin_alltoall::<f32>, (ranks, team), &config, options)
}
