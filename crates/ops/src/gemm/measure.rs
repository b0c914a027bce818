//! The fastest plan of a shape, by a measurement.

use devcomm_host::{Buffer, Result};
use half::bf16;

use super::{Gemm, GemmPlan, plan};
use crate::check::check_extents;
use crate::timing;

impl Gemm {
    /// Times those [`plans`](Self::plans) of this shape that are expected to take at most half as
    /// long again as the first, and computes products of bf16 in bf16 of it by the fastest from now
    /// on. Each is launched 9 times, and the promising ones 40 times more, as
    /// [`launch`](Self::launch) with these buffers. The expected plan is kept if none is faster by
    /// more than 2 %. Plans add in different orders: the last bits of C may depend on the choice.
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
        let (before, plans) = (self.plan(shape)?, self.likely(shape)?);
        let chosen = timing::fastest(
            &self.stream,
            &plans,
            plans[0],
            |plan| self.select(shape, plan),
            // SAFETY: graphs end with the measurement, which borrows the buffers.
            || unsafe { self.launch_capturable(a, b, c, shape) },
            |times| Ok(times.unwrap_or_default().to_vec()),
        );
        self.select(shape, *chosen.as_ref().unwrap_or(&before))?;
        chosen
    }

    /// The plans that may be the fastest, the expected one first.
    pub(crate) fn likely(&self, shape: [usize; 3]) -> Result<Vec<GemmPlan>> {
        let extents @ [.., k] = check_extents(shape)?;
        let Some(name) = self.hopper.as_deref().filter(|_| k.is_multiple_of(8)) else {
            return Ok(vec![GemmPlan::Portable]);
        };
        let measured = plan::measured(name, extents);
        let likely = plan::likely(extents, self.room()?).into_iter();
        let others = likely.filter(|plan| Some(*plan) != measured);
        Ok(measured.into_iter().chain(others).collect())
    }
}
