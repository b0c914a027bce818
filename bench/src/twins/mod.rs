//! Compares kernels in Rust with their twins in CUDA C++: same work, grid, block and memory,
//! assembled by the same ptxas.
//!
//! Three modules are timed: the Rust kernels, the C++ kernels, and the C++ kernels loaded a second
//! time. The last is the null comparison: its ratio's distance from 1 is the measurement noise. In
//! every round each module is timed over one batch of launches, in random order, and ratios are
//! taken within a round.

mod pairs;
mod row;

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use devcomm::{Kernels, Rank};

use crate::contender::{Contender, Launch, Variant};
use crate::files::TwinFiles;
use crate::harness::Harness;
use crate::header::Header;
use crate::options::{Dtype, GridOptions, RankOptions, RunOptions, SizeOptions};
use crate::output::OutputOptions;
use crate::ranks;
use crate::table::Report;
use pairs::{PAIRS, Pair};
use row::Label;
pub use row::{TwinRow, Verdict};

/// Flags of `devcomm-bench twins`.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Only these pairs [default: all]
    #[arg(value_name = "KERNEL")]
    kernels: Vec<String>,

    /// The folder that `cargo xtask twins` made [default: DEVCOMM_TWINS, or `twins` beside this
    /// program's folder]
    #[arg(long, value_name = "FOLDER")]
    twins: Option<PathBuf>,

    /// Fail when the geometric mean of Rust's times over C++'s is above this
    #[arg(long, value_name = "RATIO")]
    max_mean: Option<f64>,

    /// Fail when a row's ratio is above this
    #[arg(long, value_name = "RATIO")]
    max_row: Option<f64>,

    #[command(flatten)]
    ranks: RankOptions,

    #[command(flatten)]
    sizes: SizeOptions,

    /// Element type
    #[arg(short = 'd', long = "datatype", value_enum, default_value = "all")]
    dtype: Dtype,

    #[command(flatten)]
    grid: GridOptions,

    #[command(flatten)]
    run: RunOptions,

    #[command(flatten)]
    output: OutputOptions,
}

impl Options {
    /// The selected pairs.
    fn pairs(&self) -> Result<Vec<Pair>> {
        for name in &self.kernels {
            ensure!(
                PAIRS.iter().any(|(known, _)| known == name),
                "there is no pair `{name}`; there are: {}",
                PAIRS.map(|(known, _)| known).join(", ")
            );
        }
        let wanted = |name: &str| {
            self.kernels.is_empty() || self.kernels.iter().any(|kernel| kernel == name)
        };
        Ok(PAIRS.into_iter().filter(|(name, _)| wanted(name)).collect())
    }
}

/// Runs this process's ranks.
pub fn run(options: &Options) -> Result<()> {
    options.sizes.validate()?;
    options.grid.validate()?;
    options.run.validate()?;
    options.output.validate()?;
    let pairs = options.pairs()?;
    let files = TwinFiles::find(options.twins.as_deref())?;
    ranks::run(&options.ranks, None, |rank| run_rank(rank, options, &pairs, &files))
}

fn run_rank(rank: &Rank, options: &Options, pairs: &[Pair], files: &TwinFiles) -> Result<()> {
    let harness = &Harness::new(rank, &options.ranks, &options.run)?;
    harness.comm.require_single_lsa_team()?;
    let (present, missing): (Vec<Pair>, Vec<Pair>) =
        pairs.iter().partition(|(name, _)| files.has(name));
    let names = |pairs: &[Pair]| pairs.iter().map(|(name, _)| *name).collect::<Vec<_>>();
    if present.is_empty() {
        let missing = names(&missing).join(", ");
        bail!("{} has none of the pairs {missing}", files.folder().display());
    }
    // SAFETY: `cargo xtask twins` has made them of the kernels of these names.
    let load = |paths: Vec<PathBuf>| unsafe { Kernels::load_files(rank.context(), &paths) };
    let (rust, cpp) = (files.rust(&names(&present)), || files.cpp(&names(&present)));
    let mut job = Job {
        harness,
        options,
        compiled: &[
            (Variant::Rust, load(rust).context("the Rust kernels do not load")?),
            (Variant::Cpp, load(cpp()).context("the C++ twins do not load")?),
            (Variant::Cpp, load(cpp()).context("the C++ twins do not load again")?),
        ],
        order: fastrand::Rng::with_seed(options.run.seed),
        report: Report::new(),
    };
    let header = Header::of(rank)?;
    if rank.is_root() {
        print!("{header}");
        println!("# {}", options.run.describe());
        println!(
            "# noise: the interquartile range of the rounds' ratios; null: C++ against itself, \
             loaded twice"
        );
        for name in names(&missing) {
            println!("# left out: {name}, which is not in {}", files.folder().display());
        }
        println!();
    }
    job.report.set_header(header);
    let measured = present.iter().try_for_each(|(_, run)| run(&mut job));
    job.finish(measured)
}

/// A rank's run of the comparison.
struct Job<'a> {
    harness: &'a Harness<'a>,
    options: &'a Options,
    /// Rust, C++, and C++ again.
    compiled: &'a [(Variant, Kernels); 3],
    order: fastrand::Rng,
    report: Report<TwinRow>,
}

impl Job<'_> {
    /// Checks the Rust and C++ kernels, times all three modules, and adds a row. *Collective*.
    fn row(&mut self, label: Label, contenders: &[Contender<'_>]) -> Result<()> {
        let Label { kernel, dtype, bytes } = label;
        let launches = [0, 1].map(|i| contenders[i].launch.unwrap_or_default());
        let Launch { blocks, threads, .. } = launches[0];
        self.harness.progress(&format!("{kernel} {dtype} {bytes} B {blocks}x{threads} ..."));
        let wrong = self.check(contenders)?;
        let (rounds, _) =
            self.harness.time(contenders, &mut self.order, self.harness.run.rounds)?;
        let row = TwinRow::new(label, launches, &rounds, wrong);
        let output = self.harness.rank.is_root().then_some(&self.options.output);
        let lines = self.report.add([row.context("there were no rounds")?], output)?;
        if self.harness.rank.is_root() {
            println!("{lines}");
        }
        Ok(())
    }

    /// Wrong elements of Rust and of C++ over all ranks; `None` without checks. *Collective*.
    fn check(&self, contenders: &[Contender<'_>]) -> Result<[Option<usize>; 2]> {
        let wrong = self.harness.check(&contenders[..2])?;
        Ok([wrong[0], wrong[1]])
    }

    /// Prints that a pair cannot run here.
    fn omit(&self, name: &str, why: &str) {
        if self.harness.rank.is_root() {
            println!("# left out: {name}: {why}");
        }
    }

    /// Prints the verdict, even if incomplete. Wrong results and exceeded limits are errors.
    fn finish(self, measured: Result<()>) -> Result<()> {
        let verdict = Verdict::of(&self.report.rows);
        if self.harness.rank.is_root() && !self.report.rows.is_empty() {
            println!("\n{verdict}");
        }
        measured?;
        verdict.judge(self.options.max_mean, self.options.max_row)
    }
}
