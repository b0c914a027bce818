//! Compares two runs of a benchmark, row by row.
//!
//! A time is the median of a run's rounds. Its standard error follows from their interquartile
//! range, as for normally distributed times. A row became faster or slower if its times differ by
//! more than three standard errors of the difference and by more than 3 %: two starts on one
//! machine differ by up to that without a cause in the code. With three starts of both versions a
//! row changed if all times of one version are below all of the other.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::base::options::ROUNDS;
use crate::base::{Spread, geometric_mean};
use crate::harness::header::Header;
use crate::report::ratio::{LEAST, STARTS};
use crate::report::row::Row;
use crate::report::table::{self, Column, Report, number};

/// Flags of `devcomm-bench compare`.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// The earlier run: a file NAME.json that --json wrote, and with it NAME-start2.json and so on,
    /// which are further starts of the same program
    old: PathBuf,

    /// The later run, likewise
    new: PathBuf,
}

/// Compares two files.
pub fn run(options: &Options) -> Result<()> {
    Comparison::of(&starts(&options.old)?, &starts(&options.new)?)?.publish()
}

/// Returns a run and its further starts, whatever their numbers are.
fn starts(path: &Path) -> Result<Vec<Report<Row>>> {
    let first = format!("{}-start", path.file_stem().unwrap_or_default().display());
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let entries = fs::read_dir(folder.unwrap_or(Path::new("."))).into_iter().flatten().flatten();
    let is_start = |other: &PathBuf| {
        let name = other.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(&first) && name.ends_with(".json")
    };
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(is_start).collect();
    paths.sort();
    paths.insert(0, path.to_owned());
    paths.iter().map(|path| Report::read(path)?.require_end(path)).collect()
}

/// Standard errors that a difference exceeds.
const ERRORS: f64 = 3.0;

/// The result of the comparison of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Faster,
    Same,
    Slower,
}

/// A row of both runs.
#[derive(Clone, Debug)]
struct Change {
    /// The row of the later run.
    row: Row,
    /// Microseconds.
    old_us: f64,
    new_us: f64,
    /// The difference that noise explains, relative to the old time.
    noise: f64,
    verdict: Verdict,
}

/// Two runs of a benchmark.
#[derive(Debug)]
pub struct Comparison {
    changes: Vec<Change>,
    /// Differences between the command lines and the machines.
    notes: Vec<String>,
    /// Rows that only one run has.
    only_old: usize,
    only_new: usize,
    /// Rows of the later run that are not compared, as a run has several of their variant and case.
    ambiguous: usize,
    /// Whether all starts decided, and not the noise.
    by_starts: bool,
    /// The wrong elements of all starts.
    wrong: usize,
}

/// Flags that change the work of rows of the same case.
const WORK: &str = "--host --both --beside --concurrent --epilogue --scales --groups --split \
    --experts --top-k --routing --gin-loopback";

/// Returns whether two rows are of the same variant and case.
fn same_case(a: &Row, b: &Row) -> bool {
    // A grid is a choice of the kernel, except where it is what varies: in barriers.
    let grid = |row: &Row| (row.size == 0).then_some((row.blocks, row.threads));
    a.is_like(b) && a.name() == b.name() && grid(a) == grid(b)
}

/// Returns the standard error of a row's time, relative to it, after this many rounds.
fn standard_error(row: &Row, rounds: usize) -> f64 {
    // In a normal distribution the interquartile range is 1.349 standard deviations, and the
    // median's standard error is sqrt(pi / 2) times the mean's.
    let deviation = row.noise_percent.unwrap_or(0.0) / 100.0 / 1.349;
    deviation * (std::f64::consts::FRAC_PI_2 / rounds as f64).sqrt()
}

impl Change {
    fn percent(&self) -> f64 {
        (self.new_us / self.old_us - 1.0) * 100.0
    }

