//! The fastest plan of a shape, by a measurement that all ranks agree on.

use devcomm_host::{Buffer, Result, Window};
use half::bf16;

use super::{GemmAllReduce, GemmAllReducePlan};
use crate::check::check_shape;
use crate::gemm::likely;
use crate::timing::Together;

impl GemmAllReduce {
    /// Times the [`plans`](Self::plans) of a shape, those for few rows if their product alone is
    /// expected to take at most half as long again as the fastest, and does products of it by the
    /// fastest from now on, unless one is set. Each is launched 17 times, and the promising ones 48
    /// times more, as [`launch`](Self::launch) with these buffers, of which the L2 cache keeps what
    /// it can. The time of a plan is that of the slowest rank. The plan that
    /// [`explain`](Self::explain) names without a measurement is kept if none is faster by more
    /// than 2 %. All ranks get the same plan. *Collective*.
    ///
    /// [`Unfused`](GemmAllReducePlan::Unfused) is timed with the likely plans of its product, as
    /// [`Gemm::measure`](crate::Gemm::measure) has them, if all ranks have the same ones.
    ///
    /// It allocates the workspaces of all these plans, which this object keeps.
    ///
    /// # Errors
    ///
    /// Those of [`launch`](Self::launch) and [`set_plan`](Self::set_plan), and
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for ranks that have different
    /// plans, or ask for different shapes.
    pub fn measure<A, B>(
        &self,
        a: &A,
        b: &B,
        c: &Window<bf16>,
        shape: [usize; 3],
    ) -> Result<GemmAllReducePlan>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
    {
        let (a, b) = (a.device_slice(), b.device_slice());
        let measure = || {
            let own = || {
                self.context().refuse_capturing("GemmAllReduce::measure is called")?;
                self.matrices(&a, &b, c, shape)?;
                let expected = self.choose(shape).plan;
                let plans = self.plans_to_measure(shape, expected)?;
                Ok(((plans, expected), ()))
            };
            let own = own();
            let listed =
                own.as_ref().map_or(String::new(), |((plans, _), ())| format!("{plans:?}"));
            let call = self.communicator.collective("GemmAllReduce::measure");
            let call = call.option("shape", format!("{shape:?}")).option("plans", listed);
            let ((plans, expected), _) = call.agree(own)?;
            if plans.contains(&GemmAllReducePlan::Unfused) {
                self.prepare_unfused()?;
            }
            let (comm, stream) = (&self.communicator, &self.stream);
            let gemm = self.unfused.get().map(|(gemm, _)| gemm);
            Together { comm, stream, gemm, shape }.fastest(
                (&plans, GemmAllReducePlan::Unfused, expected),
                |plan| self.set_plan(Some(plan)),
                // Its workspace may be too small.
                |plan| self.explain(shape).plan == plan,
                || self.enqueue(&a, &b, c, shape),
            )
        };
        self.chosen.find(shape, measure)
    }

    fn plans_to_measure(
        &self,
        shape: [usize; 3],
        expected: GemmAllReducePlan,
    ) -> Result<Vec<GemmAllReducePlan>> {
        let likely = likely(check_shape(shape)?, self.room());
        let is_likely = |plan: GemmAllReducePlan| {
            plan.product().is_none_or(|product| likely.contains(&product))
        };
        let mut plans = self.plans(shape)?;
        plans.retain(|plan| *plan == expected || is_likely(*plan));
        Ok(plans)
    }
}
