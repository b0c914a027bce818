//! Ratios: the default's time over that of the fastest competitor, of each case of a run.

use std::fmt;

use anyhow::{Result, ensure};

use crate::base::{Spread, geometric_mean};
use crate::contenders::{Contest, Role, Variant};
use crate::report::row::Row;

/// The smallest difference from 1 at which one start of the program decides which is faster.
pub const LEAST: f64 = 0.03;
/// The number of starts that must agree on a smaller difference.
pub const STARTS: usize = 3;

/// The default against the fastest competitor in one case.
#[derive(Clone, Debug)]
pub struct Ratio {
    /// The default's plan, if a run has several; otherwise empty.
    pub plan: String,
    /// The size, shape or grid.
    pub case: String,
    /// The rows of A, if it is a matrix product.
    pub m: Option<usize>,
    /// The ratios, one for each start of the program, of at least one: below 1 the default is
    /// faster.
    starts: Vec<f64>,
    /// The interquartile range of the rounds' times over their median, of the noisier side.
    noise: f64,
}

/// Returns the ratios of a run, in its order. Cases without a default or a competitor have none.
pub fn ratios(contest: &Contest, rows: &[Row]) -> Vec<Ratio> {
    let mut ratios: Vec<Ratio> = Vec::new();
    let one_type = rows.iter().all(|row| row.dtype == rows[0].dtype);
    for case in cases(rows) {
        let dtype = if one_type { String::new() } else { format!(" {}", case[0].dtype) };
        let found = of_case(contest, case).into_iter();
        ratios.extend(found.map(|ratio| Ratio { case: ratio.case + &dtype, ..ratio }));
    }
    ratios
}

/// Divides the rows where the size, the shape, the type or the grid of a barrier changes. The rows
/// of a variant follow each other in a case, so that a variant that returns begins the next one.
fn cases(rows: &[Row]) -> Vec<&[Row]> {
    let mut cases = Vec::new();
    let mut first = 0;
    for at in 1..rows.len() {
        let (before, row) = (&rows[at - 1], &rows[at]);
        let repeats = || rows[first..at].iter().any(|other| other.variant == row.variant);
        if !before.is_like(row) || before.variant != row.variant && repeats() {
            cases.push(&rows[first..at]);
            first = at;
        }
    }
    cases.extend(Some(&rows[first..]).filter(|case| !case.is_empty()));
    cases
}

/// Returns the ratios; every plan of the default has the same competitors.
fn of_case(contest: &Contest, case: &[Row]) -> Vec<Ratio> {
    let [defaults, competitors] = [Role::Ours, Role::Theirs].map(|role| contest.with(role));
    let by = |time: fn(&Row) -> Option<f64>, noise: Noise, after: &str| -> Vec<Ratio> {
        let us = |row: &Row| time(row).filter(|us| us.is_finite());
        let timed = || case.iter().filter(|row| us(row).is_some());
        // The variant with such a time may be the fastest.
        if timed().any(|row| us(row) <= Some(0.0) && contest.competes(row.variant)) {
            return Vec::new();
        }
        let theirs = timed().filter(|row| competitors.contains(&row.variant));
        let Some(best) = theirs.min_by(|a, b| us(a).partial_cmp(&us(b)).unwrap()) else {
            return Vec::new();
        };
        let ours: Vec<&Row> = timed().filter(|row| defaults.contains(&row.variant)).collect();
        let ratio = |row: &&Row| {
            let value = us(row)? / us(best)?;
            let noise = noise(row).unwrap_or(0.0).max(noise(best).unwrap_or(0.0));
            let plan = if ours.len() > 1 { row.plan() } else { "" };
            let (plan, case, m) = (format!("{plan}{after}").trim().to_owned(), row.label(), row.m);
            Some(Ratio { plan, case, m, starts: vec![value], noise: noise / 100.0 })
        };
        ours.iter().filter_map(ratio).collect()
    };
    // Earlier versions did not write the noise of the times after another kernel.
    let noise_between: Noise = |row| row.between_noise_percent.or(row.noise_percent);
    let alone = by(|row| row.time_us, |row| row.noise_percent, "");
    [alone, by(|row| row.between_us, noise_between, BETWEEN)].concat()
}

