//! The fastest plan of a shape, by a measurement that all ranks agree on.

use devcomm_host::{Buffer, Result, Window};
use half::bf16;

use super::{GemmAllReduce, GemmAllReducePlan, agree_on_same, plans_of_first_rank};
use crate::check::check_shape;
use crate::gemm::likely;
use crate::{GemmPlan, timing};

impl GemmAllReduce {
    /// Times the [`plans`](Self::plans) of a shape, those for few rows if they are expected to take
    /// at most half as long again as the first of them, and does products of it by the fastest from
    /// now on, unless one is set. Each is launched 9 times, and the promising ones 40 times more,
    /// as [`launch`](Self::launch) with these buffers. The time of a plan is that of the slowest
    /// rank. The plan that [`explain`](Self::explain) names without a measurement is kept if none
    /// is faster by more than 2 %. All ranks get the same plan. *Collective*.
    ///
    /// [`Unfused`](GemmAllReducePlan::Unfused) is timed with the likely plans of its product, as
    /// [`Gemm::measure`](crate::Gemm::measure) does.
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
        let own = || {
            self.context().refuse_capturing("GemmAllReduce::measure is called")?;
            self.matrices(&a, &b, c, shape)?;
            let plans = self.plans_to_measure(shape)?;
            Ok((plans.clone(), (shape, plans)))
        };
        let plans = agree_on_same(&self.communicator, own(), "shapes or plans to measure")?;
        let measure = || {
            let expected = self.choose(shape).plan;
            if plans.contains(&GemmAllReducePlan::Unfused) {
                self.prepare_unfused()?;
            }
            let gemm = self.unfused.get().map(|(gemm, _)| gemm);
            let products = gemm.map_or(Ok(vec![GemmPlan::Portable]), |gemm| gemm.likely(shape));
            let products = plans_of_first_rank(&self.communicator, products)?;
            let each = |plan| match plan {
                GemmAllReducePlan::Unfused => &products[..],
                _ => &products[..1],
            };
            let with = |plan| each(plan).iter().map(move |product| (plan, *product));
            let plans: Vec<_> = plans.into_iter().flat_map(with).collect();
            let select = |product| gemm.map_or(Ok(true), |gemm| gemm.select(shape, product));
            let chosen = timing::fastest(
                &self.stream,
                &plans,
                (expected, products[0]),
                |(plan, product)| {
                    self.set_plan(Some(plan))?;
                    // All ranks find the same: its workspace may be too small.
                    Ok(select(product)? && self.explain(shape).plan == plan)
                },
                // SAFETY: graphs end with the measurement, which owns or borrows the buffers.
                || unsafe { self.enqueue(&a, &b, c, shape) },
                timing::slowest(&self.communicator),
            );
            select(chosen.as_ref().map_or(products[0], |(_, product)| *product))?;
            Ok(chosen?.0)
        };
        self.chosen.find(shape, measure)
    }

    fn plans_to_measure(&self, shape: [usize; 3]) -> Result<Vec<GemmAllReducePlan>> {
        let likely = likely(check_shape(shape)?, self.room());
        let mut plans = self.plans(shape)?;
        plans.retain(|plan| plan.product().is_none_or(|product| likely.contains(&product)));
        Ok(plans)
    }
}
