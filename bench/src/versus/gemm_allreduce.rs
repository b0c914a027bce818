//! Matrix product followed by all-reduce, `C = sum over the ranks of A x B^T` in bf16: one kernel,
//! `kernels/src/gemm_allreduce`, against cuBLASLt's product and then `ncclAllReduce`.

use anyhow::Result;
use clap::Args;
use devcomm::{Buffer, DataType, DeviceSlice, GemmAllReduce as Gemm, ReduceOp, Window};
use devcomm_testing::gemm::Problem;
use half::bf16;

use super::Benchmark;
use super::all_reduce::bus;
use super::job::Job;
use super::product::{Matrices, Product, Sum, load_cublaslt, tune};
use super::row::Case;
use super::selection::VariantInfo;
use super::shapes::lists_or;
use crate::contender::{Contender, Variant};
use crate::cublaslt::{Plan, Types};
use crate::harness::Harness;

/// The flags of `gemm-allreduce`. Every combination of the lists runs.
#[derive(Args, Clone, Debug)]
pub struct GemmAllReduce {
    /// Rows of A and C, comma-separated [default: 512,4096; 1,130 when simulated]
    #[arg(long, value_delimiter = ',', value_name = "ROWS")]
    m: Vec<usize>,

    /// Rows of B, which are columns of C [default: 4096; 7,264 when simulated]
    #[arg(long, value_delimiter = ',', value_name = "COLUMNS")]
    n: Vec<usize>,

    /// Columns of each rank's A and B (the terms of its sums), multiples of 8 [default: 1024,4096;
    /// 72 when simulated]
    #[arg(long, value_delimiter = ',', value_name = "TERMS")]
    k: Vec<usize>,
}

impl Benchmark for GemmAllReduce {
    const NAME: &'static str = "gemm-allreduce";
    const VARIANTS: &'static [VariantInfo] = &[
        (Variant::Rust, "one kernel, launched by devcomm::GemmAllReduce, C in a symmetric window"),
        (Variant::Nccl, "cuBLASLt, then ncclAllReduce in place, on memory that is not registered"),
        (Variant::NcclSym, "cuBLASLt, then ncclAllReduce in place, on a symmetric window"),
    ];

    fn validate(&self) -> Result<()> {
        self.problems([&[8]; 3], 1, 0).map(drop)
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        let harness = job.harness;
        harness.comm.require_single_lsa_team()?;
        let types = |product| Types { factors: DataType::Bfloat16, product };
        let (exact, rounded) = (types(DataType::Float32), types(DataType::Bfloat16));
        let library = load_cublaslt(job, rounded, &[Variant::Nccl, Variant::NcclSym])?;
        job.begin()?;
        let defaults: [&[usize]; 3] =
            harness.choose([&[512, 4096], &[4096], &[1024, 4096]], [&[1, 130], &[7, 264], &[72]]);
        let ranks = harness.rank.n_ranks();
        let mut kept = None;
        for problem in self.problems(defaults, ranks, harness.run.seed)? {
            let shape @ [m, n, _] = problem.shape();
            let matrices = Matrices::new(harness, problem, 1, &mut kept)?;
            let plan = |types| match &library {
                Some(library) => library.plan(shape, types, None),
                None => Ok(None),
            };
            // `exact` is for checks, `product` for NCCL's variants, which are omitted if cuBLASLt
            // has no algorithm for the shape.
            let (exact, product) = (plan(exact)?, plan(rounded)?);
            if library.is_some() && product.is_none() && harness.rank.is_root() {
                println!("# left out: nccl, nccl-sym of {shape:?}: cuBLASLt has no algorithm");
            }
            let sum = match &exact {
                Some(exact) if harness.run.check > 0 => Some(Sum::new(&matrices, exact)?),
                _ => None,
            };
            let sum = sum.as_ref();
            let c = harness.comm.window::<bf16>(m * n)?;
            if let Some(plan) = &product {
                tune(&matrices, plan, c.device_address())?;
            }
            let mut contenders = Vec::new();
            if job.selection.has(Variant::Rust) {
                let gemm = Gemm::new(harness.comm, &harness.stream, m, n)?;
                contenders.push(fused(&matrices, gemm, &c, sum));
            }
            if let Some(plan) = &product {
                if job.selection.has(Variant::Nccl) {
                    let c = harness.comm.mem_alloc(c.len())?.device_slice();
                    contenders.push(unfused(Variant::Nccl, &matrices, plan, c, sum));
                }
                if job.selection.has(Variant::NcclSym) {
                    let c = c.device_slice();
                    contenders.push(unfused(Variant::NcclSym, &matrices, plan, c, sum));
                }
            }
            let case = Case {
                size: m * n * size_of::<bf16>(),
                count: m * n,
                dtype: "bf16",
                redop: "sum",
                bus: bus(ranks),
                shape: Some(shape),
                l2: None,
            };
            job.compare_refilled(case, &contenders, || matrices.fill_for_timing())?;
        }
        Ok(())
    }
}

impl GemmAllReduce {
    /// Every combination of `m`, `n` and `k`, with defaults for empty lists.
    fn problems(&self, default: [&[usize]; 3], ranks: usize, seed: u64) -> Result<Vec<Problem>> {
        let lists = lists_or([&self.m, &self.n, &self.k], default);
        Problem::combinations(lists, ranks, seed)
    }
}

/// One kernel.
fn fused<'a>(
    matrices: &'a Matrices<'a, bf16>,
    gemm: Gemm,
    c: &'a Window<bf16>,
    sum: Option<&'a Sum>,
) -> Contender<'a> {
    let (Matrices { problem, a, .. }, b) = (matrices, matrices.b_in_turn());
    // SAFETY: the graphs of a comparison end before its contenders, which own or borrow these
    // buffers, and are launched on one stream.
    let work = move || unsafe { gemm.launch_capturable(a, b(), c, problem.shape()) };
    let product = Product::new(matrices, c.device_slice(), sum);
    Contender::new(Variant::Rust, work, product)
}

/// cuBLASLt, and then NCCL.
fn unfused<'a>(
    variant: Variant,
    matrices: &'a Matrices<'a, bf16>,
    plan: &'a Plan<'a>,
    c: DeviceSlice<bf16>,
    sum: Option<&'a Sum>,
) -> Contender<'a> {
    let Matrices { harness: Harness { comm, stream, .. }, a, .. } = matrices;
    let b = matrices.b_in_turn();
    let product = Product { rounded_once: false, ..Product::new(matrices, c.clone(), sum) };
    let work = move || {
        // SAFETY: the buffers have the elements of the plan's shape, and only this stream uses
        // them.
        unsafe {
            let addresses = [a.device_address(), b().device_address(), c.device_address()];
            plan.enqueue(addresses, stream)?;
        }
        comm.all_reduce(&c, &c, ReduceOp::Sum, stream)
    };
    Contender::new(variant, work, product).by_algorithm(plan.describe())
}
