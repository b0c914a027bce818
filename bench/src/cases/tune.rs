//! The fastest plans of `devcomm::Gemm`, and the tables that keep them.
//!
//! All plans of a shape are timed in a few rounds, and the fastest in many more: a run-off. In
//! every round the plans alternate, and a ratio of two is the median of ratios within a round, so
//! that a GPU whose clock changes is fair to all.

use std::cell::Cell;
use std::fmt;
use std::path::PathBuf;
use std::time::SystemTime;

use devcomm::{Buffer, Gemm as Kernel, GemmPlan, Rank};
use half::bf16;

use super::gemm::{Dtype, Inputs};
use super::prelude::*;
use super::product::{Matrices, Product};
use super::tune_table::{Key, Table, key};
use crate::base::options::{RankOptions, RunOptions};
use crate::base::{Spread, date, ranks, validate_output};
use crate::harness::Rounds;
use crate::harness::header::Header;

/// The flags of `tune gemm`. Its output can be used as a table: lines that are not entries are
/// comments. This machine's cache folder keeps the plans.
#[derive(Args, Clone, Debug)]
pub struct Tune {
    #[command(flatten)]
    inputs: Inputs,

    /// Also write the fastest plans to this table, which keeps its comments and other shapes
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,

    /// Only shapes that the table lacks, to continue a run that was cut off
    #[arg(long, requires = "table")]
    missing: bool,

    /// The most plans of a shape that are timed: those that the model prefers
    #[arg(long, value_name = "N", default_value_t = 20)]
    plans: usize,

    #[command(flatten)]
    ranks: RankOptions,

    #[command(flatten)]
    run: RunOptions,
}

/// The most plans of a run-off, and how close they are to the fastest before it.
const FINALISTS: usize = 3;
const CLOSE: f64 = 1.05;

/// Times within this ratio are equal: the plan that the model prefers is chosen.
const EQUAL: f64 = 1.003;

/// A plan with its median time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timed<P> {
    pub plan: P,
    pub seconds: f64,
    /// The time over that of the fastest plan.
    pub ratio: f64,
}

impl Tune {
    /// Times the plans of every shape.
    pub fn run(&self) -> Result<()> {
        self.run.validate_for_plans()?;
        self.inputs.validate()?;
        ensure!(
            self.inputs.dtype == Dtype::Bf16,
            "only products of bf16 have several plans, and tables of them: leave out --dtype"
        );
        // A file that is not a table, or cannot be written, is an error before any measurement.
        self.read_table()?;
        validate_output("--table", self.table.as_deref())?;
        ranks::run(&self.ranks, None, |rank| self.run_on(rank))
    }

    fn run_on(&self, rank: &Rank) -> Result<()> {
        ensure!(!rank.is_simulated(), "simulated GPUs have no times: tune runs on a GPU");
        ensure!(rank.n_ranks() == 1, "tune runs on one GPU: -g 1");
        let harness = Harness::new(rank, &self.ranks, &self.run)?;
        let mut problems = self.inputs.problems(&harness)?;
        if let Some(table) = self.read_table()?.filter(|_| self.missing) {
            problems.retain(|(problem, _)| !table.has(&key(problem.shape())));
        }
        print_header(&harness)?;
        let gpu = rank.context().device_name()?;
        // SAFETY: `Matrices` waits for its copies to B, which end before any launch.
        let gemm = unsafe { Kernel::new(&harness.stream)?.with_constant_b() };
        let mut order = fastrand::Rng::with_seed(self.run.seed);
        let mut cached_b = None;
        for (problem, copies) in problems {
            let shape @ [m, n, k] = problem.shape();
            harness.progress(&format!("{m}x{n}x{k} ..."));
            let matrices = Matrices::new(&harness, problem, 0..1, copies, &mut cached_b)?;
            let [all, finals] = time(&matrices, &gemm, self.plans.max(1), &mut order)?;
            print_times(&format!("{m}x{n}x{k}"), &all, &finals);
            let Timed { plan, seconds, .. } = choose(&finals).context("there is no plan")?;
            let line = line(shape, plan, seconds, self.inputs.l2);
            gemm.keep_plan(shape, plan)?;
            Table::record(self.table.as_deref(), key(shape), line, head(&gpu))?;
        }
        Ok(())
    }