    /// Returns the change of a row, from the starts that have it: at least one of each program.
    /// The noise is that of the first starts. `None` if it has no time before or after.
    fn of(old: &[&Row], new: &[&Row], rounds: [usize; 2]) -> Option<Self> {
        let times = |rows: &[&Row]| rows.iter().filter_map(|row| row.time_us).collect::<Vec<_>>();
        let (before, after) = (times(old), times(new));
        let median = |times: &[f64]| Some(Spread::of(times.iter().copied())?.median);
        let (old_us, new_us) = (median(&before)?, median(&after)?);
        let (old, new) = (old[0], new[0]);
        let ratio = new_us / old_us;
        let noise = ERRORS
            * f64::hypot(standard_error(old, rounds[0]), ratio * standard_error(new, rounds[1]));
        let all_below = |a: &[f64], b: &[f64]| a.iter().all(|a| b.iter().all(|b| a < b));
        let differ = match before.len().min(after.len()) {
            STARTS.. => all_below(&before, &after) || all_below(&after, &before),
            _ => (ratio - 1.0).abs() > noise.max(LEAST),
        };
        let verdict = match differ {
            false => Verdict::Same,
            true if ratio < 1.0 => Verdict::Faster,
            true => Verdict::Slower,
        };
        Some(Self { row: new.clone(), old_us, new_us, noise, verdict })
    }
}

impl Comparison {
    /// Refuses runs of different benchmarks, numbers of ranks, or ways to launch.
    pub fn of<'a>(old_starts: &'a [Report<Row>], new_starts: &'a [Report<Row>]) -> Result<Self> {
        let (old, new) = old_starts.first().zip(new_starts.first()).context("there is no run")?;
        let header = |report: &Report<Row>| report.header.clone().context("a run has no header");
        let (before, after) = (header(old)?, header(new)?);
        let (names, ranks) =
            ([&before, &after].map(Header::subcommand), [&before, &after].map(|h| h.ranks));
        ensure!(names[0] == names[1], "{} and {} cannot be compared", names[0], names[1]);
        ensure!(
            ranks[0] == ranks[1],
            "runs with {} and {} ranks cannot be compared",
            ranks[0],
            ranks[1]
        );
        ensure!(
            before.in_graphs() == after.in_graphs(),
            "plain launches and graphs (-G) cannot be compared"
        );
        for flag in WORK.split_whitespace() {
            let [a, b] = [&before, &after].map(|header| header.setting(flag));
            ensure!(a == b, "runs with different {flag} cannot be compared: `{a}` and `{b}`");
        }
        let rounds = [&before, &after].map(|header| {
            let value = header.value(["--rounds"; 2]).and_then(|rounds| rounds.parse().ok());
            value.unwrap_or(ROUNDS)
        });
        let (mut changes, mut ambiguous) = (Vec::new(), 0);
        let all = || old_starts.iter().chain(new_starts);
        for row in &new.rows {
            let of_case =
                |start: &'a Report<Row>| start.rows.iter().filter(|other| same_case(other, row));
            if all().any(|start| of_case(start).count() > 1) {
                ambiguous += 1;
                continue;
            }
            let same = |start| of_case(start).next();
            let [earlier, later] = [old_starts, new_starts]
                .map(|starts| starts.iter().filter_map(same).collect::<Vec<_>>());
            if !earlier.is_empty() {
                changes.extend(Change::of(&earlier, &later, rounds));
            }
        }
        if changes.is_empty() {
            bail!("no row has a time in both runs");
        }
        let alone = |rows: &[Row], others: &[Row]| {
            rows.iter().filter(|row| !others.iter().any(|other| same_case(other, row))).count()
        };
        Ok(Self {
            changes,
            notes: notes(&before, &after),
            only_old: alone(&old.rows, &new.rows),
            only_new: alone(&new.rows, &old.rows),
            ambiguous,
            by_starts: old_starts.len().min(new_starts.len()) >= STARTS,
            wrong: all().flat_map(|start| &start.rows).filter_map(|row| row.wrong).sum(),
        })
    }

    /// Prints rows and summary. Wrong results and rows that became slower are an error.
    pub fn publish(&self) -> Result<()> {
        println!("\n{}\n\n{self}", table::lines(&self.changes));
        let wrong = self.wrong;
        ensure!(wrong == 0, "{wrong} elements are wrong: `devcomm-bench rows` shows them");
        let slower = self.count(Verdict::Slower);
        ensure!(slower == 0, "{slower} of {} rows became slower", self.changes.len());
        Ok(())
    }

    fn count(&self, verdict: Verdict) -> usize {
        self.changes.iter().filter(|change| change.verdict == verdict).count()
    }
}

