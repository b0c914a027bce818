//! The fastest plan of a shape, by a measurement that all ranks agree on.

use std::hash::{DefaultHasher, Hash, Hasher};

use devcomm_host::{Buffer, Result, Window};
use half::bf16;

use super::{GemmAllReduce, GemmAllReducePlan, agree_on};
use crate::check::refuse;

/// Times that each plan is measured, by turns.
const ROUNDS: usize = 3;
/// Launches of a plan in a round, behind one that is not timed.
const LAUNCHES: u16 = 4;

impl GemmAllReduce {
    /// Times the [`plans`](Self::plans) of a shape, and does products of it by the fastest from now
    /// on, unless one is set: about ten launches of each, as [`launch`](Self::launch) with
    /// these buffers. The time of a plan is that of the slowest rank, in the fastest of three
    /// rounds. All ranks get the same plan. *Collective*.
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
        let own = || {
            self.context().refuse_capturing("GemmAllReduce::measure is called")?;
            let plans = self.plans(shape)?;
            let mut hash = DefaultHasher::new();
            (shape, &plans).hash(&mut hash);
            Ok((plans, [hash.finish() as u32, (hash.finish() >> 32) as u32]))
        };
        let (plans, all) = agree_on(&self.communicator, own())?;
        if all.iter().any(|hash| *hash != all[0]) {
            return refuse(format!("the ranks have different shapes or plans; here: {shape:?}"));
        }
        let asked = self.plan.get();
        let times = self.times(&plans, a, b, c, shape);
        self.set_plan(asked)?;
        // A rank with an error sends an empty list, so that the others do not wait for it.
        let all = self.communicator.host_all_gather(times.as_deref().unwrap_or(&[]))?;
        times?;
        if let Some(rank) = all.iter().position(|times| times.len() != plans.len()) {
            return refuse(format!("rank {rank} cannot take part: its own error says why"));
        }
        let slowest = |i: usize| {
            let of_plan = all.iter().filter_map(|times| times.get(i).copied());
            of_plan.fold(0.0, f32::max)
        };
        let fastest = (0..plans.len()).min_by(|a, b| slowest(*a).total_cmp(&slowest(*b)));
        let Some(plan) = fastest.map(|i| plans[i]) else {
            return refuse(format!("there is no plan for {shape:?}"));
        };
        self.measured.borrow_mut().insert(shape, plan);
        Ok(plan)
    }

    /// Milliseconds of a few launches by each plan on this rank.
    fn times<A, B>(
        &self,
        plans: &[GemmAllReducePlan],
        a: &A,
        b: &B,
        c: &Window<bf16>,
        shape: [usize; 3],
    ) -> Result<Vec<f32>>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
    {
        let mut times = vec![f32::INFINITY; plans.len()];
        let (begin, end) = (self.context().event()?, self.context().event()?);
        for _ in 0..ROUNDS {
            for (plan, best) in plans.iter().zip(&mut times) {
                self.set_plan(Some(*plan))?;
                // All ranks find the same: the plan does not fit into its workspace.
                if self.explain(shape).plan != *plan {
                    continue;
                }
                self.launch(a, b, c, shape)?;
                self.stream.record(&begin)?;
                for _ in 0..LAUNCHES {
                    self.launch(a, b, c, shape)?;
                }
                self.stream.record(&end)?;
                self.stream.synchronize()?;
                *best = best.min(end.elapsed_ms(&begin)?);
            }
        }
        Ok(times)
    }
}
