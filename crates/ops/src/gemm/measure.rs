//! The fastest plan of a shape, by a measurement.

use devcomm_host::{Buffer, Result};
use half::bf16;

use super::{Gemm, GemmPlan, Product, plan};
use crate::check::check_extents;
use crate::timing::{self, Planned};

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
        let (before, extents) = (self.plan(shape)?, check_extents(shape)?);
        let Some(name) = self.hopper.as_deref().filter(|_| before != GemmPlan::Portable) else {
            return Ok(before);
        };
        let measured = plan::measured(name, extents);
        let likely = plan::likely(extents, self.room()?).into_iter();
        let plans = measured.into_iter().chain(likely.filter(|plan| Some(*plan) != measured));
        let plans: Vec<_> = plans.collect();
        let operation = Measured { gemm: self, product: self.product(shape), buffers: (a, b, c) };
        let chosen = timing::fastest(&operation, &self.stream, &plans, plans[0]);
        let plan = chosen.as_ref().map_or(before, |chosen| chosen.unwrap_or(before));
        self.select(shape, plan)?;
        chosen.map(|_| plan)
    }
}

/// A product whose plans are timed.
struct Measured<'a, A, B, C> {
    gemm: &'a Gemm,
    product: Product<'a, bf16, bf16>,
    buffers: (&'a A, &'a B, &'a C),
}

impl<A, B, C> Planned<GemmPlan> for Measured<'_, A, B, C>
where
    A: Buffer<Element = bf16>,
    B: Buffer<Element = bf16>,
    C: Buffer<Element = bf16>,
{
    fn select(&self, plan: GemmPlan) -> Result<bool> {
        self.gemm.select(self.product.shape(), plan)
    }

    fn launch(&self) -> Result<()> {
        let (a, b, c) = self.buffers;
        // SAFETY: graphs end with the measurement, which borrows the buffers.
        unsafe { self.product.launch_capturable(a, b, c) }
    }

    fn agree(&self, times: Option<&[f32]>) -> Result<Vec<f32>> {
        Ok(times.unwrap_or_default().to_vec())
    }
}
