//! Kernel-initiated communication against host-initiated: kernels that communicate by themselves against NCCL's calls on the
//! host, which launch NCCL's own kernels.
//!
//! Every variant works on the same random data and is checked in full before it is timed. In every round each is timed over one batch,
//! in an order that is drawn anew; a ratio is the median of the rounds' ratios, which are of neighbours in time.

mod all_reduce;
mod barrier;
mod gemm_allreduce;
mod gpus;
mod machine;
mod put;
mod row;
mod simulated;
mod variant;

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::Args;
use devcomm::{Error, Rank};

use crate::header::Header;
use crate::options::{OutputOptions, RankOptions, RunOptions};
use crate::ranks;
use gpus::Gpus;
use machine::Job;
use simulated::Simulated;
use variant::{Choice, Described, Variant};

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

    /// Simulate N GPUs on the CPU: the kernels' results are checked, nothing is timed
    #[arg(long, value_name = "N", conflicts_with_all = ["gpus", "processes"])]
    simulate: Option<usize>,

    /// The folder that `cargo xtask twins` made [default: DEVCOMM_TWINS, or `twins` beside this program's folder]
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

    /// Measures on GPUs.
    fn on_gpus(&self, job: &mut Job<'_, Gpus<'_>>) -> Result<()>;

    /// Checks in the simulator.
    fn simulated(&self, job: &mut Job<'_, Simulated>) -> Result<()>;
}

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
    if let Some(ranks) = options.simulate {
        return run_simulated(benchmark, options, choice, ranks);
    }
    let rank = |rank: &Rank| run_rank(benchmark, options, choice.clone(), rank);
    ranks::run(&options.ranks, rank).map_err(advise)
}

fn run_rank(
    benchmark: &impl Benchmark,
    options: &Options,
    choice: Choice,
    rank: &Rank,
) -> Result<()> {
    let gpus = Gpus::new(rank, options)?;
    let mut job = Job::new(&gpus, &options.run, choice);
    let measured = benchmark.on_gpus(&mut job);
    job.finish(measured, &options.output)
}

fn run_simulated(
    benchmark: &impl Benchmark,
    options: &Options,
    mut choice: Choice,
    ranks: usize,
) -> Result<()> {
    ensure!(ranks > 0, "there is at least one rank");
    Simulated::leave_out(&mut choice)?;
    let simulated = Simulated::new(ranks)?;
    let mut job = Job::new(&simulated, &options.run, choice);
    job.begin(Header::simulated(ranks));
    let checked = benchmark.simulated(&mut job);
    job.finish(checked, &options.output)
}

/// Names the way out when it is the machine that does not do.
fn advise(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref().is_some_and(Error::is_of_the_machine) {
        true => error.context(
            "nothing can be measured here; `--simulate N` checks the kernels on N simulated GPUs",
        ),
        false => error,
    }
}
