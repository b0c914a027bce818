//! The measurement that finds the fastest plan of a shape.

use super::{FusedGemm, Fusion, Operands, Output};
use crate::GemmPlan;
use crate::agree::all_can;
use crate::gemm::Added;
use crate::prelude::*;
use crate::timing::{fastest, slowest};

impl<F: Fusion> FusedGemm<F> {
    /// Times the likely plans of a shape, and does products of it by the fastest from now on,
    /// unless one is set. Each is launched 17 times, and the promising ones 48 times more, as
    /// [`launch`](Self::launch) with these buffers, as much of which is in the L2 cache as fits
    /// there. The time of a plan is that of the slowest rank. The default plan is chosen if no
    /// other one is faster by more than 2 %. All ranks get the same plan. *Collective*.
    ///
    /// The plan of two kernels is timed with the likely plans of its product, as
    /// [`Gemm::measure`](crate::Gemm::measure) has them, if all ranks have the same ones.
    ///
    /// It allocates the workspaces of all these plans, which last as long as this object. The
    /// chosen plan is saved in the cache folder, for operations of the same number of ranks on the
    /// same kind of GPU that are made later for matrices of this size or larger ones; they allocate
    /// its workspace too.
    ///
    /// # Errors
    ///
    /// Those of [`launch`](Self::launch) and [`set_plan`](Self::set_plan);
    /// [`WorldError::OptionsDiffer`](devcomm_host::WorldError::OptionsDiffer) for ranks that have
    /// different plans, or ask for different shapes.
    pub fn measure<A, B, C>(&self, a: &A, b: &B, c: &C, shape: [usize; 3]) -> Result<F::Plan>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
        C: Output<F>,
    {
        let matrices = [a.device_slice(), b.device_slice(), c.device_slice()];
        self.find_fastest("measure", shape, self.operands(matrices, &Added::NOTHING, shape))
    }

    /// Measures a shape for which no plan was chosen, unless a stream is captured. *Collective*.
    pub(super) fn measure_first(&self, operands: &Operands) -> Result<()> {
        let (base, key) = (&self.base, Self::key(operands.extents));
        let is_known = base.decisions.chosen(key).next().is_some();
        if is_known || base.comm.context().refuse_capturing("a plan is measured").is_err() {
            return Ok(());
        }
        let (call, shape) = ("the first product of a shape", operands.extents.lengths());
        self.find_fastest(call, shape, Ok(operands.clone())).map(drop)
    }

    /// Times plans of a shape, and keeps the fastest. *Collective*.
    fn find_fastest(
        &self,
        call: &str,
        shape @ [m, _, k]: [usize; 3],
        operands: Result<Operands>,
    ) -> Result<F::Plan> {
        let base = &self.base;
        let own = operands.and_then(|operands| {
            base.comm.context().refuse_capturing("the plans of a product are measured")?;
            let key = Self::key(operands.extents);
            let expected = self.fusion.choose(base, key).plan;
            let plans = self.fusion.timed(base, key, expected);
            Ok(((operands, plans, expected), ()))
        });
        let key = own.as_ref().ok().map(|((operands, ..), ())| Self::key(operands.extents));
        base.decisions.measure(key, || {
            let plans =
                own.as_ref().map_or(String::new(), |((_, plans, _), ())| format!("{plans:?}"));
            let name = format!("{}::{call}", F::NAME);
            let call = base.comm.collective(&name).option("plans", plans);
            let call = match F::COLUMNS_DIFFER {
                true => call.option("m", m).option("k", k),
                false => call.option("shape", format!("{shape:?}")),
            };
            let ((operands, plans, expected), _) = call.agree(own)?;
            // This allocates the workspaces, before any rank can have an error of its own.
            plans.iter().try_for_each(|plan| self.set_plan(Some(*plan)))?;
            self.time(&operands, &plans, expected)
        })
    }

    /// Returns the fastest of these plans, the same in all ranks, among those that all ranks can
    /// do. An error leaves the product's plan as it was. *Collective*.
    fn time(&self, operands: &Operands, plans: &[F::Plan], expected: F::Plan) -> Result<F::Plan> {
        let (comm, extents) = (&self.base.comm, operands.extents);
        let gemm = self.base.unfused.get().map(|unfused| &unfused.gemm);
        let is_aligned = operands.matrices.are_aligned();
        let own = || {
            let before = gemm.map_or(Ok(GemmPlan::Portable), |gemm| gemm.plan_of(extents))?;
            // The portable kernel multiplies what is not aligned, whatever the plan.
            let aligned = gemm.filter(|_| is_aligned);
            let likely = aligned.map_or(Ok(Vec::new()), |gemm| gemm.likely(extents))?;
            Ok(((before, likely.clone()), hash(likely)))
        };
        let ((before, likely), all) = comm.collective("measure: the products").agree(own())?;
        let are_same = all.iter().all(|hash| *hash == all[0]);
        let products = if are_same && !likely.is_empty() { likely } else { vec![before] };
        let select = |(plan, product)| {
            self.set_plan(Some(plan))?;
            gemm.map_or(Ok(true), |gemm| gemm.select(extents, product))
        };
        // A plan's workspace may be too small: then the decision is another plan than that set.
        let can = |plan| (plan == F::UNFUSED || is_aligned) && self.decide(extents).plan == plan;
        let products_of = |plan| if plan == F::UNFUSED { &products[..] } else { &products[..1] };
        let pairs = plans
            .iter()
            .flat_map(|plan| products_of(*plan).iter().map(|product| (*plan, *product)));
        let pairs: Vec<_> = pairs.collect();
        let chosen = || {
            let possible = pairs.iter().map(|pair| Ok(select(*pair)? && can(pair.0))).collect();
            let possible = all_can(comm, "measure: the plans", possible)?;
            let pairs = pairs.iter().zip(possible).filter(|(_, can)| *can);
            let pairs: Vec<_> = pairs.map(|(pair, _)| *pair).collect();
            let (select, launch) = (|pair| select(pair).map(drop), || self.run(operands));
            let slowest = |times| slowest(comm, times);
            fastest(&self.base.stream, &pairs, (expected, products[0]), select, launch, slowest)
        };
        let chosen = chosen();
        let product = chosen.as_ref().map_or(before, |(_, product)| *product);
        let selected = gemm.map_or(Ok(true), |gemm| gemm.select(extents, product));
        let (plan, _) = chosen?;
        selected.map(|_| plan)
    }
}

#[cfg(test)]
mod tests;
