//! In the simulator.

use std::cell::RefCell;

use anyhow::Result;
use devcomm::kernels::GemmForm;
use half::bf16;

use super::{GemmAllReduce, case};
use crate::problem::Problem;
use crate::products::products;
use crate::versus::machine::{Job, Way};
use crate::versus::simulated::Simulated;
use crate::versus::variant::Variant;

/// Blocks of each rank: fewer than tiles, so that each has several.
const BLOCKS: u32 = 3;
/// Hopper's form.
const FORM: GemmForm = GemmForm::Wgmma;

/// Checks every shape.
pub fn run(options: &GemmAllReduce, job: &mut Job<'_, Simulated>) -> Result<()> {
    let machine = job.machine;
    let ranks = machine.sim.ranks();
    let defaults: [&[usize]; 3] = [&[1, 130], &[7, 264], &[72]];
    for problem in options.problems(defaults, ranks, job.run.seed)? {
        let way = Fused { machine, problem, c: RefCell::default() };
        job.compare(case(problem, ranks), &vec![Box::new(way)])?;
    }
    Ok(())
}

struct Fused<'a> {
    machine: &'a Simulated,
    problem: Problem,
    /// Every rank's, which is NaN where the kernel writes nothing.
    c: RefCell<Vec<Vec<bf16>>>,
}

impl Way for Fused<'_> {
    fn variant(&self) -> Variant {
        Variant::Rust
    }

    fn grid(&self) -> Option<(u32, u32)> {
        Some((BLOCKS, FORM.threads()))
    }

    fn enqueue(&self) -> Result<()> {
        let launches = products(&self.machine.sim, FORM, self.problem, BLOCKS, 1, false)?;
        *self.c.borrow_mut() = launches.into_iter().next().unwrap_or_default();
        Ok(())
    }

    fn spoil(&self) -> Result<()> {
        *self.c.borrow_mut() = vec![Vec::new(); self.machine.sim.ranks()];
        Ok(())
    }

    fn count_wrong(&self) -> Result<usize> {
        let (all, ranks) = (self.problem.m * self.problem.n, 0..self.machine.sim.ranks());
        let wrong = |c: &Vec<bf16>| match c.len() == all {
            true => self.problem.count_wrong(ranks.clone(), c, self.problem.all()),
            false => all,
        };
        Ok(self.c.borrow().iter().map(wrong).sum())
    }
}
