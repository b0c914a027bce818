//! The fastest plan of a shape, by a measurement that all ranks agree on.

use std::hash::{DefaultHasher, Hash, Hasher};

use devcomm_host::{Buffer, DeviceSlice, Result, Window};
use half::bf16;

use super::{GemmAllReduce, GemmAllReducePlan, agree_on};
use crate::check::{check_shape, refuse};
use crate::gemm::likely;
use crate::timing::{self, Planned};

impl GemmAllReduce {
    /// Times the [`plans`](Self::plans) of a shape, those for few rows if they are expected to take
    /// at most half as long again as the first of them, and does products of it by the fastest from
    /// now on, unless one is set. Each is launched 9 times, and the promising ones 40 times more,
    /// as [`launch`](Self::launch) with these buffers. The time of a plan is that of the slowest
    /// rank. The plan that [`explain`](Self::explain) names without a measurement is kept if none
    /// is faster by more than 2 %. All ranks get the same plan. *Collective*.
    ///
    /// How [`Unfused`](GemmAllReducePlan::Unfused) multiplies, each rank measures before, as
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
            let mut hash = DefaultHasher::new();
            (shape, &plans).hash(&mut hash);
            Ok((plans, [hash.finish() as u32, (hash.finish() >> 32) as u32]))
        };
        let (plans, all) = agree_on(&self.communicator, own())?;
        if all.iter().any(|hash| *hash != all[0]) {
            return refuse(format!("the ranks have different shapes or plans; here: {shape:?}"));
        }
        let (asked, expected) = (self.plan.get(), self.choose(shape).plan);
        let operation = Measured { gemm: self, a, b, c, shape };
        if plans.contains(&GemmAllReducePlan::Unfused) {
            self.prepare_unfused()?;
            let product = self.unfused.get().map_or(Ok(()), |(gemm, _)| {
                gemm.measure(&operation.a, &operation.b, c, shape).map(drop)
            });
            agree_on(&self.communicator, product.map(|()| ((), [0; 2])))?;
        }
        let fastest = timing::fastest(&operation, &self.stream, &plans, expected);
        self.set_plan(asked)?;
        let Some(plan) = fastest? else {
            return refuse(format!("there is no plan for {shape:?}"));
        };
        self.measured.borrow_mut().insert(shape, plan);
        Ok(plan)
    }

    fn plans_to_measure(&self, shape: [usize; 3]) -> Result<Vec<GemmAllReducePlan>> {
        let likely = likely(check_shape(shape)?, self.room());
        let mut plans = self.plans(shape)?;
        plans.retain(|plan| plan.product().is_none_or(|product| likely.contains(&product)));
        Ok(plans)
    }
}

/// A product whose plans are timed.
struct Measured<'a> {
    gemm: &'a GemmAllReduce,
    a: DeviceSlice<bf16>,
    b: DeviceSlice<bf16>,
    c: &'a Window<bf16>,
    shape: [usize; 3],
}

impl Planned<GemmAllReducePlan> for Measured<'_> {
    /// All ranks find the same.
    fn select(&self, plan: GemmAllReducePlan) -> Result<bool> {
        self.gemm.set_plan(Some(plan))?;
        // Its workspace may be too small.
        Ok(self.gemm.explain(self.shape).plan == plan)
    }

    fn launch(&self) -> Result<()> {
        // SAFETY: graphs end with the measurement, which borrows or owns the buffers.
        unsafe { self.gemm.enqueue(&self.a, &self.b, self.c, self.shape) }
    }

    fn agree(&self, times: Option<&[f32]>) -> Result<Vec<f32>> {
        // A rank with an error sends an empty list, so that the others do not wait for it.
        let all = self.gemm.communicator.host_all_gather(times.unwrap_or_default())?;
        if let Some(rank) = all.iter().position(Vec::is_empty) {
            return refuse(format!("rank {rank} cannot take part: its own error says why"));
        }
        let plans = all.iter().map(Vec::len).min().unwrap_or(0);
        let slowest = |i: usize| all.iter().map(|times| times[i]).fold(0.0, f32::max);
        Ok((0..plans).map(slowest).collect())
    }
}