/// Returns what differs between the command lines and the machines of two runs.
fn notes(old: &Header, new: &Header) -> Vec<String> {
    let facts = |header: &Header| {
        let machine = header.machine.as_ref();
        let state = machine.and_then(|machine| machine.state.as_ref());
        [
            ("flags", Some(header.flags(""))),
            ("GPU", machine.map(|machine| machine.gpu.clone())),
            ("links", machine.and_then(|machine| machine.links.clone())),
            ("NCCL", machine.map(|machine| machine.nccl.clone())),
            ("NVLS", machine.map(|machine| machine.nvls.clone())),
            ("driver", state.map(|state| state.driver.clone())),
            ("power limit", state.map(|state| state.power_limit.clone())),
        ]
    };
    let pairs = facts(old).into_iter().zip(facts(new));
    let differ = pairs.filter(|(old, new)| old != new);
    let known = |value: Option<String>| value.unwrap_or("not known".to_owned());
    differ.map(|((name, a), (_, b))| format!("{name}: {}, now {}", known(a), known(b))).collect()
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for note in &self.notes {
            writeln!(f, "# {note}")?;
        }
        if self.ambiguous > 0 {
            let rows = self.ambiguous;
            writeln!(f, "# {rows} rows are not compared, as a run has several of their name")?;
        }
        let rows = &self.changes;
        let mean = geometric_mean(rows.iter().map(|change| change.new_us / change.old_us));
        write!(
            f,
            "# {} rows: {} faster, {} the same, {} slower ({}); geometric mean of new over old \
             {:.3}; {} rows only in the old run, {} only in the new one",
            rows.len(),
            self.count(Verdict::Faster),
            self.count(Verdict::Same),
            self.count(Verdict::Slower),
            if self.by_starts { "in all starts" } else { "by more than noise and 3 %" },
            mean.unwrap_or(1.0),
            self.only_old,
            self.only_new,
        )
    }
}

impl table::Row for Change {
    const COLUMNS: &'static [Column<Self>] = &[
        Column::new("size", "B", 0, |change| Some(change.row.size.to_string())),
        Column::new("type", "", 0, |change| Some(change.row.dtype.clone())),
        Column::new("redop", "", 0, |change| Some(change.row.redop.clone())),
        Column::if_any("shape", "m x n x k", 0, |change| change.row.shape()),
        Column::if_any("tokens", "x elements", 0, |change| {
            Some(format!("{}x{}", change.row.tokens?, change.row.hidden?))
        }),
        Column::if_any("grid", "blocks x threads", 0, |change| change.row.grid()),
        Column::new("variant", "", 0, |change| Some(change.row.name())),
        Column::new("old", "us", 0, |change| number(Some(change.old_us), 2)),
        Column::new("new", "us", 0, |change| number(Some(change.new_us), 2)),
        Column::new("change", "%", 0, |change| Some(format!("{:+.1}", change.percent()))),
        Column::new("noise", "%", 0, |change| number(Some(100.0 * change.noise), 1)),
        Column::new("verdict", "", 0, |change| {
            Some(format!("{:?}", change.verdict).to_lowercase())
        }),
    ];
}
