//! The flags of `twins`, and one rank's run.

use anyhow::Result;
use clap::Args;
use devcomm::Kernels;

use crate::base::options::{Dtype, GridOptions, SizeOptions};
use crate::cases::job::Job;
use crate::contenders::{Contender, Variant};
use crate::report::row::Case;

/// The flags of `twins`.
#[derive(Args, Clone, Debug)]
pub struct Twins {
    /// Only these pairs [default: all]
    #[arg(value_name = "KERNEL")]
    pub kernels: Vec<String>,

    #[command(flatten)]
    pub sizes: SizeOptions,

    /// Element type
    #[arg(short = 'd', long = "datatype", value_enum, default_value = "all")]
    pub dtype: Dtype,

    #[command(flatten)]
    pub grid: GridOptions,
}

/// A rank's run.
pub struct Run<'a, 'b> {
    pub job: &'a mut Job<'b>,
    pub twins: &'a Twins,
    /// Rust, C++, and C++ again.
    pub compiled: &'a [(Variant, Kernels)],
}

impl Run<'_, '_> {
    /// Checks and times the modules. *Collective*.
    pub fn row(
        &mut self,
        (kernel, dtype, size): (&'static str, &'static str, usize),
        contenders: Vec<Contender<'_>>,
    ) -> Result<()> {
        let mut all = Vec::new();
        for contender in contenders {
            let registers = contender.launch.unwrap_or_default().registers;
            all.push(contender.by_algorithm(format!("{registers} registers")));
        }
        self.job.compare(Case { size, dtype, redop: kernel, ..Case::NONE }, &all)
    }

    /// Prints that a pair cannot run here.
    pub fn omit(&self, name: &str, why: &str) {
        if self.job.harness.rank.is_root() {
            println!("# left out: {name}: {why}");
        }
    }
}
