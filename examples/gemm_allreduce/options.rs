//! The command line.

use anyhow::Result;
use clap::{Parser, ValueEnum};

use crate::problem::Problem;

/// A matrix product fused with the all-reduce behind it, beside cuBLASLt and ncclAllReduce.
#[derive(Parser)]
pub struct Options {
    /// Rows of A and C, a list [default: 4096; small ones when simulated]
    #[arg(long, value_delimiter = ',', value_name = "ROWS")]
    pub m: Vec<usize>,

    /// Rows of B, which are columns of C, a list
    #[arg(long, value_delimiter = ',', value_name = "COLUMNS")]
    pub n: Vec<usize>,

    /// Terms of a rank: columns of its A and B, multiples of 8, a list
    #[arg(long, value_delimiter = ',', value_name = "TERMS")]
    pub k: Vec<usize>,

    /// GPUs to use, one process each [default: every visible one]
    #[arg(long, value_name = "N")]
    pub gpus: Option<usize>,

    /// Simulate N GPUs on the CPU instead
    #[arg(long, value_name = "N", conflicts_with = "gpus")]
    pub sim: Option<usize>,

    /// Run the ranks as threads of this process instead of one process each
    #[arg(long, conflicts_with = "sim")]
    pub one_process: bool,

    /// Form of the kernel
    #[arg(long, value_enum, default_value = "auto")]
    pub form: Form,

    /// Elements that are compared with the host's reference, of each product and rank
    #[arg(long, default_value_t = 256)]
    pub samples: usize,

    /// Check only, measure nothing
    #[arg(long)]
    pub untimed: bool,

    /// Seed of the random inputs
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Forms to run.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Form {
    /// What suits the GPU; both when simulated
    Auto,
    /// Hopper's
    Wgmma,
    /// The portable one
    Mma,
}

impl Options {
    /// Every combination of the lists, or of these where one is empty.
    pub fn problems(
        &self,
        m: &[usize],
        n: &[usize],
        k: &[usize],
        ranks: usize,
    ) -> Result<Vec<Problem>> {
        let [m, n, k] = [(&self.m, m), (&self.n, n), (&self.k, k)]
            .map(|(given, default)| if given.is_empty() { default } else { given });
        Problem::combinations([m, n, k], ranks, self.seed)
    }
}
