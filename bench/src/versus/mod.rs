//! Compares kernel-initiated with host-initiated communication: kernels that communicate themselves
//! against NCCL's host calls, which launch NCCL's kernels.
//!
//! Every variant uses the same random data and is fully checked before it is timed. Every round
//! times one batch of each, in random order; a ratio is the median of ratios within a round.

mod all_reduce;
mod barrier;
mod collectives;
mod gemm;
mod gemm_allreduce;
mod gemm_ladder;
mod job;
mod product;
mod put;
mod row;
mod selection;
mod shapes;
mod tune;

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use devcomm::{Error, Rank};

use crate::contender::Variant;
use crate::documents::DocumentOptions;
use crate::harness::Harness;
use crate::options::{OutputOptions, RankOptions, RunOptions};
use crate::ranks;
use job::Job;
use selection::{Selection, VariantInfo};

pub use all_reduce::AllReduce;
pub use barrier::Barrier;
pub use collectives::{AllGather, AllToAll, Broadcast, ReduceScatter};
pub use gemm::Gemm;
pub use gemm_allreduce::GemmAllReduce;
pub use gemm_ladder::GemmLadder;
pub use put::Put;
pub use row::Row;
pub use tune::Tune;

/// Flags of the comparisons.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Only these variants, comma-separated [default: all that can run here]
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

    #[command(flatten)]
    documents: DocumentOptions,
}

/// A benchmark, with its flags in addition to [`Options`].
pub trait Benchmark: Args + Sync {
    /// Its name on the command line.
    const NAME: &'static str;

    /// Its variants, with descriptions.
    const VARIANTS: &'static [VariantInfo];

    /// Validates its flags.
    fn validate(&self) -> Result<()>;

    /// Compares its variants.
    fn run(&self, job: &mut Job<'_>) -> Result<()>;
}

/// Default largest message on simulated GPUs.
const SIMULATED_LARGEST: usize = 64 << 10;
/// Maximum blocks on simulated GPUs, which run them one after the other.
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
    let selection = Selection::new(&options.variants, B::VARIANTS, B::NAME)?;
    let documents = options.documents.read()?;
    let rank = |rank: &Rank| {
        let harness = Harness::new(rank, &options.ranks, &options.run)?;
        let mut job = Job::new(&harness, selection.clone(), options.twins.as_deref());
        let measured = benchmark.run(&mut job);
        job.finish(measured, &options.output, &documents)
    };
    ranks::run(&options.ranks, options.simulate, rank).map_err(advise)
}

/// Adds advice to an error if the system cannot run the benchmark.
fn advise(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref().is_some_and(Error::is_of_the_machine) {
        true => error.context(
            "nothing can be measured here; `--simulate N` checks the results on N simulated GPUs",
        ),
        false => error,
    }
}
