//! One rank's run of a comparison.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use devcomm::Kernels;

use crate::base::options::{Dtype, GridOptions, RankOptions, RunOptions, SizeOptions};
use crate::base::output::OutputOptions;
use crate::contenders::contender::{Contender, Launch, Variant};
use crate::harness::Harness;
use crate::report::table::Report;
use crate::report::twin_row::{Label, TwinRow, Verdict};

/// Flags of `devcomm-bench twins`.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Only these pairs [default: all]
    #[arg(value_name = "KERNEL")]
    pub kernels: Vec<String>,

    /// The folder that `cargo xtask twins` made [default: DEVCOMM_TWINS, or `twins` beside this
    /// program's folder]
    #[arg(long, value_name = "FOLDER")]
    pub twins: Option<PathBuf>,

    /// Fail when the geometric mean of Rust's times over C++'s is above this
    #[arg(long, value_name = "RATIO")]
    pub max_mean: Option<f64>,

    /// Fail when a row's ratio is above this
    #[arg(long, value_name = "RATIO")]
    pub max_row: Option<f64>,

    #[command(flatten)]
    pub ranks: RankOptions,

    #[command(flatten)]
    pub sizes: SizeOptions,

    /// Element type
    #[arg(short = 'd', long = "datatype", value_enum, default_value = "all")]
    pub dtype: Dtype,

    #[command(flatten)]
    pub grid: GridOptions,

    #[command(flatten)]
    pub run: RunOptions,

    #[command(flatten)]
    pub output: OutputOptions,
}

/// A rank's run of the comparison.
pub struct Job<'a> {
    pub harness: &'a Harness<'a>,
    pub options: &'a Options,
    /// Rust, C++, and C++ again.
    pub compiled: &'a [(Variant, Kernels); 3],
    pub order: fastrand::Rng,
    pub report: Report<TwinRow>,
}

impl Job<'_> {
    /// Checks the Rust and C++ kernels, times all three modules, and adds a row. *Collective*.
    pub fn row(&mut self, label: Label, contenders: &[Contender<'_>]) -> Result<()> {
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
    pub fn check(&self, contenders: &[Contender<'_>]) -> Result<[Option<usize>; 2]> {
        let wrong = self.harness.check(&contenders[..2])?;
        Ok([wrong[0], wrong[1]])
    }

    /// Prints that a pair cannot run here.
    pub fn omit(&self, name: &str, why: &str) {
        if self.harness.rank.is_root() {
            println!("# left out: {name}: {why}");
        }
    }

    /// Prints the verdict, even if incomplete. Wrong results and exceeded limits are errors.
    pub fn finish(self, measured: Result<()>) -> Result<()> {
        let verdict = Verdict::of(&self.report.rows);
        if self.harness.rank.is_root() && !self.report.rows.is_empty() {
            println!("\n{verdict}");
        }
        measured?;
        verdict.judge(self.options.max_mean, self.options.max_row)
    }
}
