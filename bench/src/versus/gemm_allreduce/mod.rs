//! Matrix product and the all-reduce behind it, `C = sum over the ranks of A x B^T` in bf16: one kernel, `kernels/src/gemm_allreduce`,
//! against cuBLASLt's product and then `ncclAllReduce`.

mod gpus;
mod simulated;

use anyhow::Result;
use clap::Args;

use super::Benchmark;
use super::all_reduce::bus;
use super::gpus::Gpus;
use super::machine::Job;
use super::row::Case;
use super::simulated::Simulated;
use super::variant::{Described, Variant};
use crate::problem::Problem;

/// The flags of `gemm-allreduce`. Every combination of the lists is run.
#[derive(Args, Clone, Debug)]
pub struct GemmAllReduce {
    /// Rows of A and C, with commas between [default: 512,4096; 1,130 when simulated]
    #[arg(long, value_delimiter = ',', value_name = "ROWS")]
    m: Vec<usize>,

    /// Rows of B, which are columns of C [default: 4096; 7,264 when simulated]
    #[arg(long, value_delimiter = ',', value_name = "COLUMNS")]
    n: Vec<usize>,

    /// Terms of each rank, the columns of its A and B, multiples of 8 [default: 1024,4096; 72 when simulated]
    #[arg(long, value_delimiter = ',', value_name = "TERMS")]
    k: Vec<usize>,
}

impl Benchmark for GemmAllReduce {
    const NAME: &'static str = "gemm-allreduce";
    const VARIANTS: &'static [Described] = &[
        (Variant::Rust, "one kernel, launched by devcomm::GemmAllReduce, C in a symmetric window"),
        (Variant::Nccl, "cuBLASLt, then ncclAllReduce in place, on memory that is not registered"),
        (Variant::NcclSym, "cuBLASLt, then ncclAllReduce in place, on a symmetric window"),
    ];

    fn validate(&self) -> Result<()> {
        self.problems([&[8]; 3], 1, 0).map(drop)
    }

    fn on_gpus(&self, job: &mut Job<'_, Gpus<'_>>) -> Result<()> {
        gpus::run(self, job)
    }

    fn simulated(&self, job: &mut Job<'_, Simulated>) -> Result<()> {
        simulated::run(self, job)
    }
}

impl GemmAllReduce {
    /// Every combination of the lists `m`, `n` and `k`, or of these where one is empty.
    fn problems(&self, default: [&[usize]; 3], ranks: usize, seed: u64) -> Result<Vec<Problem>> {
        let [m, n, k] = default;
        let lists = [(&self.m, m), (&self.n, n), (&self.k, k)]
            .map(|(given, default)| if given.is_empty() { default } else { given });
        Problem::combinations(lists, ranks, seed)
    }
}

fn case(problem: Problem, ranks: usize) -> Case {
    let Problem { m, n, k, .. } = problem;
    Case {
        size: m * n * size_of::<half::bf16>(),
        count: m * n,
        dtype: "bf16",
        redop: "sum",
        bus: bus(ranks),
        shape: Some([m, n, k]),
    }
}
