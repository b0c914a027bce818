//! The parts that all comparisons share: flags, the trait, and the run.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use devcomm::{Error, Rank, World};

use super::job::Job;
use crate::base::options::{RankOptions, RunOptions};
use crate::base::{OutputOptions, TwinFiles, ranks};
use crate::contenders::peers::FailedPeer;
use crate::contenders::{Contest, PeerOptions, PeerWork, Selection, Variant};
use crate::harness::Harness;
use crate::report::row;

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
    pub simulate: Option<usize>,

    /// The folder that `cargo xtask twins` made [default: DEVCOMM_TWINS, or `twins` next to this
    /// program's folder]
    #[arg(long, value_name = "FOLDER")]
    twins: Option<PathBuf>,

    #[command(flatten)]
    ranks: RankOptions,

    #[command(flatten)]
    pub run: RunOptions,

    #[command(flatten)]
    output: OutputOptions,
}

/// How long a process of another program may take to start. It is killed if it prints nothing for
/// this time plus the limit of a rank's wait for a GPU.
const START: Duration = Duration::from_secs(120);

impl Options {
    /// Returns the number of GPUs that other programs use, and how long these may print nothing.
    fn for_others(&self) -> Result<(usize, Duration)> {
        ensure!(
            !World::is_launched() && !self.ranks.processes,
            "--peers run on all GPUs: the ranks must be threads of this process"
        );
        let gpus = self.simulate.or(self.ranks.gpus).map_or_else(devcomm::visible_gpus, Ok)?;
        Ok((gpus, self.ranks.limit() + START))
    }
}

/// A benchmark, with its flags in addition to [`Options`].
pub trait Benchmark: Args + Sync {
    /// The name on the command line.
    const NAME: &'static str;

    /// nccl-tests' program for the same, if there is one.
    const NCCL_TESTS: Option<&'static str> = None;

    /// Whether the benchmark needs the C++ kernels that `cargo xtask twins` compiles.
    const NEEDS_TWINS: bool = false;

    /// Validates its flags, before the number of ranks is known. Defaults, which may depend on it,
    /// are valid: any other valid value may stand for them here.
    fn validate(&self) -> Result<()> {
        Ok(())
    }

    /// Returns which programs of others (such as PyTorch) are measured too, if it can have any.
    fn peers(&self) -> Option<&PeerOptions> {
        None
    }

    /// Returns what programs of others measure, on this number of GPUs; by default nothing, for
    /// benchmarks whose only peer is `nccl`, which takes the command line instead.
    fn work(&self, _options: &Options, _gpus: usize) -> Result<PeerWork> {
        Ok(PeerWork::Counts(BTreeMap::new()))
    }

    /// Compares its variants.
    fn run(&self, job: &mut Job<'_>) -> Result<()>;
}

/// Default largest message on simulated GPUs.
pub const SIMULATED_LARGEST: usize = 64 << 10;
/// Maximum blocks on simulated GPUs, all of whose threads run on one thread of the CPU.
pub const SIMULATED_BLOCKS: u32 = 4;

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
    if B::NEEDS_TWINS {
        TwinFiles::find(options.twins.as_deref())?;
    }
    options.output.validate()?;
    if let Some(variant) = options.nccl_tests {
        ensure!(B::NCCL_TESTS.is_some(), "nccl-tests has no table of {}", B::NAME);
        let has = crate::report::nccl_tests::VARIANTS.contains(&variant);
        ensure!(has, "--nccl-tests {variant}: only rust-ops, nccl and nccl-sym also run in place");
    }
    let named = options.nccl_tests.as_ref().map_or(&*options.variants, std::slice::from_ref);
    let contest = Contest::of(B::NAME).with_context(|| format!("{} has no contest", B::NAME))?;
    let mut selection = Selection::new(named, contest.variants, B::NAME)?;
    let no_peers = PeerOptions::default();
    let (peers, mut by_peers) = (benchmark.peers().unwrap_or(&no_peers), Vec::new());
    peers.select(contest, &mut selection)?;
    if options.run.host {
        peers.refuse_with("--host")?;
    }
    let measured_by_peers = |selection: &Selection| -> Result<_> {
        let (gpus, patience) = options.for_others()?;
        let work = benchmark.work(options, gpus)?;
        peers.run(&work, selection, &options.run, (gpus, patience))
    };
    if !peers.is_empty() {
        let (results, failed) = measured_by_peers(&selection).map_err(advise)?;
        failed.into_iter().try_for_each(|failed| omit(&mut selection, failed)).map_err(advise)?;
        by_peers = results;
    }
    let timed_report = Mutex::new(None);
    let rank = |rank: &Rank| {
        let harness = Harness::new(rank, &options.ranks, &options.run)?;
        let files = (options.twins.as_deref(), &options.output);
        let others = (&by_peers[..], options.nccl_tests.and(B::NCCL_TESTS));
        let mut job = Job::new(&harness, selection.clone(), contest, files, others);
        let measured = benchmark.run(&mut job);
        job.finish(measured, &timed_report)
    };
    ranks::run(&options.ranks, options.simulate, rank).map_err(advise)?;
    let timed_report = timed_report.into_inner().ok().flatten();
    if let Some(mut report) = timed_report.filter(|_| !by_peers.is_empty()) {
        // Other programs are measured before and after devcomm, to show changes of the machine.
        let (again, failed) = measured_by_peers(&selection)?;
        for (variants, why) in failed {
            let names: Vec<&str> = variants.into_iter().map(Variant::name).collect();
            println!("# left out of the peers' second run: {}: {why:#}", names.join(", "));
        }
        println!("{}", row::join_again(&mut report.rows, &again));
        report.write(&options.output)?;
    }
    Ok(())
}

/// Omits the variants of a peer that failed. It is an error of the peer `nccl`, whose variant this
/// program also runs itself.
fn omit(selection: &mut Selection, (variants, why): FailedPeer) -> Result<()> {
    if variants.contains(&Variant::NcclSym) {
        return Err(why);
    }
    variants.into_iter().try_for_each(|variant| selection.omit(variant, format!("{why:#}")))
}

/// Adds advice to an error if the system cannot run the benchmark.
fn advise(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref().is_some_and(Error::is_hardware) {
        true => error.context(
            "nothing can be measured here; `--simulate N` checks the results on N simulated GPUs",
        ),
        false => error,
    }
}