/// A function that returns the noise of a row's times in percent.
type Noise = fn(&Row) -> Option<f64>;

/// The suffix of a plan's name for calls that each follow an unrelated kernel.
const BETWEEN: &str = " after another kernel";

impl Ratio {
    /// Returns the median of the starts.
    pub fn value(&self) -> f64 {
        Spread::of(self.starts.iter().copied()).map_or(1.0, |spread| spread.median)
    }

    /// Returns whether neither side is faster: the difference is within the noise, or, after
    /// several starts, one of them contradicts the others.
    pub fn is_tie(&self) -> bool {
        match self.starts.len() {
            STARTS.. => {
                let least = self.starts.iter().copied().fold(f64::INFINITY, f64::min);
                let most = self.starts.iter().copied().fold(0.0, f64::max);
                (least..=most).contains(&1.0)
            }
            _ => (self.value() - 1.0).abs() < LEAST.max(self.noise),
        }
    }

    /// Adds the ratios of the same case from another start of the program.
    pub fn join(&mut self, other: &Self) {
        self.starts.extend(&other.starts);
        self.noise = self.noise.max(other.noise);
    }

    /// Returns whether `other` is of the same plan and case.
    pub fn is_of(&self, other: &Self) -> bool {
        (&self.plan, &self.case) == (&other.plan, &other.case)
    }
}

/// The summary of a run's ratios.
#[derive(Clone, Debug)]
pub struct Standing {
    pub cases: usize,
    /// The geometric mean.
    pub mean: f64,
    pub worst: Ratio,
    /// Cases in which the default is slower.
    pub above: usize,
    /// Cases in which neither side is faster.
    pub ties: usize,
}

impl Standing {
    /// Returns `None` without ratios.
    pub fn of(ratios: &[Ratio]) -> Option<Self> {
        let worst = ratios.iter().max_by(|a, b| a.value().total_cmp(&b.value()))?;
        Some(Self {
            cases: ratios.len(),
            mean: geometric_mean(ratios.iter().map(Ratio::value))?,
            worst: worst.clone(),
            above: ratios.iter().filter(|ratio| ratio.value() > 1.0).count(),
            ties: ratios.iter().filter(|ratio| ratio.is_tie()).count(),
        })
    }
}

impl fmt::Display for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cases, mean, worst, above, ties } = self;
        let case = format!("{} {}", worst.case, worst.plan);
        let (worst, case) = (worst.value(), case.trim_end());
        write!(
            f,
            "geometric mean {mean:.3} of {cases} cases, worst {worst:.3} ({case}), \
             {above} above 1, {ties} ties"
        )
    }
}

/// Returns the plans of a run, each with its ratios.
pub fn by_plan(ratios: &[Ratio]) -> Vec<(&str, Vec<Ratio>)> {
    let mut plans: Vec<(&str, Vec<Ratio>)> = Vec::new();
    for ratio in ratios {
        match plans.iter_mut().find(|(plan, _)| *plan == ratio.plan) {
            Some((_, of_plan)) => of_plan.push(ratio.clone()),
            None => plans.push((&ratio.plan, vec![ratio.clone()])),
        }
    }
    plans
}

/// Summary of all rows.
#[derive(Clone, Debug)]
pub struct Summary {
    wrong: usize,
    rows: usize,
    /// The rows whose results were not checked.
    unchecked: usize,
    /// The rows whose time after another kernel is not above 0. Their cases have no such ratio.
    without_between: usize,
    contest: &'static Contest,
    /// The standing of each plan of the default.
    standings: Vec<(String, Standing)>,
}

