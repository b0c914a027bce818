//! Products in bf16 whose rows the ranks share: with a reduce-scatter of C, `GemmReduceScatter`
//! against cuBLASLt and then `ncclReduceScatter`, and after an all-gather of A, `AllGatherGemm`
//! against `ncclAllGather` and then cuBLASLt.

use devcomm::{
    AllGatherGemmPlan, Communicator, DeviceSlice, GemmReduceScatterPlan, Stream, Window,
};
use devcomm_testing::gemm::Problem;
use half::bf16;

use super::fusion::{Fusion, Requested, plan_of};
use super::operation;
use super::prelude::*;
use super::product::BF16_ROUNDING;
use super::shapes::ShapeOptions;
use crate::contenders::PeerOptions;

/// Declares a benchmark: its plans, the two extents that the operation is made for, and the
/// rounding of its products.
macro_rules! benchmarks {
    ($($operation:ident $plan:ident $collective:ident $name:literal {
        plans: $plans:literal, extents: $first:literal $second:literal, rounding: $rounding:expr,
        defaults: $defaults:expr,
    })*) => { $(
        #[doc = concat!("The flags of `", $name, "`. Every combination of the lists runs.")]
        #[derive(Args, Clone, Debug)]
        pub struct $operation {
            #[command(flatten)]
            shapes: ShapeOptions,

            /// What the L2 cache holds when a product begins
            #[arg(long, value_enum, default_value = "warm")]
            l2: L2,

            /// Plans of the operation, comma-separated, instead of its default, a row for each that
            /// can do the shape:
            #[doc = concat!($plans, ",")]
            /// or `measured`, the fastest by its `measure`
            #[arg(long = "plan", value_delimiter = ',', value_name = "PLAN")]
            plans: Vec<Requested<$plan>>,

            #[command(flatten)]
            peers: PeerOptions,
        }

        impl Fusion for $operation {
            const NAME: &'static str = $name;
            const COLLECTIVE: operation::Operation = operation::Operation::$collective;
            type Operation = devcomm::$operation;
            type Requested = Requested<$plan>;

            fn inputs(&self) -> (&ShapeOptions, L2, &PeerOptions) {
                (&self.shapes, self.l2, &self.peers)
            }

            fn asked(
                &self,
                _: (&Communicator, &Stream),
                _: [usize; 3],
            ) -> Result<Vec<Self::Requested>> {
                Ok(self.plans.clone())
            }

            fn defaults() -> [[&'static [usize]; 3]; 2] {
                $defaults
            }

            fn require(Problem { m, .. }: &Problem, ranks: usize) -> Result<()> {
                ensure!(m.is_multiple_of(ranks), "--m {m}: {ranks} ranks share the rows");
                Ok(())
            }

            fn new(
                comm: &Communicator,
                stream: &Stream,
                shape: [usize; 3],
                _: Option<&Requested<$plan>>,
            ) -> Result<Self::Operation> {
                Ok(devcomm::$operation::new(comm, stream, shape[$first], shape[$second])?)
            }

            fn set(
                operation: &Self::Operation,
                asked: &Requested<$plan>,
                ([a, b], c): ([&DeviceSlice<bf16>; 2], &Window<bf16>),
                shape: [usize; 3],
            ) -> Result<Result<(), String>> {
                let set = |plan| {
                    operation.set_plan(Some(plan))?;
                    operation.explain(shape)
                };
                asked.set(|| operation.measure(a, b, c, shape), set)
            }

            fn plan(operation: &Self::Operation, shape: [usize; 3]) -> (String, Option<f64>) {
                (plan_of(operation.explain(shape), ""), $rounding)
            }

            fn launch(
                operation: &Self::Operation,
                [a, b]: [&DeviceSlice<bf16>; 2],
                c: &Window<bf16>,
                shape: [usize; 3],
            ) -> devcomm::Result<()> {
                operation.launch(a, b, c, shape)
            }
        }
    )* };
}

benchmarks! {
    GemmReduceScatter GemmReduceScatterPlan ReduceScatter "gemm-reduce-scatter" {
        plans: "`unfused`, `wide`",
        extents: 0 1,
        rounding: Some(BF16_ROUNDING),
        defaults: [[&[8192], &[8192], &[1024, 4096]], [&[8, 512], &[264], &[72]]],
    }
    AllGatherGemm AllGatherGemmPlan AllGather "allgather-gemm" {
        plans: "`unfused`, `fused`",
        extents: 0 2,
        rounding: None,
        defaults: [[&[8192], &[4096], &[2048, 4096, 8192]], [&[8, 260], &[264], &[72]]],
    }
}
