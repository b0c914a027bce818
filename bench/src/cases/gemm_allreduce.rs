//! Matrix product followed by all-reduce, `C = sum over the ranks of A x B^T` in bf16: one kernel,
//! `kernels/src/gemm_allreduce`, against cuBLASLt's product and then `ncclAllReduce`.

use std::fmt;

use devcomm::{
    Communicator, DeviceSlice, GemmAllReduce as Operation, GemmAllReducePlan, GemmOptions, Stream,
    Window, Wire,
};
use devcomm_testing::gemm::Problem;
use half::bf16;

use super::fusion::{self, Fusion};
use super::operation;
use super::prelude::*;
use super::shapes::ShapeOptions;
use crate::contenders::PeerOptions;

/// The flags of `gemm-allreduce`. Every combination of the lists runs.
#[derive(Args, Clone, Debug)]
pub struct GemmAllReduce {
    #[command(flatten)]
    shapes: ShapeOptions,

    /// What the L2 cache holds when a product begins
    #[arg(long, value_enum, default_value = "warm")]
    l2: L2,

    /// Plans of devcomm::GemmAllReduce, comma-separated, instead of its default, a row for each
    /// that can do the shape: `strips`, `wide`, `unfused`,
    /// `swapped:<rows>x<columns>:<splits>` as for `gemm`, or `measured`, the plan that
    /// devcomm::GemmAllReduce::measure finds to be the fastest
    #[arg(long = "plan", value_delimiter = ',', value_name = "PLAN")]
    plans: Vec<fusion::Requested<GemmAllReducePlan>>,

    /// All plans that devcomm::GemmAllReduce has for a shape
    #[arg(long, conflicts_with = "plans")]
    all_plans: bool,

    /// Types in which partial sums travel, comma-separated, a row for each: `bf16`, `f32`, `e4m3`
    #[arg(long = "wire", value_delimiter = ',', value_name = "TYPE")]
    wires: Vec<Wire>,

    #[command(flatten)]
    peers: PeerOptions,
}

/// A type of partial sums, and a plan or the default one.
#[derive(Clone, Copy, Debug)]
pub struct Requested {
    wire: Wire,
    plan: Option<fusion::Requested<GemmAllReducePlan>>,
}

impl fmt::Display for Requested {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { wire, plan } = self;
        plan.map_or(Ok(()), |plan| write!(f, "{plan} in "))?;
        wire.fmt(f)
    }
}

impl Fusion for GemmAllReduce {
    const NAME: &'static str = "gemm-allreduce";
    const COLLECTIVE: operation::Operation = operation::Operation::AllReduce;
    type Operation = Operation;
    type Requested = Requested;

    fn inputs(&self) -> (&ShapeOptions, L2, &PeerOptions) {
        (&self.shapes, self.l2, &self.peers)
    }

    fn asked(&self, on: (&Communicator, &Stream), shape: [usize; 3]) -> Result<Vec<Requested>> {
        let wires = if self.wires.is_empty() { &[Wire::Bf16][..] } else { &self.wires };
        // Types without plans have a row each, by the default plan; without either flag nothing is
        // asked for.
        let has_types_alone = self.plans.is_empty() && !self.all_plans && !self.wires.is_empty();
        let mut asked = Vec::new();
        for &wire in wires {
            let any = Requested { wire, plan: None };
            asked.extend(has_types_alone.then_some(any));
            let mut plans = self.plans.clone();
            if self.all_plans {
                let all = Self::new(on.0, on.1, shape, Some(&any))?.plans(shape)?;
                plans.extend(all.into_iter().map(fusion::Requested::Plan));
            }
            asked.extend(plans.into_iter().map(|plan| Requested { wire, plan: Some(plan) }));
        }
        Ok(asked)
    }

    fn defaults() -> [[&'static [usize]; 3]; 2] {
        [[&[512, 4096], &[4096], &[1024, 4096]], [&[1, 130], &[7, 264], &[72]]]
    }

    fn require(Problem { k, .. }: &Problem, _: usize) -> Result<()> {
        ensure!(k.is_multiple_of(8), "--k {k}: rows of A and B need a multiple of 8 elements");
        Ok(())
    }

    fn new(
        comm: &Communicator,
        stream: &Stream,
        [m, n, _]: [usize; 3],
        asked: Option<&Requested>,
    ) -> Result<Operation> {
        let wire = asked.map_or(Wire::Bf16, |asked| asked.wire);
        let operation = GemmOptions::new().wire(wire).build(comm, stream, m, n)?;
        // SAFETY: `Matrices::fill`, which writes B, ends with a wait for the launches.
        Ok(unsafe { operation.with_constant_b() })
    }

    fn set(
        operation: &Operation,
        asked: &Requested,
        ([a, b], c): ([&DeviceSlice<bf16>; 2], &Window<bf16>),
        shape: [usize; 3],
    ) -> Result<Result<(), String>> {
        let Some(asked) = asked.plan else { return Ok(Ok(())) };
        if let fusion::Requested::Plan(plan) = asked {
            match operation.set_plan(Some(plan)) {
                Ok(()) => {}
                Err(why @ devcomm::Error::InvalidInput { .. }) => return Ok(Err(why.to_string())),
                Err(error) => return Err(error.into()),
            }
        }
        // A plan is set above, and a measured one by `measure`.
        asked.set(|| operation.measure(a, b, c, shape), |_| operation.explain(shape))
    }

    fn plan(operation: &Operation, shape: [usize; 3]) -> (String, Option<f64>) {
        let wire = operation.wire();
        // Relative to the largest partial sum; the second argument is for sums near 0.
        let lost = f64::from(wire.error_bound(1.0, 0.0));
        let algorithm = fusion::plan_of(operation.explain(shape), &format!(" in {wire}"));
        (algorithm, (wire != Wire::F32).then_some(lost))
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