impl Summary {
    /// Summarizes these rows.
    pub fn of(contest: &'static Contest, rows: &[Row]) -> Self {
        let ratios = ratios(contest, rows);
        let standing =
            |(plan, ratios): (&str, Vec<_>)| Some((plan.to_owned(), Standing::of(&ratios)?));
        let count = |has: fn(&&Row) -> bool| rows.iter().filter(has).count();
        Self {
            wrong: rows.iter().filter_map(|row| row.wrong).sum(),
            rows: rows.len(),
            unchecked: count(|row| row.wrong.is_none()),
            without_between: count(|row| row.between_us.is_some_and(|us| us <= 0.0)),
            contest,
            standings: by_plan(&ratios).into_iter().filter_map(standing).collect(),
        }
    }

    /// Returns an error for wrong results.
    pub fn judge(&self) -> Result<()> {
        ensure!(self.wrong == 0, "{} elements are wrong, see #wrong", self.wrong);
        Ok(())
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [ours, theirs, columns] = [Role::Ours, Role::Theirs, Role::Column].map(|role| {
            self.contest.with(role).into_iter().map(Variant::name).collect::<Vec<_>>().join(", ")
        });
        for (plan, standing) in &self.standings {
            let ours = format!("{ours} {plan}");
            writeln!(f, "# {} over the fastest of {theirs}: {standing}", ours.trim_end())?;
        }
        if !self.standings.is_empty() && !columns.is_empty() {
            writeln!(f, "# in no ratio: {columns}")?;
        }
        if self.without_between > 0 {
            let rows = self.without_between;
            writeln!(
                f,
                "# {rows} times after another kernel are not above 0, by noise, and in no ratio"
            )?;
        }
        match self.unchecked {
            0 => write!(f, "# #wrong {}", self.wrong),
            unchecked if unchecked == self.rows => write!(f, "# results were not checked"),
            unchecked => write!(f, "# #wrong {}, {unchecked} rows were not checked", self.wrong),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::report::row::{Case, add_times};
    use crate::report::table::Report;

    /// Returns the standing of each plan in a file of docs/measurements, as `mean worst above`.
    fn standings(name: &str) -> Vec<String> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/measurements");
        let report = Report::<Row>::read(&folder.join(format!("{name}.json"))).unwrap();
        let contest = Contest::of(report.header.as_ref().unwrap().subcommand()).unwrap();
        let ratios = ratios(contest, &report.rows);
        let plans = by_plan(&ratios).into_iter().map(|(plan, ratios)| {
            let Standing { mean, worst, above, .. } = Standing::of(&ratios).unwrap();
            format!("{plan} {mean:.3} {:.3} {above}", worst.value()).trim_start().to_owned()
        });
        plans.collect()
    }

    #[test]
    fn a_ratio_is_that_of_the_default_over_the_fastest_competitor() {
        for (name, expected) in [
            // The product without its all-gather and cuBLASLt with devcomm's do not compete.
            ("allgather-gemm-2xh100-random-graph", &["0.717 0.976 0"][..]),
            ("allgather-gemm-4xh200-graph", &["0.967 0.993 0"]),
            // The product of all rows and one B does not compete.
            ("grouped-gemm-h100-graph", &["0.767 0.865 0"]),
            // Bare stores and the form for many tokens do not compete.
            ("ep-2xh200-graph", &["0.723 1.017 1"]),
            ("ep-2xh100-graph", &["0.674 1.596 2"]),
            // Every plan has the competitors of the shape.
            ("gemm-allreduce-2xh100-graph", &["wide 0.655 0.695 0", "chunked:2 0.995 1.034 1"]),
            ("gemm-allreduce-2xh200-graph", &["0.642 0.700 0"]),
            ("gemm-allreduce-2xh200-random-graph", &["0.590 1.015 1"]),
            // Another kernel that is faster than the default is not the default.
            ("all-reduce-4xh200-f32-graph", &["0.709 1.014 2"]),
            ("gemm-h200-random", &["0.921 1.426 95"]),
        ] {
            assert_eq!(standings(name), expected, "{name}");
        }
    }

    #[test]
    fn a_difference_below_3_percent_is_a_tie_unless_three_starts_agree() {
        let ratio = |starts: &[f64], noise| {
            let (plan, case, m, starts) = (String::new(), String::new(), None, starts.to_vec());
            Ratio { plan, case, m, starts, noise }
        };
        for (starts, noise, is_tie) in [
            (&[0.975][..], 0.0, true),
            (&[1.029], 0.0, true),
            (&[0.969], 0.0, false),
            (&[0.969], 0.04, true),
            (&[0.98, 0.97], 0.0, true),
            (&[0.98, 0.97, 0.99], 0.04, false),
            (&[0.98, 1.01, 0.97], 0.0, true),
        ] {
            assert_eq!(ratio(starts, noise).is_tie(), is_tie, "{starts:?} {noise}");
        }
        assert_eq!(ratio(&[0.9, 1.5, 1.0], 0.0).value(), 1.0);
    }

    #[test]
    fn a_run_without_a_competitor_has_no_standing() {
        assert!(Standing::of(&ratios(Contest::of("gemm").unwrap(), &[])).is_none());
    }

    /// Rows of 4 bytes by `rust`, `nccl-sym` and `nccl`.
    fn measured() -> (&'static Contest, Vec<Row>) {
        let contest = Contest::of("barrier").unwrap();
        let case = Case { size: 4, ..Case::NONE };
        let variants = [Variant::Rust, Variant::NcclSym, Variant::Nccl];
        let mut rows = variants.map(|variant| case.row(variant));
        let rounds = vec![vec![1e-6, 2e-6, 4e-6]];
        add_times(&mut rows, case.bus, &contest.with(Role::Theirs), Some(&rounds));
        (contest, rows.to_vec())
    }

    #[test]
    fn the_summary_names_the_faster_and_the_slower_contender() {
        let (contest, mut rows) = measured();
        let line = "# rust over the fastest of nccl, nccl-sym: geometric mean 0.500 of 1 cases, \
                    worst 0.500 (4), 0 above 1, 0 ties\n# in no ratio: cpp\n# #wrong 0";
        assert_eq!(Summary::of(contest, &rows).to_string(), line);
        rows.iter_mut().for_each(|row| row.time_us = None);
        assert_eq!(Summary::of(contest, &rows).to_string(), "# #wrong 0");
    }

    #[test]
    fn times_after_another_kernel_have_a_standing_of_their_own() {
        let (contest, mut rows) = measured();
        for (row, us) in rows.iter_mut().zip([3.0, 4.0, 6.0]) {
            row.between_us = Some(us);
        }
        let plans: Vec<_> = by_plan(&ratios(contest, &rows))
            .into_iter()
            .map(|(plan, ratios)| (plan.to_owned(), ratios[0].value()))
            .collect();
        assert_eq!(plans, [(String::new(), 0.5), ("after another kernel".to_owned(), 0.75)]);
    }

    #[test]
    fn a_ratio_after_another_kernel_has_the_noise_of_its_times_and_none_without_one() {
        let (contest, mut rows) = measured();
        for (row, us) in rows.iter_mut().zip([3.0, 3.6, 6.0]) {
            (row.between_us, row.noise_percent) = (Some(us), Some(0.1));
        }
        // A difference of 17 % is a tie if the times after another kernel differ by 20 %.
        for (noise, is_tie) in [(None, false), (Some(20.0), true)] {
            rows[1].between_noise_percent = noise;
            assert_eq!(ratios(contest, &rows)[1].is_tie(), is_tie, "{noise:?}");
        }
        rows[2].between_us = Some(-0.5);
        assert_eq!(ratios(contest, &rows).len(), 1);
        let summary = Summary::of(contest, &rows).to_string();
        assert!(summary.contains("# 1 times after another kernel are not above 0"), "{summary}");
    }

    #[test]
    fn wrong_results_fail_whatever_the_times_and_the_unchecked_rows() {
        let (contest, mut rows) = measured();
        rows[1].wrong = Some(7);
        rows[2].wrong = None;
        let summary = Summary::of(contest, &rows);
        let error = summary.judge().unwrap_err().to_string();
        assert!(error.contains("7 elements are wrong"), "{error}");
        assert!(summary.to_string().ends_with("# #wrong 7, 1 rows were not checked"), "{summary}");
    }
}
