//! Compares kernels in Rust with their twins in CUDA C++: same work, grid, block and memory,
//! assembled by the same ptxas.
//!
//! Three modules are timed: the Rust kernels, the C++ kernels, and the C++ kernels loaded a second
//! time. The last is the null comparison: its ratio's distance from 1 is the measurement noise. In
//! every round each module is timed over one batch of launches, in random order, and ratios are
//! taken within a round.

mod job;
mod pairs;

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use devcomm::{Kernels, Rank};

use crate::base::files::TwinFiles;
use crate::base::ranks;
use crate::contenders::contender::Variant;
use crate::harness::Harness;
use crate::harness::header::Header;
use crate::report::table::Report;
use job::Job;
pub use job::Options;
use pairs::{PAIRS, Pair};

/// The selected pairs.
fn pairs(options: &Options) -> Result<Vec<Pair>> {
    for name in &options.kernels {
        ensure!(
            PAIRS.iter().any(|(known, _)| known == name),
            "there is no pair `{name}`; there are: {}",
            PAIRS.map(|(known, _)| known).join(", ")
        );
    }
    let wanted = |name: &str| {
        options.kernels.is_empty() || options.kernels.iter().any(|kernel| kernel == name)
    };
    Ok(PAIRS.into_iter().filter(|(name, _)| wanted(name)).collect())
}

/// Runs this process's ranks.
pub fn run(options: &Options) -> Result<()> {
    options.sizes.validate()?;
    options.grid.validate()?;
    options.run.validate()?;
    options.output.validate()?;
    let pairs = pairs(options)?;
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
