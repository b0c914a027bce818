//! Compares kernel-initiated with host-initiated communication: kernels that communicate themselves
//! against NCCL's host calls, which launch NCCL's kernels.
//!
//! Every variant uses the same random data and is fully checked before it is timed. Every round
//! times one batch of each, in random order; a ratio is the median of ratios within a round.

mod all_reduce;
mod allgather_gemm;
mod barrier;
mod collectives;
mod expert_parallel;
mod fusion;
mod gemm;
mod gemm_allreduce;
mod gemm_ladder;
mod gemm_reduce_scatter;
mod grouped_gemm;
mod job;
mod nccl_tests;
mod p2p;
mod product;
mod put;
mod rmsnorm_allreduce;
mod row;
mod selection;
mod shapes;
mod signal;
mod tune;
mod tune_collectives;
mod tune_gemm_allreduce;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use devcomm::{Error, Rank, World};

use crate::contender::Variant;
use crate::contest::Contest;
use crate::documents::DocumentOptions;
use crate::foreign::Foreign;
use crate::harness::Harness;
use crate::options::{RankOptions, RunOptions};
use crate::output::OutputOptions;
use crate::ranks;
use job::Job;
pub use selection::Selection;
use selection::VariantInfo;

pub use all_reduce::AllReduce;
pub use allgather_gemm::AllGatherGemm;
pub use barrier::Barrier;
pub use collectives::{AllGather, AllToAll, Broadcast, Launch, Operation, ReduceScatter};
pub use expert_parallel::Experts;
pub use gemm::Gemm;
pub use gemm_allreduce::GemmAllReduce;
pub use gemm_ladder::GemmLadder;
pub use gemm_reduce_scatter::GemmReduceScatter;
pub use grouped_gemm::GroupedGemm;
pub use p2p::P2p;
pub use put::Put;
pub use rmsnorm_allreduce::RmsNormAllReduce;
pub use row::{Row, Summary, bytes};
pub use signal::Signal;
pub use tune::Tune;
pub use tune_collectives::TuneCollective;
pub use tune_gemm_allreduce::TuneGemmAllReduce;

/// Flags of the comparisons.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Only these variants, comma-separated [default: all that can run here]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "VARIANT")]
    variants: Vec<Variant>,

    /// Print nccl-tests' own table, of one variant that is also run in place: rust-ops, nccl or
    /// nccl-sym [default with the flag alone: rust-ops]
    #[arg(long, value_name = "VARIANT", num_args = 0..=1, default_missing_value = "rust-ops")]
    #[arg(value_enum, conflicts_with = "variants")]
    nccl_tests: Option<Variant>,

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

/// Processes of other programs are ended if they print nothing for this much longer than a wait for
/// a GPU may take.
const START: Duration = Duration::from_secs(120);

impl Options {
    /// The GPUs that other programs use, and for how long these may print nothing.
    fn for_others(&self) -> Result<(usize, Duration)> {
        ensure!(
            !World::is_launched() && !self.ranks.processes,
            "--torch and --all-reduce-perf run once, on all GPUs: the ranks must be threads of \
             this process"
        );
        let gpus = self.simulate.or(self.ranks.gpus).map_or_else(devcomm::visible_gpus, Ok)?;
        Ok((gpus, self.ranks.limit() + START))
    }
}

/// A benchmark, with its flags in addition to [`Options`].
pub trait Benchmark: Args + Sync {
    /// Its name on the command line.
    const NAME: &'static str;

    /// Its variants, with descriptions.
    const VARIANTS: &'static [VariantInfo];

    /// nccl-tests' program for the same, if there is one.
    const NCCL_TESTS: Option<&'static str> = None;

    /// Validates its flags.
    fn validate(&self) -> Result<()>;

    /// What other programs measure of it, before the ranks start.
    fn foreign(&self, _options: &Options, _selection: &Selection) -> Result<Vec<Foreign>> {
        Ok(Vec::new())
    }

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
    options.output.validate()?;
    if let Some(variant) = options.nccl_tests {
        ensure!(B::NCCL_TESTS.is_some(), "nccl-tests has no table of {}", B::NAME);
        let has = nccl_tests::VARIANTS.contains(&variant);
        ensure!(has, "--nccl-tests {variant}: only rust-ops, nccl and nccl-sym also run in place");
    }
    let named = options.nccl_tests.as_ref().map_or(&*options.variants, std::slice::from_ref);
    let selection = Selection::new(named, B::VARIANTS, B::NAME)?;
    let contest = Contest::of(B::NAME).with_context(|| format!("{} has no contest", B::NAME))?;
    let documents = options.documents.read()?;
    let foreign = benchmark.foreign(options, &selection).map_err(advise)?;
    let rank = |rank: &Rank| {
        let harness = Harness::new(rank, &options.ranks, &options.run)?;
        let twins = options.twins.as_deref();
        let job = Job::new(&harness, selection.clone(), contest, twins, &options.output);
        let job = job.with_nccl_tests(options.nccl_tests.and(B::NCCL_TESTS));
        let mut job = job.with_foreign(&foreign);
        let measured = benchmark.run(&mut job);
        job.finish(measured, &documents)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The roles of a benchmark's variants, each variant once.
    fn has_roles<B: Benchmark>() {
        let contest = Contest::of(B::NAME).unwrap();
        let roles = contest.default.iter().chain(contest.competitors).chain(contest.columns);
        let mut roles: Vec<&str> = roles.map(|variant| variant.name()).collect();
        let mut all: Vec<&str> = B::VARIANTS.iter().map(|(variant, _)| variant.name()).collect();
        roles.sort_unstable();
        all.sort_unstable();
        assert_eq!(roles, all, "{}", B::NAME);
    }

    #[test]
    fn every_variant_is_the_default_or_a_competitor_or_only_a_column() {
        has_roles::<AllReduce>();
        has_roles::<AllGather>();
        has_roles::<ReduceScatter>();
        has_roles::<Broadcast>();
        has_roles::<AllToAll>();
        has_roles::<RmsNormAllReduce>();
        has_roles::<Experts>();
        has_roles::<Launch>();
        has_roles::<Barrier>();
        has_roles::<Put>();
        has_roles::<Signal>();
        has_roles::<P2p>();
        has_roles::<Gemm>();
        has_roles::<GroupedGemm>();
        has_roles::<GemmAllReduce>();
        has_roles::<GemmReduceScatter>();
        has_roles::<AllGatherGemm>();
        has_roles::<GemmLadder>();
    }
}
