//! Matrix product on one GPU, `C = A x B^T` in bf16: `kernels/src/gemm` against cuBLASLt.

use anyhow::{Result, ensure};
use clap::Args;
use devcomm::{Buffer, Gemm as Kernel};
use devcomm_testing::gemm::Problem;
use half::bf16;

use super::Benchmark;
use super::job::Job;
use super::product::{Matrices, Product, Sum, lists_or, load_cublaslt};
use super::row::Case;
use super::selection::VariantInfo;
use crate::contender::{Contender, Variant};
use crate::cublaslt::Output;

/// The flags of `gemm`. Every combination of the lists runs.
#[derive(Args, Clone, Debug)]
pub struct Gemm {
    /// Rows of A and C, comma-separated [default: 4096,8192; 1,130 when simulated]
    #[arg(long, value_delimiter = ',', value_name = "ROWS")]
    m: Vec<usize>,

    /// Rows of B, which are columns of C, multiples of 8 [default: 4096,8192; 8,264 when simulated]
    #[arg(long, value_delimiter = ',', value_name = "COLUMNS")]
    n: Vec<usize>,

    /// Columns of A and B (the terms of the sums), multiples of 8 [default: 1024,4096; 72 when
    /// simulated]
    #[arg(long, value_delimiter = ',', value_name = "TERMS")]
    k: Vec<usize>,
}

impl Benchmark for Gemm {
    const NAME: &'static str = "gemm";
    const VARIANTS: &'static [VariantInfo] = &[
        (Variant::Rust, "a kernel in Rust, launched by devcomm::Gemm"),
        (Variant::CublasLt, "cuBLASLt, with the first algorithm of its heuristics"),
    ];

    fn validate(&self) -> Result<()> {
        self.problems([&[8]; 3], 0).map(drop)
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        let harness = job.harness;
        ensure!(harness.rank.n_ranks() == 1, "gemm runs on one GPU: -g 1");
        let library = load_cublaslt(job, &[Variant::CublasLt])?;
        job.begin()?;
        let defaults: [&[usize]; 3] = harness
            .choose([&[4096, 8192], &[4096, 8192], &[1024, 4096]], [&[1, 130], &[8, 264], &[72]]);
        let ours = job.selection.has(Variant::Rust).then(|| Kernel::new(&harness.stream));
        let ours = ours.transpose()?;
        for problem in self.problems(defaults, harness.run.seed)? {
            let shape @ [m, n, _] = problem.shape();
            let matrices = Matrices::new(harness, problem)?;
            let plan = |output| match &library {
                Some(library) => library.plan(shape, output),
                None => Ok(None),
            };
            let (exact, theirs) = (plan(Output::F32)?, plan(Output::Bf16)?);
            let sum = match &exact {
                Some(exact) if harness.run.check > 0 => Some(Sum::new(&matrices, exact)?),
                _ => None,
            };
            let (a, b, stream) = (&matrices.a, &matrices.b, &harness.stream);
            let mut contenders = Vec::new();
            let sum = sum.as_ref();
            let result = |c| Product { matrices: &matrices, c, sum, rounded_once: true };
            if let Some(gemm) = &ours {
                let c = harness.comm.mem_alloc::<bf16>(m * n)?;
                let checked = result(c.device_slice());
                // SAFETY: the graphs of a comparison end before its contenders, which own or borrow
                // these buffers.
                let work = move || unsafe { gemm.launch_capturable(a, b, &c, shape) };
                contenders.push(Contender::new(Variant::Rust, work, checked));
            }
            if let Some(plan) = theirs.as_ref().filter(|_| job.selection.has(Variant::CublasLt)) {
                let c = harness.comm.mem_alloc::<bf16>(m * n)?;
                let checked = result(c.device_slice());
                // SAFETY: as above; the buffers have the elements of the plan's shape.
                let work = move || unsafe { plan.enqueue(a, b, c.device_address(), stream) };
                contenders.push(Contender::new(Variant::CublasLt, work, checked));
            }
            let case = Case {
                size: m * n * size_of::<bf16>(),
                count: m * n,
                dtype: "bf16",
                redop: "sum",
                bus: 1.0,
                shape: Some(shape),
            };
            job.compare_refilled(case, &contenders, || matrices.fill_for_timing())?;
        }
        Ok(())
    }
}

impl Gemm {
    /// Every combination of `m`, `n` and `k`, with defaults for empty lists.
    fn problems(&self, default: [&[usize]; 3], seed: u64) -> Result<Vec<Problem>> {
        let lists = lists_or([&self.m, &self.n, &self.k], default);
        let n = lists[1].iter().find(|n| !n.is_multiple_of(8));
        ensure!(n.is_none(), "--n {}: rows of C need a multiple of 8 elements", n.unwrap_or(&0));
        Problem::combinations(lists, 1, seed)
    }
}
