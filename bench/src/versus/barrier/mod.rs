//! Barrier: `bench/kernels/src/lsa_barrier.rs`, a kernel that meets the other ranks many times, against what the host has for
//! it, a collective without data.

mod gpus;
mod simulated;

use anyhow::{Result, ensure};

use clap::Args;

use super::Benchmark;
use super::gpus::Gpus;
use super::machine::Job;
use super::row::Case;
use super::simulated::Simulated;
use super::variant::{Described, Variant};
use crate::options::GridOptions;

/// The flags of `barrier`.
#[derive(Args, Clone, Debug)]
pub struct Barrier {
    #[command(flatten)]
    grid: GridOptions,
}

impl Benchmark for Barrier {
    const NAME: &'static str = "barrier";
    const VARIANTS: &'static [Described] = &[
        (Variant::Rust, "each block has its LSA barrier, 1000 of them in a launch"),
        (Variant::Cpp, "its twin in C++"),
        (
            Variant::Nccl,
            "ncclAllReduce of one element on memory that is not registered, a launch each",
        ),
        (Variant::NcclSym, "ncclAllReduce of one element on symmetric windows, a launch each"),
    ];

    fn validate(&self) -> Result<()> {
        self.grid.validate()
    }

    fn on_gpus(&self, job: &mut Job<'_, Gpus<'_>>) -> Result<()> {
        gpus::run(&self.grid, job)
    }

    fn simulated(&self, job: &mut Job<'_, Simulated>) -> Result<()> {
        simulated::run(&self.grid, job)
    }
}

/// Barriers of a launch that is timed, so many that the launch does not count, and of one that is checked.
const ROUNDS: u32 = 1000;
const CHECKED_ROUNDS: u32 = 100;
/// Blocks, each with a barrier of its own.
const BLOCKS: [u32; 3] = [1, 16, 64];
const THREADS: u32 = 128;

const CASE: Case = Case { size: 0, count: 0, dtype: "-", redop: "-", bus: 0.0, shape: None };

/// The grids to measure, of `max_blocks` at most where nobody names a number: blocks and threads.
fn grids(options: &GridOptions, ranks: usize, max_blocks: u32) -> Result<Vec<(u32, u32)>> {
    let threads = options.threads.unwrap_or(THREADS);
    ensure!(
        threads as usize >= ranks,
        "{threads} threads a block, but a barrier of {ranks} ranks is checked by as many"
    );
    let default = || BLOCKS.map(|blocks| blocks.min(max_blocks)).to_vec();
    let mut blocks = options.blocks.map_or_else(default, |blocks| vec![blocks]);
    blocks.dedup();
    Ok(blocks.into_iter().map(|blocks| (blocks, threads)).collect())
}

/// Wrong messages in the checked kernel's counts; one that was not written counts as all.
fn wrong_in(counts: &[u32]) -> usize {
    counts.iter().map(|&count| count.min(CHECKED_ROUNDS) as usize).sum()
}
