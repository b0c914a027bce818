//! Kernels in Rust against their twins in CUDA C++: the same work, grid, block and memory, assembled by the same ptxas.
//!
//! Three modules take part: the Rust kernels, the C++ ones, and the C++ ones loaded once more. The last shows what a ratio is
//! worth: its distance from 1 is what the machine does by itself. In every round each of the three is timed over one batch of
//! launches, in an order that is drawn anew, and the ratios of a round are of neighbours in time.

mod all_reduce;
mod barrier;
mod gin_put;
mod ll_exchange;
mod measure;
mod row;

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use devcomm::{Communicator, Event, Kernels, Rank, Stream};

use crate::files::Files;
use crate::header::Header;
use crate::options::{Dtype, GridOptions, OutputOptions, RankOptions, RunOptions, SizeOptions};
use crate::ranks;
use crate::table::Report;
use row::{TwinRow, Verdict};

/// Flags of `devcomm-bench twins`.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Only these pairs [default: all]
    #[arg(value_name = "KERNEL")]
    kernels: Vec<String>,

    /// The folder that `cargo xtask twins` made [default: DEVCOMM_TWINS, or `twins` beside this program's folder]
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

/// A pair: the stem of its files, and what runs it.
type Pair = (&'static str, fn(&mut Job<'_>) -> Result<()>);

/// All pairs. A new one is a line here, and a function that makes its windows and hands [`measure::Case`]s to the job.
const PAIRS: [Pair; 5] = [
    ("lsa_barrier", barrier::run),
    ("lsa_allreduce", all_reduce::lsa_allreduce),
    ("reduce_copy", all_reduce::reduce_copy),
    ("ll_exchange", ll_exchange::run),
    ("gin_put", gin_put::run),
];

impl Options {
    /// The pairs that were asked for.
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
    let pairs = options.pairs()?;
    let files = Files::find(options.twins.as_deref())?;
    ranks::run(&options.ranks, |rank| run_rank(rank, options, &pairs, &files))
}

fn run_rank(rank: &Rank, options: &Options, pairs: &[Pair], files: &Files) -> Result<()> {
    let comm = rank.communicator()?;
    comm.require_single_lsa_team()?;
    let (mut there, mut missing) = (Vec::new(), Vec::new());
    for pair in pairs {
        if files.has(pair.0) { there.push(*pair) } else { missing.push(pair.0) }
    }
    if there.is_empty() {
        bail!("{} holds none of the pairs {}", files.folder().display(), missing.join(", "));
    }
    let names: Vec<&str> = there.iter().map(|(name, _)| *name).collect();
    let load = |paths: Vec<PathBuf>| Kernels::load_files(rank.context(), &paths);
    let mut job = Job {
        rank,
        comm,
        options,
        contestants: [
            load(files.rust(&names)).context("the Rust kernels do not load")?,
            load(files.cpp(&names)).context("the C++ twins do not load")?,
            load(files.cpp(&names)).context("the C++ twins do not load again")?,
        ],
        stream: rank.stream()?,
        events: (rank.context().event()?, rank.context().event()?),
        order: crate::stats::Shuffle::new(options.run.seed),
        report: Report::new(),
    };
    let header = Header::of(rank)?;
    if rank.is_root() {
        header.print();
        println!("# {}", options.run.describe());
        println!(
            "# noise: the interquartile range of the rounds' ratios; null: C++ against itself, loaded twice"
        );
        for name in missing {
            println!("# left out: {name}, which is not in {}", files.folder().display());
        }
        println!();
    }
    job.report.set_header(header);
    let measured = there.iter().try_for_each(|(_, run)| run(&mut job));
    job.finish(measured)
}

/// What a rank measures with.
struct Job<'a> {
    rank: &'a Rank,
    comm: &'a Communicator,
    options: &'a Options,
    /// Rust, C++, C++ again.
    contestants: [Kernels; 3],
    stream: Stream,
    events: (Event, Event),
    order: crate::stats::Shuffle,
    report: Report<TwinRow>,
}

impl Job<'_> {
    /// Tells what is being done, beside the table.
    fn say(&self, what: &str) {
        if self.rank.is_root() {
            eprintln!("{what}");
        }
    }

    /// Tells that a pair cannot run here.
    fn leave_out(&self, name: &str, why: &str) {
        if self.rank.is_root() {
            println!("# left out: {name}: {why}");
        }
    }

    /// Prints what was measured, also when that is not all, and gives the verdict.
    fn finish(self, measured: Result<()>) -> Result<()> {
        let verdict = Verdict::of(&self.report.rows);
        if self.rank.is_root() && !self.report.rows.is_empty() {
            println!("{}\n", self.report.table());
            println!("{verdict}");
            self.report.write(&self.options.output)?;
        }
        measured?;
        verdict.judge(self.options.max_mean, self.options.max_row)
    }
}
