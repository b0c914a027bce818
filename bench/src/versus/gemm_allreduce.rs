//! Matrix product followed by all-reduce, `C = sum over the ranks of A x B^T` in bf16: one kernel,
//! `kernels/src/gemm_allreduce`, against cuBLASLt's product and then `ncclAllReduce`.

use std::str::FromStr;

use anyhow::{Result, ensure};
use clap::Args;
use devcomm::{
    Buffer, Collectives, DataType, DeviceSlice, Gemm, GemmAllReduce as Fused, GemmAllReducePlan,
    ParseGemmAllReducePlanError, ReduceOp, Window,
};
use devcomm_testing::gemm::Problem;
use half::bf16;

use super::Benchmark;
use super::all_reduce::bus;
use super::job::Job;
use super::product::{Matrices, Product, Sum, load_cublaslt, tune};
use super::row::{Case, L2};
use super::selection::VariantInfo;
use super::shapes::ShapeOptions;
use crate::contender::{Contender, Variant};
use crate::cublaslt::Types;

/// The flags of `gemm-allreduce`. Every combination of the lists runs.
#[derive(Args, Clone, Debug)]
pub struct GemmAllReduce {
    #[command(flatten)]
    shapes: ShapeOptions,

    /// What the L2 cache holds when a product begins
    #[arg(long, value_enum, default_value = "warm")]
    l2: L2,

    /// Plans of devcomm::GemmAllReduce, comma-separated, instead of its default, a row for each
    /// that can do the shape: `strips`, `wide`, `unfused`, `swapped:<rows>x<columns>:<splits>` as
    /// of `gemm`, or `swapped`, with the tile by which devcomm::Gemm multiplies
    #[arg(long = "plan", value_delimiter = ',', value_name = "PLAN")]
    plans: Vec<Asked>,
}

/// A plan that was asked for.
#[derive(Clone, Copy, Debug)]
enum Asked {
    Plan(GemmAllReducePlan),
    /// The first one for few rows.
    Swapped,
}

impl FromStr for Asked {
    type Err = ParseGemmAllReducePlanError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "swapped" => Ok(Self::Swapped),
            _ => text.parse().map(Self::Plan),
        }
    }
}

impl Asked {
    /// The plan for a shape, which has these.
    fn find(self, plans: &[GemmAllReducePlan]) -> Option<GemmAllReducePlan> {
        plans.iter().copied().find(|plan| match self {
            Self::Plan(asked) => *plan == asked,
            Self::Swapped => matches!(plan, GemmAllReducePlan::Swapped { .. }),
        })
    }
}