    fn read_table(&self) -> Result<Option<Table<Key>>> {
        self.table.as_deref().map(Table::read).transpose()
    }
}

/// Prints what is measured.
pub fn print_header(harness: &Harness<'_>) -> Result<()> {
    let header = Header::of(harness.rank)?;
    if harness.rank.is_root() {
        println!("{header}# {}", harness.run.describe());
        let [all, finals] = rounds(harness.run);
        println!(
            "# all plans: {all} rounds; run-off of the {FINALISTS} fastest: {finals} rounds\n"
        );
    }
    Ok(())
}

/// Prints the times of all plans and of the run-off, the fastest first.
pub fn print_times<P: fmt::Display + Copy>(name: &str, all: &[Timed<P>], finals: &[Timed<P>]) {
    for (what, timed) in [("", all), ("run-off, ", finals)] {
        let mut sorted = timed.to_vec();
        sorted.sort_by(|a, b| a.ratio.total_cmp(&b.ratio));
        for Timed { plan, seconds, ratio } in sorted {
            let us = seconds * 1e6;
            println!("# {name}: {what}{us:8.2} us, {ratio:.3} of the fastest, {plan}");
        }
    }
}

/// Returns the rounds of all plans, and those of the run-off.
fn rounds(run: &RunOptions) -> [usize; 2] {
    [run.rounds.div_ceil(3), 2 * run.rounds]
}

/// Returns the times of the first `most` plans in the order of the model, and those of the run-off.
/// Their results are checked first.
fn time(
    matrices: &Matrices<'_, bf16>,
    gemm: &Kernel,
    most: usize,
    order: &mut fastrand::Rng,
) -> Result<[Vec<Timed<GemmPlan>>; 2]> {
    let (harness, shape @ [m, n, _]) = (matrices.harness, matrices.problem.shape());
    let mut plans = gemm.plans(shape)?;
    // The portable kernel is for GPUs and shapes that have no other.
    plans.retain(|plan| *plan != GemmPlan::Portable);
    if plans.is_empty() {
        plans.push(GemmPlan::Portable);
    }
    plans.truncate(most);
    let (a, c) = (&matrices.a, &harness.comm.mem_alloc::<bf16>(m * n)?);
    let current = &Cell::new(None);
    let contender = |&plan: &GemmPlan| {
        let b = matrices.b_in_turn();
        let work = move || {
            // A batch begins with a launch that is not timed, and that sets the plan.
            if current.replace(Some(plan)) != Some(plan) {
                gemm.set_plan(shape, plan)?;
            }
            gemm.launch(a, b(), c, shape)
        };
        Contender::new(Variant::Rust, work, Product::new(matrices, c.device_slice(), None))
    };
    run_off(harness, &plans, contender, || matrices.fill_for_timing(), order)
}

/// Returns the times of all plans, and those of the run-off, in the given order. The results are
/// checked, and then `refill` is called, before any of them is timed. *Collective*.
pub fn run_off<'a, P: fmt::Display + Copy + PartialEq>(
    harness: &Harness<'_>,
    plans: &[P],
    contender: impl Fn(&P) -> Contender<'a>,
    refill: impl FnOnce() -> Result<()>,
    order: &mut fastrand::Rng,
) -> Result<[Vec<Timed<P>>; 2]> {
    let contenders: Vec<_> = plans.iter().map(&contender).collect();
    for (plan, wrong) in plans.iter().zip(harness.check(&contenders)?) {
        let wrong = wrong.unwrap_or(0);
        ensure!(wrong == 0, "{plan}: {wrong} of the checked elements are wrong");
    }
    refill()?;
    let [all_rounds, final_rounds] = rounds(harness.run);
    let all = compare(plans, &harness.time(&contenders, order, all_rounds)?.0);
    let plans = finalists(&all);
    if plans.len() < 2 {
        let alone = all.iter().copied().filter(|timed| plans.contains(&timed.plan)).collect();
        return Ok([all, alone]);
    }
    let contenders: Vec<_> = plans.iter().map(contender).collect();
    let finals = compare(&plans, &harness.time(&contenders, order, final_rounds)?.0);
    Ok([all, finals])
}

