//! Matrix product followed by the reduce-scatter of its rows, in bf16:
//! `devcomm::GemmReduceScatter` against cuBLASLt's product and then `ncclReduceScatter`.

use anyhow::{Result, ensure};
use clap::Args;
use devcomm::{
    Communicator, DeviceSlice, GemmReduceScatter as Operation, GemmReduceScatterPlan, Stream,
    Window,
};
use devcomm_testing::gemm::Problem;
use half::bf16;

use super::fusion::{self, Asked, Collective, Fusion};
use super::job::Job;
use super::product::BF16_LOSES;
use super::row::L2;
use super::selection::{Selection, VariantInfo};
use super::shapes::ShapeOptions;
use super::{Benchmark, Options};
use crate::contender::Variant;
use crate::foreign::Foreign;
use crate::torch::TorchOptions;

/// The flags of `gemm-reduce-scatter`. Every combination of the lists runs.
#[derive(Args, Clone, Debug)]
pub struct GemmReduceScatter {
    #[command(flatten)]
    shapes: ShapeOptions,

    /// What the L2 cache holds when a product begins
    #[arg(long, value_enum, default_value = "warm")]
    l2: L2,

    /// Plans of devcomm::GemmReduceScatter, comma-separated, instead of its default, a row for
    /// each that can do the shape: `unfused`, `wide`, or `measured`, the fastest by
    /// GemmReduceScatter::measure
    #[arg(long = "plan", value_delimiter = ',', value_name = "PLAN")]
    plans: Vec<Asked<GemmReduceScatterPlan>>,

    #[command(flatten)]
    torch: TorchOptions,
}

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
        (
            Variant::TorchFused,
            "torch.ops.symm_mem.fused_matmul_reduce_scatter, in a run before the others",
        ),
    ];

    fn validate(&self) -> Result<()> {
        fusion::problems(self, [&[8]; 3], 1, 0).map(drop)
    }

    fn foreign(&self, options: &Options, selection: &Selection) -> Result<Vec<Foreign>> {
        fusion::foreign(self, options, selection)
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        fusion::compare(self, job)
    }
}

impl Fusion for GemmReduceScatter {
    const COLLECTIVE: Collective = Collective::ReduceScatter;
    const OF_TORCH: &'static [Variant] = &[Variant::TorchFused];
    type Operation = Operation;
    type Asked = Asked<GemmReduceScatterPlan>;

    fn torch(&self) -> &TorchOptions {
        &self.torch
    }

    fn inputs(&self) -> (&ShapeOptions, L2) {
        (&self.shapes, self.l2)
    }

    fn asked(&self) -> Vec<Asked<GemmReduceScatterPlan>> {
        self.plans.clone()
    }

    fn defaults() -> [[&'static [usize]; 3]; 2] {
        [[&[8192], &[8192], &[1024, 4096]], [&[8, 512], &[264], &[72]]]
    }

    fn require(Problem { m, .. }: &Problem, ranks: usize) -> Result<()> {
        ensure!(m.is_multiple_of(ranks), "--m {m}: {ranks} ranks share the rows");
        Ok(())
    }

    fn new(
        comm: &Communicator,
        stream: &Stream,
        [m, n, _]: [usize; 3],
        _: Option<&Asked<GemmReduceScatterPlan>>,
    ) -> Result<Operation> {
        Ok(Operation::new(comm, stream, m, n)?)
    }

    fn set(
        operation: &Operation,
        asked: &Asked<GemmReduceScatterPlan>,
        ([a, b], c): ([&DeviceSlice<bf16>; 2], &Window<bf16>),
        shape: [usize; 3],
    ) -> Result<Result<(), String>> {
        let set = |plan| {
            operation.set_plan(Some(plan))?;
            Ok(operation.explain(shape))
        };
        asked.set(|| operation.measure(a, b, c, shape), set)
    }

    fn plan(operation: &Operation, shape: [usize; 3]) -> (String, Option<f64>) {
        (operation.explain(shape).plan.to_string(), Some(BF16_LOSES))
    }

    fn launch(
        operation: &Operation,
        [a, b]: [&DeviceSlice<bf16>; 2],
        c: &Window<bf16>,
        shape: [usize; 3],
    ) -> devcomm::Result<()> {
        operation.launch(a, b, c, shape)
    }
}
