//! Kernel-initiated communication against host-initiated: kernels that communicate by themselves
//! against NCCL's calls on the host, which launch NCCL's own kernels.
//!
//! Every variant works on the same random data and is checked in full before it is timed. In every
//! round each is timed over one batch, in an order that is drawn anew; a ratio is the median of the
//! rounds' ratios, which are of neighbours in time.

mod all_reduce;
mod barrier;
mod choice;
mod gemm_allreduce;
mod job;
mod put;
mod row;

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use devcomm::{Error, Rank};

use crate::contender::Variant;
use crate::harness::Harness;
use crate::options::{OutputOptions, RankOptions, RunOptions};
use crate::ranks;
use choice::{Choice, Described};
use job::Job;

pub use all_reduce::AllReduce;
pub use barrier::Barrier;
pub use gemm_allreduce::GemmAllReduce;
pub use put::Put;

/// Flags of the comparisons.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Only these variants, with commas between [default: all that can run here]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "VARIANT")]
    variants: Vec<Variant>,

    /// Simulate N GPUs on the CPU: all results are checked, nothing is timed
    #[arg(long, value_name = "N", conflicts_with_all = ["gpus", "processes"])]
    simulate: Option<usize>,

    /// The folder that `cargo xtask twins` made [default: DEVCOMM_TWINS, or `twins` beside this
    /// program's folder]
    #[arg(long, value_name = "FOLDER")]
    twins: Option<PathBuf>,

    #[command(flatten)]
    ranks: RankOptions,

    #[command(flatten)]
    run: RunOptions,

    #[command(flatten)]
    output: OutputOptions,
}

/// A benchmark of this kind, with its flags beside [`Options`].
pub trait Benchmark: Args + Sync {
    /// What the command line calls it.
    const NAME: &'static str;

    /// Its variants, and what each does.
    const VARIANTS: &'static [Described];

    /// Refuses flags that cannot be meant.
    fn validate(&self) -> Result<()>;

    /// Compares its contenders.
    fn run(&self, job: &mut Job<'_>) -> Result<()>;
}

/// The largest message where none was named, on simulated GPUs.
const SIMULATED_LARGEST: usize = 64 << 10;
/// Blocks at most on simulated GPUs, where each takes as long as all others together.
const SIMULATED_BLOCKS: u32 = 4;

/// The command line of a benchmark.
#[derive(Args, Clone, Debug)]
pub struct Command<B: Benchmark> {
    #[command(flatten)]
    benchmark: B,

    #[command(flatten)]
    options: Options,
}

/// Runs this process's ranks.
pub fn run<B: Benchmark>(command: &Command<B>) -> Result<()> {
    let Command { benchmark, options } = command;
    benchmark.validate()?;
    options.run.validate()?;
    let choice = Choice::new(&options.variants, B::VARIANTS, B::NAME)?;
    let rank = |rank: &Rank| {
        let harness = Harness::new(rank, &options.ranks, &options.run)?;
        let mut job = Job::new(&harness, choice.clone(), options.twins.as_deref());
        let measured = benchmark.run(&mut job);
        job.finish(measured, &options.output)
    };
    ranks::run(&options.ranks, options.simulate, rank).map_err(advise)
}

/// Names the way out when it is the machine that does not do.
fn advise(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref().is_some_and(Error::is_of_the_machine) {
        true => error.context(
            "nothing can be measured here; `--simulate N` checks the results on N simulated GPUs",
        ),
        false => error,
    }
}
