//! The measurement that finds the fastest plan of a shape.

use devcomm_host::{Buffer, Result};
use half::bf16;

use super::{FusedGemm, Fusion, Operands, Output};
use crate::GemmPlan;
use crate::agree::{all_can, is_same};
use crate::check::are_aligned;
use crate::timing::{fastest, slowest};

impl<F: Fusion> FusedGemm<F> {
    /// Times the likely plans of a shape, and does products of it by the fastest from now on,
    /// unless one is set. Each is launched 17 times, and the promising ones 48 times more, as
    /// [`launch`](Self::launch) with these buffers, of which the L2 cache keeps what it can. The
    /// time of a plan is that of the slowest rank. The plan that [`explain`](Self::explain) names
    /// without a measurement is kept if none is faster by more than 2 %. All ranks get the same
    /// plan. *Collective*.
    ///
    /// The plan of two kernels is timed with the likely plans of its product, as
    /// [`Gemm::measure`](crate::Gemm::measure) has them, if all ranks have the same ones.
    ///
    /// It allocates the workspaces of all these plans, which this object keeps. The plan is kept in
    /// the cache folder, for operations of the same number of ranks on the same kind of GPU that
    /// are made later.
    ///
    /// # Errors
    ///
    /// Those of [`launch`](Self::launch) and [`set_plan`](Self::set_plan), and
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for ranks that have different
    /// plans, or ask for different shapes.
    pub fn measure<A, B, C>(&self, a: &A, b: &B, c: &C, shape: [usize; 3]) -> Result<F::Plan>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
        C: Output<F>,
    {
        let (a, b) = (a.device_slice(), b.device_slice());
        c.with(|c| self.find_fastest("measure", shape, self.operands([&a, &b], c, None, shape)))
    }

    /// Measures a shape for which no plan was chosen, unless a stream is captured. *Collective*.
    pub(super) fn measure_first(&self, operands: &Operands<'_, F>) -> Result<()> {
        let (base, key) = (&self.base, Self::key(operands.extents));
        let is_known = base.decisions.has_choice(key);
        if is_known || base.context().refuse_capturing("a plan is measured").is_err() {
            return Ok(());
        }
        let operands = Operands { a: operands.a, b: operands.b, c: operands.c, ..*operands };
        self.find_fastest("the first product of a shape", operands.extents.lengths(), Ok(operands))
            .map(drop)
    }

    /// Times plans of a shape, and keeps the fastest. *Collective*.
    fn find_fastest(
        &self,
        call: &str,
        shape @ [m, _, k]: [usize; 3],
        operands: Result<Operands<'_, F>>,
    ) -> Result<F::Plan> {
        let base = &self.base;
        let own = operands.and_then(|operands| {
            base.context().refuse_capturing("the plans of a product are measured")?;
            let key = Self::key(operands.extents);
            let expected = self.fusion.choose(base, key).plan;
            let plans = self.fusion.to_measure(base, key, expected)?;
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
            if plans.contains(&F::UNFUSED) {
                base.prepare_unfused()?;
            }
            // This allocates the workspaces, before any rank can have an error of its own.
            plans.iter().try_for_each(|plan| self.set_plan(Some(*plan)))?;
            self.time(&operands, &plans, expected)
        })
    }

    /// Returns the fastest of these plans, the same in all ranks. The plan that is not fused is
    /// timed with the likely plans of its product. Plans that not all ranks can do are left out. An
    /// error leaves the product's plan as it was. *Collective*.
    fn time(
        &self,
        operands: &Operands<'_, F>,
        plans: &[F::Plan],
        expected: F::Plan,
    ) -> Result<F::Plan> {
        let (comm, extents, gemm) = (&self.base.comm, operands.extents, self.base.gemm());
        let own = || match gemm {
            Some(gemm) => Ok((gemm.plan_of(extents)?, gemm.likely(extents)?)),
            // Without the plan of two kernels there is no product whose plan matters.
            None => Ok((GemmPlan::Portable, Vec::new())),
        };
        let products = comm.collective("measure: the products");
        let ((before, likely), is_same) = is_same(products, own().map(|own| (own.clone(), own.1)))?;
        let products = if is_same && !likely.is_empty() { likely } else { vec![before] };
        let select = |(plan, product)| {
            self.set_plan(Some(plan))?;
            gemm.map_or(Ok(true), |gemm| gemm.select(extents, product))
        };
        // A plan's workspace may be too small: then the decision is another plan than that set.
        let can = |plan| {
            let is_aligned = plan == F::UNFUSED || are_aligned(operands.addresses);
            is_aligned && self.decide(extents).plan == plan
        };
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
        if let Some(gemm) = gemm {
            gemm.select(extents, chosen.as_ref().map_or(before, |(_, product)| *product))?;
        }
        Ok(chosen?.0)
    }
}

#[cfg(test)]
mod tests {
    use devcomm_host::World;

    use super::*;
    use crate::GemmReduceScatter;

    #[test]
    fn the_first_product_of_a_shape_is_measured_if_the_process_asks_for_that() {
        let run = |rank: &devcomm_host::Rank| {
            let (comm, stream) = (rank.communicator()?, rank.stream()?);
            let (a, b) = (comm.mem_alloc::<bf16>(6 * 16)?, comm.mem_alloc::<bf16>(8 * 16)?);
            let c = comm.mem_alloc::<bf16>(3 * 8)?;
            [&a, &b].into_iter().try_for_each(|factor| stream.fill(factor, bf16::ONE))?;
            let mut product = GemmReduceScatter::new(comm, &stream, 6, 8)?;
            product.launch(&a, &b, &c, [6, 8, 16])?;
            assert_ne!(product.explain([6, 8, 16])?.reason, "as it was measured");
            product.base.measures_first = true;
            for _ in 0..2 {
                product.launch(&a, &b, &c, [6, 8, 16])?;
            }
            let reason = |shape| product.explain(shape).map(|how| how.reason);
            assert_eq!(reason([6, 8, 16])?, "as it was measured");
            assert_ne!(reason([6, 8, 8])?, "as it was measured");
            let mut got = [bf16::ZERO; 24];
            stream.copy_to_host(&c.device_slice(), &mut got)?;
            assert_eq!(got, [bf16::from_f32(32.0); 24]);
            Ok::<_, devcomm_host::Error>(())
        };
        World::simulated(2).unwrap().run(run).unwrap();
    }
}
