//! The rows of the comparison, and their summary with limits.

use std::fmt;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use crate::base::stats::{Spread, geometric_mean};
use crate::contenders::contender::Launch;
use crate::harness::Rounds;
use crate::report::ratio::Ratio;
use crate::report::table::Row;

/// One kernel with one type and size.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TwinRow {
    pub kernel: String,
    pub dtype: String,
    /// Bytes of a message; 0 without messages.
    pub bytes: usize,
    pub blocks: u32,
    pub threads: u32,
    /// Registers per thread.
    pub rust_registers: u32,
    pub cpp_registers: u32,
    /// Microseconds of one operation.
    pub rust_us: f64,
    pub cpp_us: f64,
    /// Rust's time over C++'s: median and interquartile range over rounds.
    pub ratio: f64,
    pub noise: f64,
    /// C++'s time when loaded a second time over its time when loaded first, as `ratio`.
    pub null: f64,
    pub null_noise: f64,
    /// Wrong elements over all ranks; `None` if not checked.
    pub rust_wrong: Option<usize>,
    pub cpp_wrong: Option<usize>,
}

/// A row's identification.
#[derive(Clone, Copy, Debug)]
pub struct Label {
    pub kernel: &'static str,
    pub dtype: &'static str,
    pub bytes: usize,
}

impl TwinRow {
    /// From the times in every round: of Rust, C++, and C++ loaded a second time.
    pub fn new(
        label: Label,
        launches: [Launch; 2],
        rounds: &Rounds,
        wrong: [Option<usize>; 2],
    ) -> Option<Self> {
        let time = |i: usize| Spread::of(rounds.iter().map(|round| round[i]));
        let ratio = |i: usize| Spread::of(rounds.iter().map(|round| round[i] / round[1]));
        let (ours, null) = (ratio(0)?, ratio(2)?);
        Some(Self {
            kernel: label.kernel.to_owned(),
            dtype: label.dtype.to_owned(),
            bytes: label.bytes,
            blocks: launches[0].blocks,
            threads: launches[0].threads,
            rust_registers: launches[0].registers,
            cpp_registers: launches[1].registers,
            rust_us: time(0)?.median * 1e6,
            cpp_us: time(1)?.median * 1e6,
            ratio: ours.median,
            noise: ours.iqr,
            null: null.median,
            null_noise: null.iqr,
            rust_wrong: wrong[0],
            cpp_wrong: wrong[1],
        })
    }

    /// Rust's time over C++'s.
    pub fn as_ratio(&self) -> Ratio {
        Ratio::new(self.name(), self.ratio, self.noise)
    }

    fn name(&self) -> String {
        format!("{} {} {} B {}x{}", self.kernel, self.dtype, self.bytes, self.blocks, self.threads)
    }
}

impl Row for TwinRow {
    const COLUMNS: &'static [(&'static str, &'static str, usize)] = &[
        ("kernel", "", 0),
        ("type", "", 6),
        ("size", "B", 10),
        ("grid", "blocks x threads", 0),
        ("registers", "Rust/C++", 0),
        ("Rust", "us", 0),
        ("C++", "us", 0),
        ("Rust/C++", "time", 0),
        ("noise", "IQR", 0),
        ("null", "C++/C++", 0),
        ("null noise", "IQR", 0),
        ("#wrong", "Rust/C++", 0),
    ];
    const TEXT_COLUMNS: usize = 2;

    fn cells(&self) -> Vec<String> {
        let wrong = |count: Option<usize>| count.map_or("N/A".to_owned(), |n| n.to_string());
        vec![
            self.kernel.clone(),
            self.dtype.clone(),
            self.bytes.to_string(),
            format!("{}x{}", self.blocks, self.threads),
            format!("{}/{}", self.rust_registers, self.cpp_registers),
            format!("{:.2}", self.rust_us),
            format!("{:.2}", self.cpp_us),
            format!("{:.3}", self.ratio),
            format!("{:.3}", self.noise),
            format!("{:.3}", self.null),
            format!("{:.3}", self.null_noise),
            format!("{}/{}", wrong(self.rust_wrong), wrong(self.cpp_wrong)),
        ]
    }
}

/// Summary of all rows, to compare with limits.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    rows: usize,
    mean: f64,
    worst: f64,
    worst_row: String,
    null_mean: f64,
    null_worst: f64,
    wrong: usize,
    checked: bool,
}