/// Returns the plans with their times in these rounds.
fn compare<P: Copy>(plans: &[P], rounds: &Rounds) -> Vec<Timed<P>> {
    let median = |time: &dyn Fn(&[f64]) -> f64| {
        Spread::of(rounds.iter().map(|round| time(round))).map_or(f64::INFINITY, |s| s.median)
    };
    let seconds: Vec<f64> = (0..plans.len()).map(|i| median(&|round| round[i])).collect();
    let fastest = (0..plans.len()).min_by(|&i, &j| seconds[i].total_cmp(&seconds[j])).unwrap_or(0);
    let timed = |(i, &plan): (usize, &P)| {
        // Equal times may be 0 on simulated GPUs.
        let ratio = median(&|round| match round[i] == round[fastest] {
            true => 1.0,
            false => round[i] / round[fastest],
        });
        Timed { plan, seconds: seconds[i], ratio }
    };
    plans.iter().enumerate().map(timed).collect()
}

/// Returns the plans of the run-off, in the same order.
fn finalists<P: Copy>(timed: &[Timed<P>]) -> Vec<P> {
    let mut ratios: Vec<f64> = timed.iter().map(|timed| timed.ratio).collect();
    ratios.sort_by(f64::total_cmp);
    let last = ratios.get(FINALISTS - 1).map_or(CLOSE, |third| third.min(CLOSE));
    timed.iter().filter(|timed| timed.ratio <= last).map(|timed| timed.plan).collect()
}

/// Returns the first plan that is as fast as the fastest.
pub fn choose<P: Copy>(timed: &[Timed<P>]) -> Option<Timed<P>> {
    timed.iter().copied().find(|timed| timed.ratio <= EQUAL)
}

/// Returns the first line of a table.
fn head(gpu: &str) -> String {
    format!(
        "# Plans of matrix products on an {gpu}: m n k plan. Written by `devcomm-bench tune gemm`."
    )
}

/// Returns today's line of a table for a plan with this time.
fn line(shape: [usize; 3], plan: GemmPlan, seconds: f64, l2: L2) -> String {
    let ([m, n, k], us) = (shape, seconds * 1e6);
    let l2 = format!("{l2:?}").to_lowercase();
    format!("{m} {n} {k} {plan} # {us:.2} us, L2 {l2}, {}", date(SystemTime::now()))
}

#[cfg(test)]
mod tests {
    use devcomm::World;
    use devcomm_testing::gemm::Problem;

    use super::*;
    use crate::base::options::parse;

    const HEAD: &str = "# Plans of one GPU.\n# Two lines.\n";

    fn add(table: &mut Table<Key>, shape: [usize; 3], plan: &str, gpu: &str) {
        let line = line(shape, plan.parse().unwrap(), 5.625e-6, L2::Cold);
        table.insert(key(shape), line, head(gpu));
    }

    #[test]
    fn every_plan_is_checked_and_timed_as_launches_and_in_graphs() {
        for args in ["-n 2 --rounds 3", "-n 2 --rounds 3 -G 1"] {
            let tune: Tune = parse(args);
            let ran = World::simulated(1).unwrap().run(|rank| {
                // The times are meaningless, but taken as on GPUs.
                let harness = Harness::new(rank, &tune.ranks, &tune.run)?;
                let gemm = Kernel::new(&harness.stream)?;
                let mut cached_b = None;
                for (shape @ [m, n, k], plans) in [([5, 72, 8], 9), ([9, 72, 8], 9), ([5, 7, 9], 1)]
                {
                    let problem = Problem { m, n, k, seed: 1 };
                    let matrices = Matrices::new(&harness, problem, 0..1, 2, &mut cached_b)?;
                    let [all, finals] =
                        time(&matrices, &gemm, 20, &mut fastrand::Rng::with_seed(1))?;
                    let all: Vec<_> = all.into_iter().map(|timed| timed.plan).collect();
                    assert_eq!(all, gemm.plans(shape)?[..plans]);
                    assert!(finals.len() <= FINALISTS || finals.iter().all(|t| t.ratio == 1.0));
                    assert!(choose(&finals).is_some_and(|timed| all.contains(&timed.plan)));
                }
                anyhow::Ok(())
            });
            ran.unwrap();
        }
    }

