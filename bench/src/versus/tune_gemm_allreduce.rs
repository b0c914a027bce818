//! The fastest plans of `devcomm::GemmAllReduce`.

use std::cell::Cell;
use std::time::SystemTime;

use anyhow::{Context, Result, ensure};
use clap::Args;
use devcomm::{Buffer, GemmAllReduce as Operation, GemmAllReducePlan, Rank, Window};
use devcomm_testing::gemm::Problem;
use half::bf16;

use super::fusion::Fusion;
use super::gemm_allreduce::GemmAllReduce;
use super::product::{BF16_LOSES, Matrices, Product};
use super::row::L2;
use super::shapes::ShapeOptions;
use super::tune::{MOST_PLANS, Timed, choose, print_header, print_times, run_off};
use crate::contender::{Contender, Variant};
use crate::date::date;
use crate::harness::Harness;
use crate::options::{RankOptions, RunOptions};
use crate::ranks;

/// The flags of `tune gemm-allreduce`.
#[derive(Args, Clone, Debug)]
pub struct TuneGemmAllReduce {
    #[command(flatten)]
    shapes: ShapeOptions,

    /// What the L2 cache holds when a product begins
    #[arg(long, value_enum, default_value = "warm")]
    l2: L2,

    #[command(flatten)]
    ranks: RankOptions,

    #[command(flatten)]
    run: RunOptions,
}

impl TuneGemmAllReduce {
    /// Times the plans of every shape.
    pub fn run(&self) -> Result<()> {
        self.run.validate()?;
        self.problems([&[8]; 3], 1)?;
        ranks::run(&self.ranks, None, |rank| {
            ensure!(!rank.is_simulated(), "simulated GPUs have no times: tune runs on GPUs");
            self.run_on(&Harness::new(rank, &self.ranks, &self.run)?)
        })
    }

    /// The problems, with defaults for empty lists.
    fn problems(&self, default: [&[usize]; 3], ranks: usize) -> Result<Vec<Problem>> {
        let problems = self.shapes.problems(default, size_of::<bf16>(), ranks, self.run.seed)?;
        problems.iter().try_for_each(|problem| GemmAllReduce::require(problem, ranks))?;
        Ok(problems)
    }

    fn run_on(&self, harness: &Harness<'_>) -> Result<()> {
        let rank: &Rank = harness.rank;
        let ranks = rank.n_ranks();
        let [on_gpus, simulated] = GemmAllReduce::defaults();
        let default = harness.choose(on_gpus, simulated);
        let problems = self.problems(default, ranks)?;
        print_header(harness)?;
        let mut order = fastrand::Rng::with_seed(self.run.seed);
        let mut kept = None;
        for problem in problems {
            let [m, n, k] = problem.shape();
            harness.progress(&format!("{m}x{n}x{k} ..."));
            let copies = self.l2.copies_of_b(harness, &problem, size_of::<bf16>())?;
            let matrices = Matrices::new(harness, problem, 0..ranks, copies, &mut kept)?;
            let [all, finals] = time(&matrices, &mut order)?;
            let Timed { plan, seconds, .. } = choose(&finals).context("there is no plan")?;
            if rank.is_root() {
                print_times(&format!("{m}x{n}x{k}"), &all, &finals);
                let (us, today) = (seconds * 1e6, date(SystemTime::now()));
                println!("{ranks} {m} {n} {k} {plan} # {us:.2} us, {today}");
            }
        }
        Ok(())
    }
}

/// The times of all plans, and those of the run-off, in the order of the operation. *Collective*.
fn time(
    matrices: &Matrices<'_, bf16>,
    order: &mut fastrand::Rng,
) -> Result<[Vec<Timed<GemmAllReducePlan>>; 2]> {
    let (harness, shape @ [m, n, _]) = (matrices.harness, matrices.problem.shape());
    let operation = Operation::new(harness.comm, &harness.stream, m, n)?;
    // SAFETY: what writes B has ended before any launch.
    let operation = &unsafe { operation.with_constant_b() };
    let mut plans = Vec::new();
    for plan in operation.plans(shape)? {
        // Strips are for GPUs that have no other plan.
        let is_good = plan != GemmAllReducePlan::Strips || harness.rank.is_simulated();
        if is_good && plans.len() < MOST_PLANS {
            operation.set_plan(Some(plan))?;
            // Its workspace may be too small.
            plans.extend((operation.explain(shape).plan == plan).then_some(plan));
        }
    }
    let (a, c): (_, &Window<bf16>) = (&matrices.a, &harness.comm.window(m * n)?);
    let current = &Cell::new(None);
    let contender = |&plan: &GemmAllReducePlan| {
        let b = matrices.b_in_turn();
        let work = move || {
            // A batch begins with a launch that is not timed.
            if current.replace(Some(plan)) != Some(plan) {
                operation.set_plan(Some(plan))?;
            }
            operation.launch(a, b(), c, shape)
        };
        let product = Product::new(matrices, c.device_slice(), None);
        let checked = Product { products_lose: Some(BF16_LOSES), ..product };
        Contender::new(Variant::Rust, work, checked)
    };
    run_off(harness, &plans, contender, || matrices.fill_for_timing(), order)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use devcomm::World;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        tune: TuneGemmAllReduce,
    }

    #[test]
    fn every_plan_is_checked_and_timed() {
        let Cli { tune } = Cli::parse_from(["tune", "-n", "2", "--rounds", "3"]);
        let ran = World::simulated(2).unwrap().run(|rank| {
            // The times are meaningless, but taken as on GPUs.
            let harness = Harness::new(rank, &tune.ranks, &tune.run)?;
            let problem = Problem { m: 5, n: 72, k: 8, seed: 1 };
            let matrices = Matrices::new(&harness, problem, 0..2, 1, &mut None)?;
            let [all, finals] = time(&matrices, &mut fastrand::Rng::with_seed(1))?;
            let all: Vec<_> = all.iter().map(|timed| timed.plan).collect();
            assert_eq!(all[..2], [GemmAllReducePlan::Strips, GemmAllReducePlan::Unfused]);
            assert!(all.len() > 4, "{all:?}");
            assert!(choose(&finals).is_some());
            anyhow::Ok(())
        });
        ran.unwrap();
    }
}