impl Verdict {
    /// Summarizes these rows.
    pub fn of(rows: &[TwinRow]) -> Self {
        let worst = rows.iter().max_by(|a, b| a.ratio.total_cmp(&b.ratio));
        let null = rows.iter().map(|row| row.null);
        let distance = |ratio: f64| ratio.ln().abs();
        Self {
            rows: rows.len(),
            mean: geometric_mean(rows.iter().map(|row| row.ratio)).unwrap_or(1.0),
            worst: worst.map_or(1.0, |row| row.ratio),
            worst_row: worst.map_or_else(String::new, TwinRow::name),
            null_mean: geometric_mean(null.clone()).unwrap_or(1.0),
            null_worst: null.max_by(|a, b| distance(*a).total_cmp(&distance(*b))).unwrap_or(1.0),
            wrong: rows.iter().flat_map(|row| [row.rust_wrong, row.cpp_wrong]).flatten().sum(),
            checked: rows.iter().all(|row| row.rust_wrong.is_some()),
        }
    }

    /// An error for wrong results, or if a ratio is above its limit.
    pub fn judge(&self, max_mean: Option<f64>, max_row: Option<f64>) -> Result<()> {
        ensure!(self.wrong == 0, "{} elements are wrong, see #wrong", self.wrong);
        if let Some(limit) = max_mean {
            ensure!(self.mean <= limit, "the geometric mean {:.3} is above {limit}", self.mean);
        }
        if let Some(limit) = max_row {
            let Self { worst, worst_row, .. } = self;
            ensure!(*worst <= limit, "{worst:.3} of {worst_row} is above {limit}");
        }
        Ok(())
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, mean, worst, worst_row, null_mean, null_worst, wrong, checked } = self;
        let wrong = if *checked { wrong.to_string() } else { "not checked".to_owned() };
        write!(
            f,
            "Rust/C++ over {rows} rows: geometric mean {mean:.3}, worst {worst:.3} ({worst_row}); \
             null: geometric mean {null_mean:.3}, farthest {null_worst:.3}; #wrong {wrong}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(rust: f64, wrong: usize) -> TwinRow {
        let label = Label { kernel: "sum", dtype: "f32", bytes: 1024 };
        // Times differ more between rounds than between kernels: ratios are taken within a round.
        let rounds = [[rust, 1.0, 0.99], [rust * 3.0, 3.0, 3.0], [rust * 9.0, 9.0, 9.09]];
        let rounds = rounds.map(Vec::from).to_vec();
        let launches = [30, 32].map(|registers| Launch { blocks: 8, threads: 128, registers });
        TwinRow::new(label, launches, &rounds, [Some(wrong), Some(0)]).unwrap()
    }

    #[test]
    fn a_ratio_is_the_median_of_ratios_within_a_round() {
        let row = row(1.02, 0);
        assert!((row.ratio - 1.02).abs() < 1e-9 && row.noise < 1e-9, "{row:?}");
        assert!((row.null - 1.0).abs() < 1e-9 && (row.null_noise - 0.01).abs() < 1e-9, "{row:?}");
        assert!((row.rust_us - 3.06e6).abs() < 1e-3, "{row:?}");
        assert_eq!(TwinRow::COLUMNS.len(), row.cells().len());
    }

    #[test]
    fn the_verdict_names_mean_and_worst_row_and_keeps_to_limits() {
        let verdict = Verdict::of(&[row(1.02, 0), row(0.98, 0)]);
        let text = verdict.to_string();
        assert!(
            text.contains("2 rows: geometric mean 1.000, worst 1.020 (sum f32 1024 B"),
            "{text}"
        );
        assert!(text.ends_with("#wrong 0"), "{text}");
        verdict.judge(Some(1.03), Some(1.06)).unwrap();
        let error = verdict.judge(Some(1.03), Some(1.01)).unwrap_err().to_string();
        assert!(error.contains("1.020 of sum f32"), "{error}");
        assert!(verdict.judge(Some(0.99), None).is_err());
    }

    #[test]
    fn wrong_results_fail_whatever_the_times() {
        let error = Verdict::of(&[row(0.5, 3)]).judge(None, None).unwrap_err().to_string();
        assert!(error.contains("3 elements are wrong"), "{error}");
    }
}
