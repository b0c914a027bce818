//! The fastest plan of a shape, by a measurement.

use devcomm_host::{Buffer, Result};
use half::bf16;

use super::{Candidates, Gemm, GemmPlan, plan};
use crate::extents::Extents;
use crate::timing;

impl Gemm {
    /// Times those [`plans`](Self::plans) of this shape that the model expects to take at most half
    /// as long again as its first, and the one of a table, and computes products of bf16 in bf16 of
    /// the shape by the fastest from now on. Each is launched 17 times, and the promising ones 48
    /// times more, as [`launch`](Self::launch) with these buffers, of which the L2 cache keeps what
    /// it can. The expected plan is kept if none is faster by more than 2 %. Plans add in different
    /// orders: the last bits of C may depend on the choice. The plan is kept in the cache folder:
    /// it is that of shapes that are in no table, for every `Gemm` that is made later.
    ///
    /// # Errors
    ///
    /// As [`launch`](Self::launch).
    pub fn measure<A, B, C>(&self, a: &A, b: &B, c: &C, shape: [usize; 3]) -> Result<GemmPlan>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
        C: Buffer<Element = bf16>,
    {
        self.stream.context().refuse_capturing("Gemm::measure is called")?;
        let extents = Extents::new(shape)?;
        let (before, mut plans) = (self.plan_of(extents)?, Vec::new());
        for plan in self.likely(extents)? {
            if self.prepare_plan::<bf16, bf16>(plan, extents)?.is_some() {
                plans.push(plan);
            }
        }
        let expected = plans.first().copied().unwrap_or(before);
        let chosen = timing::fastest(
            &self.stream,
            &plans,
            expected,
            |plan| self.select(extents, plan).map(drop),
            || self.launch(a, b, c, shape),
            Ok,
        );
        self.select(extents, *chosen.as_ref().unwrap_or(&before))?;
        chosen.inspect(|plan| self.tuned().keep(extents, *plan))
    }

    /// The plans that may be the fastest, the expected one first.
    pub(crate) fn likely(&self, extents: Extents) -> Result<Vec<GemmPlan>> {
        let [.., k] = extents.array();
        let Some(name) = self.hopper.as_deref().filter(|_| k.is_multiple_of(8)) else {
            return Ok(vec![GemmPlan::Portable]);
        };
        let measured = plan::measured(name, extents);
        let candidates = Candidates::new(extents, self.room()?);
        let others = candidates.likely().filter(|plan| Some(*plan) != measured);
        Ok(measured.into_iter().chain(others).collect())
    }
}