    #[test]
    fn a_table_keeps_its_comments_and_other_shapes_and_is_sorted() {
        let old = "64 512 8 wide # 9 us\n1 4096 4096 portable\n";
        let mut table = Table::<Key>::parse(&format!("{HEAD}\n{old}")).unwrap();
        let today = date(SystemTime::now());
        for shape in [[128, 512, 8], [8, 512, 8], [64, 512, 8], [64, 8, 512]] {
            add(&mut table, shape, "swapped:64x64:2", "GPU");
            assert!(table.has(&key(shape)));
        }
        assert!(!table.has(&key([512, 8, 64])));
        let new = |shape: &str| format!("{shape} swapped:64x64:2 # 5.62 us, L2 cold, {today}\n");
        let lines = ["64 8 512", "8 512 8", "64 512 8", "128 512 8"].map(new).concat();
        let expected = format!("{HEAD}{lines}1 4096 4096 portable\n");
        assert_eq!(table.to_string(), expected);
        assert_eq!(Table::parse(&expected).unwrap(), table);
    }

    #[test]
    fn a_new_table_names_its_gpu() {
        let folder = tempfile::tempdir().unwrap();
        let mut table = Table::read(&folder.path().join("new.txt")).unwrap();
        add(&mut table, [1, 8, 8], "wide", "NVIDIA H200");
        assert!(table.to_string().starts_with("# Plans of matrix products on an NVIDIA H200: "));
    }

    #[test]
    fn a_file_that_is_no_table_is_refused() {
        for (text, why) in [
            ("1 2 3", "`1 2 3`: it is not `m n k plan`"),
            ("1 2 3 wide narrow", "it is not `m n k plan`"),
            ("1 2 x wide", "`x` is not a number"),
            ("1 2 3 tall", "`tall` is no plan"),
        ] {
            let error = format!("{:#}", Table::<Key>::parse(text).unwrap_err());
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn of_equal_plans_the_first_is_chosen() {
        let timed = |text: &str, ratio| {
            let plan = text.parse::<GemmPlan>().unwrap();
            Timed { plan, seconds: 1.0, ratio }
        };
        let (equal, slower, fastest) =
            (timed("wide", 1.002), timed("wide", 1.01), timed("portable", 1.0));
        assert_eq!(choose(&[equal, fastest]), Some(equal));
        assert_eq!(choose(&[slower, fastest]), Some(fastest));
        assert_eq!(choose::<GemmPlan>(&[]), None);
    }

    #[test]
    fn plans_are_compared_within_rounds_and_the_close_ones_run_off() {
        let plans = ["wide", "portable", "swapped:8x64:1", "swapped:8x64:2", "swapped:8x64:4"]
            .map(|text| text.parse::<GemmPlan>().unwrap());
        // The clock of the GPU falls from round to round.
        let rounds = [1.0, 2.0, 4.0].map(|x| [1.04, 1.2, 1.0, 1.01, 1.02].map(|y| x * y).to_vec());
        let timed = compare(&plans, &rounds.to_vec());
        let thousandths: Vec<_> = timed.iter().map(|t| (1e3 * t.ratio).round()).collect();
        assert_eq!(thousandths, [1040.0, 1200.0, 1000.0, 1010.0, 1020.0]);
        assert_eq!(timed[3].seconds, 2.02);
        assert_eq!(finalists(&timed), plans[2..]);
        assert_eq!(finalists(&timed[..2]), plans[..1]);
        assert_eq!(finalists(&timed[..3]), [plans[0], plans[2]]);
    }
}