impl Benchmark for GemmAllReduce {
    const NAME: &'static str = "gemm-allreduce";
    const VARIANTS: &'static [VariantInfo] = &[
        (Variant::Rust, "one kernel, launched by devcomm::GemmAllReduce, C in a symmetric window"),
        (
            Variant::RustUnfused,
            "devcomm::Gemm, then devcomm::Collectives::all_reduce in place, on a symmetric window",
        ),
        (
            Variant::CublasLtRust,
            "cuBLASLt, then devcomm::Collectives::all_reduce in place, on a symmetric window",
        ),
        (Variant::Nccl, "cuBLASLt, then ncclAllReduce in place, on memory that is not registered"),
        (Variant::NcclSym, "cuBLASLt, then ncclAllReduce in place, on a symmetric window"),
    ];

    fn validate(&self) -> Result<()> {
        self.problems([&[8]; 3], 1, 0).map(drop)
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        let harness = job.harness;
        let (comm, stream) = (harness.comm, &harness.stream);
        comm.require_single_lsa_team()?;
        let types = |product| Types { factors: DataType::Bfloat16, product };
        let (exact, rounded) = (types(DataType::Float32), types(DataType::Bfloat16));
        let library = load_cublaslt(job, rounded, &OF_CUBLASLT)?;
        let collectives = &Collectives::new(comm)?;
        // SAFETY: what writes B has ended before any launch.
        let gemm = &unsafe { Gemm::new(stream)?.with_constant_b() };
        job.begin()?;
        let defaults: [&[usize]; 3] =
            harness.choose([&[512, 4096], &[4096], &[1024, 4096]], [&[1, 130], &[7, 264], &[72]]);
        let ranks = harness.rank.n_ranks();
        let mut kept = None;
        for problem in self.problems(defaults, ranks, harness.run.seed)? {
            let shape @ [m, n, _] = problem.shape();
            let copies = self.l2.copies_of_b(harness, &problem, size_of::<bf16>())?;
            let matrices = Matrices::new(harness, problem, copies, &mut kept)?;
            let plan = |types| match &library {
                Some(library) => library.plan(shape, types, None),
                None => Ok(None),
            };
            // `exact` is for checks; `theirs` are omitted if cuBLASLt has no algorithm.
            let (exact, theirs) = (plan(exact)?, plan(rounded)?);
            if library.is_some() && theirs.is_none() && harness.rank.is_root() {
                println!("# left out: cuBLASLt's variants of {shape:?}: it has no algorithm");
            }
            let sum = match &exact {
                Some(exact) if harness.run.check > 0 => Some(Sum::new(&matrices, exact)?),
                _ => None,
            };
            let sum = sum.as_ref();
            let c = &comm.window::<bf16>(m * n)?;
            if let Some(plan) = &theirs {
                tune(&matrices, plan, c.device_address())?;
            }
            let mut contenders = Vec::new();
            if job.selection.has(Variant::Rust) {
                // SAFETY: what writes B has ended before any launch.
                let new = || Fused::new(comm, stream, m, n).map(|f| unsafe { f.with_constant_b() });
                if self.plans.is_empty() {
                    contenders.push(fused(&matrices, new()?, c, sum));
                }
                for asked in &self.plans {
                    let gemm = new()?;
                    let Some(plan) = asked.find(&gemm.plans(shape)?) else {
                        if harness.rank.is_root() {
                            println!("# left out: {asked:?} of {shape:?}: it cannot do it here");
                        }
                        continue;
                    };
                    gemm.set_plan(Some(plan))?;
                    contenders.push(fused(&matrices, gemm, c, sum));
                }
            }
            let by_nccl = |c: &_| comm.all_reduce(c, c, ReduceOp::Sum, stream);
            let by_kernels = |c: &_| collectives.all_reduce(c, c, ReduceOp::Sum, stream);
            if job.selection.has(Variant::RustUnfused) {
                let (a, b, product) = (&matrices.a, matrices.b_in_turn(), gemm.product(shape));
                // SAFETY: the graphs of a comparison end before its contenders, which own or borrow
                // these buffers.
                let multiply = move |c: &_| unsafe { product.launch_capturable(a, b(), c) };
                let parts = (multiply, by_kernels);
                contenders.push(unfused(Variant::RustUnfused, &matrices, c, parts, sum));
            }
            for variant in OF_CUBLASLT.into_iter().filter(|variant| job.selection.has(*variant)) {
                let Some(plan) = &theirs else { continue };
                let (a, b) = (matrices.a.device_address(), matrices.b_in_turn());
                let multiply = move |c: &DeviceSlice<bf16>| {
                    // SAFETY: the buffers have the elements of the plan's shape, and only this
                    // stream uses them.
                    unsafe { plan.enqueue([a, b().device_address(), c.device_address()], stream) }
                };
                let contender = match variant {
                    Variant::CublasLtRust => {
                        unfused(variant, &matrices, c, (multiply, by_kernels), sum)
                    }
                    Variant::NcclSym => unfused(variant, &matrices, c, (multiply, by_nccl), sum),
                    _ => {
                        let c = comm.mem_alloc(c.len())?;
                        unfused(variant, &matrices, &c, (multiply, by_nccl), sum)
                    }
                };
                contenders.push(contender.by_algorithm(plan.describe()));
            }
            let case = Case {
                size: m * n * size_of::<bf16>(),
                count: m * n,
                dtype: "bf16",
                redop: "sum",
                bus: bus(ranks),
                shape: Some(shape),
                l2: Some(self.l2),
            };
            job.compare_refilled(case, &contenders, || matrices.fill_for_timing())?;
        }
        Ok(())
    }
}

/// The variants with cuBLASLt's product.
const OF_CUBLASLT: [Variant; 3] = [Variant::CublasLtRust, Variant::Nccl, Variant::NcclSym];

impl GemmAllReduce {
    /// The problems, with defaults for empty lists of `m`, `n` and `k`.
    fn problems(&self, default: [&[usize]; 3], ranks: usize, seed: u64) -> Result<Vec<Problem>> {
        let problems = self.shapes.problems(default, size_of::<bf16>(), ranks, seed)?;
        for Problem { k, .. } in &problems {
            ensure!(k.is_multiple_of(8), "--k {k}: rows of A and B need a multiple of 8 elements");
        }
        Ok(problems)
    }
}

/// One kernel, or what another plan launches.
fn fused<'a>(
    matrices: &'a Matrices<'a, bf16>,
    gemm: Fused,
    c: &'a Window<bf16>,
    sum: Option<&'a Sum>,
) -> Contender<'a> {
    let (Matrices { problem, a, .. }, b) = (matrices, matrices.b_in_turn());
    let plan = gemm.explain(problem.shape()).plan;
    // SAFETY: the graphs of a comparison end before its contenders, which own or borrow these
    // buffers, and are launched on one stream.
    let work = move || unsafe { gemm.launch_capturable(a, b(), c, problem.shape()) };
    let rounded_once = plan == GemmAllReducePlan::Strips;
    let product = Product { rounded_once, ..Product::new(matrices, c.device_slice(), sum) };
    Contender::new(Variant::Rust, work, product).by_algorithm(plan.to_string())
}

/// A product on every rank, and then their sum: `parts` enqueue the two, the sum in place.
fn unfused<'a, B: Buffer<Element = bf16>>(
    variant: Variant,
    matrices: &Matrices<'a, bf16>,
    c: &B,
    (multiply, reduce): (
        impl Fn(&DeviceSlice<bf16>) -> devcomm::Result<()> + 'a,
        impl Fn(&DeviceSlice<bf16>) -> devcomm::Result<()> + 'a,
    ),
    sum: Option<&'a Sum>,
) -> Contender<'a> {
    let c = c.device_slice();
    let product = Product { rounded_once: false, ..Product::new(matrices, c.clone(), sum) };
    Contender::new(variant, move || multiply(&c).and_then(|()| reduce(&c)), product)
}
