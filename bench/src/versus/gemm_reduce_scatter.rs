//! Matrix product followed by the reduce-scatter of its rows, in bf16:
//! `devcomm::GemmReduceScatter` against cuBLASLt's product and then `ncclReduceScatter`.

use anyhow::{Result, ensure};
use clap::Args;
use devcomm::{
    Buffer, Collectives, DataType, DeviceSlice, GemmReduceScatter as Fused, GemmReduceScatterPlan,
    ReduceOp,
};
use half::bf16;

use super::Benchmark;
use super::job::Job;
use super::product::{Matrices, Product, Sum, load_cublaslt, tune};
use super::row::{Case, L2};
use super::selection::VariantInfo;
use super::shapes::ShapeOptions;
use crate::contender::{Contender, Variant};
use crate::cublaslt::Types;

/// The flags of `gemm-reduce-scatter`. Every combination of the lists runs.
#[derive(Args, Clone, Debug)]
pub struct GemmReduceScatter {
    #[command(flatten)]
    shapes: ShapeOptions,

    /// What the L2 cache holds when a product begins
    #[arg(long, value_enum, default_value = "warm")]
    l2: L2,

    /// Plans of devcomm::GemmReduceScatter, comma-separated, instead of its default, a row for
    /// each that can do the shape: `unfused` or `wide`
    #[arg(long = "plan", value_delimiter = ',', value_name = "PLAN")]
    plans: Vec<GemmReduceScatterPlan>,
}

/// The variants with cuBLASLt's product.
const OF_CUBLASLT: [Variant; 3] = [Variant::CublasLtRust, Variant::Nccl, Variant::NcclSym];

impl Benchmark for GemmReduceScatter {
    const NAME: &'static str = "gemm-reduce-scatter";
    const VARIANTS: &'static [VariantInfo] = &[
        (Variant::Rust, "devcomm::GemmReduceScatter, by its default or by the plans of --plan"),
        (
            Variant::CublasLtRust,
            "cuBLASLt, then devcomm::Collectives::reduce_scatter, on a symmetric window",
        ),
        (Variant::Nccl, "cuBLASLt, then ncclReduceScatter, on memory that is not registered"),
        (Variant::NcclSym, "cuBLASLt, then ncclReduceScatter, on symmetric windows"),
    ];

    fn validate(&self) -> Result<()> {
        self.shapes.problems([&[8]; 3], size_of::<bf16>(), 1, 0).map(drop)
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        let harness = job.harness;
        let (comm, stream) = (harness.comm, &harness.stream);
        comm.require_single_lsa_team()?;
        let types = |product| Types { factors: DataType::Bfloat16, product };
        let (exact, rounded) = (types(DataType::Float32), types(DataType::Bfloat16));
        let library = load_cublaslt(job, rounded, &OF_CUBLASLT)?;
        let collectives = &Collectives::new(comm)?;
        job.begin()?;
        let defaults: [&[usize]; 3] =
            harness.choose([&[8192], &[8192], &[1024, 4096]], [&[8, 512], &[264], &[72]]);
        let (ranks, seed) = (harness.rank.n_ranks(), harness.run.seed);
        let mut kept = None;
        for problem in self.shapes.problems(defaults, size_of::<bf16>(), ranks, seed)? {
            let shape @ [m, n, _] = problem.shape();
            ensure!(m.is_multiple_of(ranks), "--m {m}: {ranks} ranks share the rows");
            let copies = self.l2.copies_of_b(harness, &problem, size_of::<bf16>())?;
            let matrices = &Matrices::new(harness, problem, copies, &mut kept)?;
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
                Some(exact) if harness.run.check > 0 => Some(Sum::new(matrices, exact)?),
                _ => None,
            };
            let part = m / ranks;
            let first = harness.rank.rank() * part;
            let result = |c: DeviceSlice<bf16>| Product {
                rows: first..first + part,
                rounded_once: false,
                ..Product::new(matrices, c, sum.as_ref())
            };
            let windows = (comm.window::<bf16>(m * n)?, comm.window::<bf16>(part * n)?);
            if let Some(plan) = &theirs {
                tune(matrices, plan, windows.0.device_address())?;
            }
            let mut contenders = Vec::new();
            let mut plans: Vec<_> = self.plans.iter().copied().map(Some).collect();
            if plans.is_empty() {
                plans.push(None);
            }
            for asked in plans.into_iter().filter(|_| job.selection.has(Variant::Rust)) {
                let fused = Fused::new(comm, stream, m, n)?;
                fused.set_plan(asked)?;
                let how = fused.explain(shape);
                if let Some(asked) = asked.filter(|asked| how.plan != *asked) {
                    if harness.rank.is_root() {
                        println!("# left out: {asked} of {shape:?}: {}", how.reason);
                    }
                    continue;
                }
                let (c, b) = (comm.mem_alloc::<bf16>(part * n)?, matrices.b_in_turn());
                let checked = result(c.device_slice());
                // SAFETY: the graphs of a comparison end before its contenders, which own or
                // borrow these buffers, and are launched on one stream.
                let work = move || unsafe { fused.launch_capturable(&matrices.a, b(), &c, shape) };
                let contender = Contender::new(Variant::Rust, work, checked);
                contenders.push(contender.by_algorithm(how.plan.to_string()));
            }
            for variant in OF_CUBLASLT.into_iter().filter(|variant| job.selection.has(*variant)) {
                let Some(plan) = &theirs else { continue };
                let (product, c) = match variant {
                    Variant::Nccl => {
                        let memory = (comm.mem_alloc(m * n)?, comm.mem_alloc(part * n)?);
                        (memory.0.device_slice(), memory.1.device_slice())
                    }
                    _ => (windows.0.device_slice(), windows.1.device_slice()),
                };
                let (a, b) = (matrices.a.device_address(), matrices.b_in_turn());
                let checked = result(c.clone());
                let work = move || {
                    let addresses = [a, b().device_address(), product.device_address()];
                    // SAFETY: the buffers have the elements of the plan's shape, and only this
                    // stream uses them.
                    unsafe { plan.enqueue(addresses, stream)? };
                    match variant {
                        Variant::CublasLtRust => {
                            collectives.reduce_scatter(&product, &c, ReduceOp::Sum, stream)
                        }
                        _ => comm.reduce_scatter(&product, &c, ReduceOp::Sum, stream),
                    }
                };
                let contender = Contender::new(variant, work, checked);
                contenders.push(contender.by_algorithm(plan.describe()));
            }
            let case = Case {
                size: m * n * size_of::<bf16>(),
                count: m * n,
                dtype: "bf16",
                redop: "sum",
                bus: (ranks - 1) as f64 / ranks as f64,
                shape: Some(shape),
                l2: Some(self.l2),
            };
            job.compare_refilled(case, &contenders, || matrices.fill_for_timing())?;
        }
        Ok(())
    }
}
