//! All-gather of A's rows followed by a matrix product, in bf16: `devcomm::AllGatherGemm` against
//! `ncclAllGather` and then cuBLASLt's product.

use anyhow::{Result, ensure};
use clap::Args;
use devcomm::{
    AllGatherGemm as Operation, AllGatherGemmPlan, Communicator, DeviceSlice, Stream, Window,
};
use devcomm_testing::gemm::Problem;
use half::bf16;

use super::fusion::{self, Asked, Collective, Fusion};
use super::job::Job;
use super::row::L2;
use super::selection::{Selection, VariantInfo};
use super::shapes::ShapeOptions;
use super::{Benchmark, Options};
use crate::contender::Variant;
use crate::foreign::Foreign;
use crate::torch::TorchOptions;

/// The flags of `allgather-gemm`: `n` is the columns of each rank. Every combination of the lists
/// runs.
#[derive(Args, Clone, Debug)]
pub struct AllGatherGemm {
    #[command(flatten)]
    shapes: ShapeOptions,

    /// What the L2 cache holds when a product begins
    #[arg(long, value_enum, default_value = "warm")]
    l2: L2,

    /// Plans of devcomm::AllGatherGemm, comma-separated, instead of its default, a row for each
    /// that can do the shape: `unfused`, `fused`, or `measured`, the fastest by
    /// AllGatherGemm::measure
    #[arg(long = "plan", value_delimiter = ',', value_name = "PLAN")]
    plans: Vec<Asked<AllGatherGemmPlan>>,

    #[command(flatten)]
    torch: TorchOptions,
}

impl Benchmark for AllGatherGemm {
    const NAME: &'static str = "allgather-gemm";
    const VARIANTS: &'static [VariantInfo] = &[
        (Variant::Rust, "devcomm::AllGatherGemm, by its default or by the plans of --plan"),
        (Variant::RustGemm, "devcomm::Gemm alone, where all ranks have all rows"),
        (
            Variant::CublasLtRust,
            "devcomm::Collectives::all_gather on symmetric windows, then cuBLASLt",
        ),
        (Variant::Nccl, "ncclAllGather on memory that is not registered, then cuBLASLt"),
        (Variant::NcclSym, "ncclAllGather on symmetric windows, then cuBLASLt"),
        (
            Variant::TorchFused,
            "torch.ops.symm_mem.fused_all_gather_matmul, in a run before the others",
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

impl Fusion for AllGatherGemm {
    const COLLECTIVE: Collective = Collective::AllGather;
    const OF_TORCH: &'static [Variant] = &[Variant::TorchFused];
    type Operation = Operation;
    type Asked = Asked<AllGatherGemmPlan>;

    fn torch(&self) -> &TorchOptions {
        &self.torch
    }

    fn inputs(&self) -> (&ShapeOptions, L2) {
        (&self.shapes, self.l2)
    }

    fn asked(&self) -> Vec<Asked<AllGatherGemmPlan>> {
        self.plans.clone()
    }

    fn defaults() -> [[&'static [usize]; 3]; 2] {
        [[&[8192], &[4096], &[2048, 4096, 8192]], [&[8, 260], &[264], &[72]]]
    }

    fn require(Problem { m, .. }: &Problem, ranks: usize) -> Result<()> {
        ensure!(m.is_multiple_of(ranks), "--m {m}: {ranks} ranks share the rows");
        Ok(())
    }

    fn new(
        comm: &Communicator,
        stream: &Stream,
        [m, _, k]: [usize; 3],
        _: Option<&Asked<AllGatherGemmPlan>>,
    ) -> Result<Operation> {
        Ok(Operation::new(comm, stream, m, k)?)
    }

    fn set(
        operation: &Operation,
        asked: &Asked<AllGatherGemmPlan>,
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
        (operation.explain(shape).plan.to_string(), None)
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
