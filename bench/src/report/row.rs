//! The rows of a comparison (one variant at one size and type each) and their summary.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::base::stats::Spread;
use crate::contenders::contender::{Launch, Variant};
use crate::contenders::foreign::Foreign;
use crate::harness::Rounds;
use crate::harness::sensors::Reading;
use crate::report::table;

/// Parameters common to all variants of a comparison.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Bytes of a message; 0 for a variant without messages, such as a barrier.
    pub size: usize,
    /// Elements.
    pub count: usize,
    pub dtype: &'static str,
    pub redop: &'static str,
    /// Ratio of bus bandwidth to algorithm bandwidth.
    pub bus: f64,
    /// `[m, n, k]` of a matrix product; `k` is each rank's part of the inner dimension.
    pub shape: Option<[usize; 3]>,
    /// Whether B of a matrix product may be in the L2 cache.
    pub l2: Option<L2>,
    /// The number of tokens on each rank, and the elements of each, if it is about tokens.
    pub tokens: Option<usize>,
    pub hidden: Option<usize>,
}

/// What the L2 cache holds of the inputs when an operation begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum L2 {
    /// What earlier calls with the same inputs left there
    Warm,
    /// No part of B: calls take turns with copies that together exceed four times the L2 cache
    Cold,
}

impl Case {
    /// An exchange without messages.
    pub const NONE: Self = Self {
        size: 0,
        count: 0,
        dtype: "-",
        redop: "-",
        bus: 1.0,
        shape: None,
        l2: None,
        tokens: None,
        hidden: None,
    };

    /// Returns a product of `[m, n, k]` on one GPU, whose elements of C have `bytes` bytes.
    pub fn product(
        dtype: &'static str,
        bytes: usize,
        shape @ [m, n, _]: [usize; 3],
        l2: Option<L2>,
    ) -> Self {
        let (count, shape) = (m * n, Some(shape));
        Self { size: count * bytes, count, dtype, redop: "sum", shape, l2, ..Self::NONE }
    }

    /// Returns whether a peer's result is of this case.
    pub fn has(&self, peer: &Foreign) -> bool {
        (self.size, self.dtype, self.shape) == (peer.size, &*peer.dtype, peer.shape)
            && (peer.hidden.is_none() || (self.tokens, self.hidden) == (peer.tokens, peer.hidden))
            && peer.operation.as_deref().is_none_or(|operation| operation == self.redop)
    }

    /// Returns the shape as text, empty without one.
    pub fn shape(&self) -> String {
        self.shape.map_or_else(String::new, |[m, n, k]| format!("{m}x{n}x{k}"))
    }
}

/// One variant's result in one case.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    pub size: usize,
    pub count: usize,
    #[serde(rename = "type")]
    pub dtype: String,
    pub redop: String,
    /// The shape of a matrix product, as [`Case::shape`].
    pub m: Option<usize>,
    pub n: Option<usize>,
    pub k: Option<usize>,
    /// The sizes [`Case::tokens`] and [`Case::hidden`].
    pub tokens: Option<usize>,
    pub hidden: Option<usize>,
    pub variant: Variant,
    /// Whether it sends and receives in one buffer.
    #[serde(default)]
    pub in_place: bool,
    pub blocks: Option<u32>,
    pub threads: Option<u32>,
    /// Microseconds per operation, the median of the rounds; `None` in the simulator, as are all
    /// derived values.
    pub time_us: Option<f64>,
    /// Algorithm and bus bandwidth in GB/s, as nccl-tests defines them.
    pub algbw: Option<f64>,
    pub busbw: Option<f64>,
    /// The rate of a matrix product: 10^12 operations (a term is two) per second, on each rank.
    pub tflops: Option<f64>,
    /// Wrong elements over all ranks; `None` if not checked.
    pub wrong: Option<usize>,
    /// Interquartile range of the times in percent of their median.
    pub noise_percent: Option<f64>,
    /// This variant's time over that of the fastest competitor: the median of ratios within a
    /// round.
    pub time_over_best: Option<f64>,
    /// The library's algorithm, or the plan of the product in Rust.
    pub algorithm: Option<String>,
    /// The plan that the command line names for it.
    pub asked: Option<String>,
    pub l2: Option<L2>,
    /// Medians of rank 0's GPU while the variant was timed; `None` without NVML.
    pub power_w: Option<f64>,
    pub sm_mhz: Option<f64>,
    pub temperature_c: Option<f64>,
    /// The 99th percentile of the rounds.
    pub p99_us: Option<f64>,
    /// The longest minus the shortest round in percent of their median.
    pub spread_percent: Option<f64>,
    /// Microseconds of a peer after this program, which ran before it, too.
    pub again_us: Option<f64>,
    /// Microseconds after a kernel of another program, without that kernel's (--between).
    pub between_us: Option<f64>,
}

/// A variant's launch and check result, and the GPU's state while it was timed.
#[derive(Clone, Debug)]
pub struct VariantResult {
    pub variant: Variant,
    pub in_place: bool,
    pub launch: Option<Launch>,
    pub algorithm: Option<String>,
    pub asked: Option<String>,
    pub wrong: Option<usize>,
    pub reading: Reading,
    /// Seconds after a kernel of another program.
    pub between: Option<f64>,
}

impl VariantResult {
    /// Returns a row with right results, of which nothing else is known.
    pub fn new(variant: Variant) -> Self {
        Self {
            variant,
            in_place: false,
            launch: None,
            algorithm: None,
            asked: None,
            wrong: Some(0),
            reading: Reading::default(),
            between: None,
        }
    }
}

/// Returns the rows of a case, from the variants' times.
pub fn rows(
    case: Case,
    competitors: &[Variant],
    ran: &[VariantResult],
    rounds: Option<&Rounds>,
) -> Vec<Row> {
    let spread = |time: &dyn Fn(&[f64]) -> f64| Spread::of(rounds?.iter().map(|round| time(round)));
    let median = |i: usize| spread(&|round| round[i]).map_or(f64::INFINITY, |time| time.median);
    let best = |in_place| {
        (0..ran.len())
            .filter(|&i| competitors.contains(&ran[i].variant) && ran[i].in_place == in_place)
            .min_by(|&a, &b| median(a).total_cmp(&median(b)))
    };
    let best = [best(false), best(true)];
    let row = |(i, ran): (usize, &VariantResult)| {
        let time = spread(&|round| round[i]);
        let bandwidth =
            time.filter(|_| case.size > 0).map(|time| case.size as f64 / time.median / 1e9);
        let operations = case.shape.map(|[m, n, k]| 2.0 * m as f64 * n as f64 * k as f64);
        let rate = operations.zip(time).map(|(count, time)| count / time.median / 1e12);
        Row {
            size: case.size,
            count: case.count,
            dtype: case.dtype.to_owned(),
            redop: case.redop.to_owned(),
            m: case.shape.map(|[m, _, _]| m),
            n: case.shape.map(|[_, n, _]| n),
            k: case.shape.map(|[_, _, k]| k),
            tokens: case.tokens,
            hidden: case.hidden,
            variant: ran.variant,
            in_place: ran.in_place,
            blocks: ran.launch.map(|launch| launch.blocks),
            threads: ran.launch.map(|launch| launch.threads),
            time_us: time.map(|time| time.median * 1e6),
            algbw: bandwidth,
            busbw: bandwidth.map(|bandwidth| bandwidth * case.bus),
            tflops: rate,
            wrong: ran.wrong,
            noise_percent: time.map(|time| time.iqr / time.median * 100.0),
            time_over_best: best[usize::from(ran.in_place)]
                .and_then(|best| Some(spread(&|round| round[i] / round[best])?.median)),
            algorithm: ran.algorithm.clone(),
            asked: ran.asked.clone(),
            l2: case.l2,
            power_w: ran.reading.power_w,
            sm_mhz: ran.reading.sm_mhz,
            temperature_c: ran.reading.temperature_c,
            p99_us: time.map(|time| time.p99 * 1e6),
            spread_percent: time.map(|time| time.range / time.median * 100.0),
            again_us: None,
            between_us: ran.between.map(|seconds| seconds * 1e6),
        }
    };
    let mut rows: Vec<Row> = ran.iter().enumerate().map(row).collect();
    // Rows of a variant are neighbours.
    let first = |row: &Row| ran.iter().position(|other| other.variant == row.variant);
    rows.sort_by_key(|row| (row.in_place, first(row)));
    rows
}

impl table::Row for Row {
    const COLUMNS: &'static [(&'static str, &'static str, usize)] = &[
        ("size", "B", 10),
        ("count", "elements", 10),
        ("type", "", 6),
        ("redop", "", 0),
        ("shape", "m x n x k", 16),
        ("variant", "", 14),
        ("grid", "blocks x threads", 0),
        ("time", "us", 8),
        ("algbw", "GB/s", 7),
        ("busbw", "GB/s", 7),
        ("#wrong", "", 0),
        ("noise", "% IQR", 0),
        ("p99", "us", 8),
        ("spread", "%", 0),
        ("between", "us", 0),
        ("time/best", "<1: faster", 0),
        ("power", "W", 0),
        ("SM clock", "MHz", 0),
        ("temperature", "C", 0),
        ("rate", "TFLOP/s", 0),
        ("algorithm", "", 0),
    ];
    const TEXT_COLUMNS: usize = 0;

    fn cells(&self) -> Vec<String> {
        let number = |value: Option<f64>, digits: usize| {
            value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
        };
        vec![
            self.size.to_string(),
            self.count.to_string(),
            self.dtype.clone(),
            self.redop.clone(),
            self.shape().unwrap_or("-".to_owned()),
            self.variant.to_string(),
            self.grid().unwrap_or("-".to_owned()),
            number(self.time_us, 2),
            number(self.algbw, 2),
            number(self.busbw, 2),
            self.wrong.map_or("N/A".to_owned(), |wrong| wrong.to_string()),
            number(self.noise_percent, 1),
            number(self.p99_us, 2),
            number(self.spread_percent, 1),
            number(self.between_us, 2),
            number(self.time_over_best, 3),
            number(self.power_w, 0),
            number(self.sm_mhz, 0),
            number(self.temperature_c, 0),
            number(self.tflops, 1),
            self.algorithm.clone().unwrap_or("-".to_owned()),
        ]
    }

    /// Leaves out what a machine or a benchmark does not tell: that is not in the table.
    fn has_column(rows: &[Self], column: &str) -> bool {
        match column {
            "p99" | "spread" => rows.iter().any(|row| row.p99_us.is_some()),
            "between" => rows.iter().any(|row| row.between_us.is_some()),
            "time/best" => rows.iter().any(|row| row.time_over_best.is_some()),
            "power" => rows.iter().any(|row| row.power_w.is_some()),
            "SM clock" => rows.iter().any(|row| row.sm_mhz.is_some()),
            "temperature" => rows.iter().any(|row| row.temperature_c.is_some()),
            "rate" => rows.iter().any(|row| row.tflops.is_some()),
            "algorithm" => rows.iter().any(|row| row.algorithm.is_some()),
            _ => true,
        }
    }
}

impl Row {
    /// Returns the matrix product's `m x n x k`.
    pub fn shape(&self) -> Option<String> {
        let (m, n, k) = (self.m?, self.n?, self.k?);
        Some(format!("{m}x{n}x{k}"))
    }

    /// Returns the variant, what was asked of it, and whether it is in place.
    pub fn name(&self) -> String {
        let asked = self.asked.as_ref().map_or_else(String::new, |asked| format!(" {asked}"));
        format!("{}{asked}{}", self.variant, if self.in_place { " in place" } else { "" })
    }

    /// Returns the kernel's blocks and threads.
    pub fn grid(&self) -> Option<String> {
        Some(format!("{}x{}", self.blocks?, self.threads?))
    }

    /// Returns the plan that was asked for or taken, without the details.
    pub fn plan(&self) -> &str {
        let text = self.asked.as_deref().or(self.algorithm.as_deref()).unwrap_or_default();
        text.split([',', '(']).next().unwrap_or_default().trim_end()
    }

    /// Returns whether it is of the same size, shape, type and place.
    pub fn is_like(&self, other: &Self) -> bool {
        let numbers = |row: &Self| {
            [Some(row.size), Some(row.count), row.m, row.n, row.k, row.tokens, row.hidden]
        };
        let names = |row: &Self| (row.dtype.clone(), row.redop.clone(), row.l2, row.in_place);
        numbers(self) == numbers(other) && names(self) == names(other)
    }

    /// Returns the shape, the tokens, the size or, without any, the grid.
    pub fn label(&self) -> String {
        let size = || match (self.tokens, self.size) {
            (Some(tokens), _) => format!("{tokens} tokens"),
            (None, 0) => self.grid().unwrap_or("-".to_owned()),
            (None, size) => bytes(size),
        };
        let place = if self.in_place { " in place" } else { "" };
        let label = self.shape().unwrap_or_else(size) + place;
        match &*self.redop {
            "-" | "sum" => label,
            operation => format!("{operation} of {label}"),
        }
    }
}

/// Returns the rows of NCCL in a configuration, as a peer of another start of this program prints
/// them.
pub fn lines_of_peer(algorithm: &str, rows: &[Row], rounds: Option<&Rounds>) -> String {
    let line = |(i, row): (usize, &Row)| {
        let times = rounds.into_iter().flatten().map(|round| round[i] * 1e6);
        let line = serde_json::json!({
            "variant": row.variant, "algorithm": algorithm, "type": row.dtype, "size": row.size,
            "tokens": row.tokens, "hidden": row.hidden, "operation": row.redop, "wrong": row.wrong,
            "shape": row.m.zip(row.n).zip(row.k).map(|((m, n), k)| [m, n, k]),
            "times_us": times.collect::<Vec<_>>(),
        });
        line.to_string()
    };
    rows.iter().enumerate().map(line).collect::<Vec<_>>().join("\n")
}

/// Adds what peers measured after this program to the rows from before it. Returns a line of how
/// they differ.
pub fn join_again(rows: &mut [Row], again: &[Foreign]) -> String {
    let mut drifts = Vec::new();
    for peer in again {
        let case = |row: &Row| row.m.zip(row.n).zip(row.k).map(|((m, n), k)| [m, n, k]);
        let is_same = |row: &&mut Row| {
            (row.variant, row.size, &*row.dtype) == (peer.variant, peer.size, &*peer.dtype)
                && (case(row), &row.asked) == (peer.shape, &peer.algorithm)
                && (peer.hidden.is_none() || (row.tokens, row.hidden) == (peer.tokens, peer.hidden))
                && peer.operation.as_ref().is_none_or(|operation| *operation == row.redop)
        };
        let found = rows.iter_mut().find(is_same);
        let Some((row, time)) = found.zip(Spread::of(peer.times.iter().copied())) else { continue };
        let us = time.median * 1e6;
        row.again_us = Some(us);
        drifts.extend(row.time_us.map(|before| (us / before - 1.0) * 100.0));
    }
    let median = Spread::of(drifts.iter().copied()).map_or(0.0, |drift| drift.median);
    let largest = drifts
        .iter()
        .copied()
        .fold(0.0, |most: f64, x| if x.abs() > most.abs() { x } else { most });
    format!(
        "# peers again, after this program: {median:+.1} % in the median of {} rows, {largest:+.1} \
         % at most",
        drifts.len()
    )
}

/// Returns a size in the largest unit that it is a multiple of, with a suffix of nccl-tests' flags.
pub fn bytes(size: usize) -> String {
    let units = [(30, "G"), (20, "M"), (10, "K")];
    let unit = units.into_iter().find(|(shift, _)| size.trailing_zeros() >= *shift);
    unit.map_or(size.to_string(), |(shift, unit)| format!("{}{unit}", size >> shift))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contenders::contest::Contest;
    use crate::report::table::Row as _;

    const CASE: Case =
        Case { size: 3000, count: 750, dtype: "f32", redop: "sum", bus: 1.5, ..Case::NONE };

    /// Returns the contest in which the competitors are `nccl` and `nccl-sym`.
    fn contest() -> &'static Contest {
        Contest::of("barrier").unwrap()
    }

    fn ran(variant: Variant) -> VariantResult {
        let launch = Launch { blocks: 4, threads: 128, registers: 32 };
        let launch = (variant == Variant::Rust).then_some(launch);
        let reading = Reading { power_w: Some(650.4), ..Reading::default() };
        VariantResult { launch, reading, ..VariantResult::new(variant) }
    }

    fn measured() -> Vec<Row> {
        // The times differ more between rounds than between variants.
        let rounds =
            vec![vec![1e-6, 2e-6, 4e-6], vec![3e-6, 6e-6, 12e-6], vec![9e-6, 18e-6, 36e-6]];
        let variants = [Variant::Rust, Variant::NcclSym, Variant::Nccl];
        rows(CASE, contest().competitors, &variants.map(ran), Some(&rounds))
    }

    #[test]
    fn bandwidths_and_ratios_follow_from_the_rounds() {
        let rows = measured();
        let near = |value: Option<f64>, expected: f64| {
            assert!((value.unwrap() - expected).abs() < 1e-9, "{value:?} {expected}");
        };
        near(rows[0].time_us, 3.0);
        near(rows[0].algbw, 1.0);
        near(rows[0].busbw, 1.5);
        near(rows[0].noise_percent, 4.0 / 3.0 * 100.0);
        near(rows[0].spread_percent, 8.0 / 3.0 * 100.0);
        near(rows[0].p99_us, 3.0 + 0.98 * 6.0);
        // `nccl-sym` is the fastest competitor.
        near(rows[0].time_over_best, 0.5);
        near(rows[2].time_over_best, 2.0);
        assert_eq!(rows[0].cells().len(), Row::COLUMNS.len());
        assert_eq!(rows[2].cells()[6], "-");
    }

    #[test]
    fn peers_that_are_measured_again_tell_how_they_drift() {
        let mut rows = measured();
        rows[1].asked = Some("one-shot".to_owned());
        let again = |algorithm: &str| Foreign {
            algorithm: Some(algorithm.to_owned()),
            times: vec![6.6e-6],
            ..Foreign::new(Variant::NcclSym, "f32", 3000)
        };
        let line = join_again(&mut rows, &[again("one-shot"), again("two-shot")]);
        assert!(line.ends_with("+10.0 % in the median of 1 rows, +10.0 % at most"), "{line}");
        assert!((rows[1].again_us.unwrap() - 6.6).abs() < 1e-9 && rows[2].again_us.is_none());
    }

    #[test]
    fn a_product_has_a_rate() {
        let case = Case { shape: Some([100, 200, 500]), ..CASE };
        let rows = rows(case, &[], &[ran(Variant::Rust)], Some(&vec![vec![1e-6]]));
        assert!((rows[0].tflops.unwrap() - 20.0).abs() < 1e-9, "{rows:?}");
        assert!(Row::has_column(&rows, "rate") && !Row::has_column(&measured(), "rate"));
    }

    #[test]
    fn without_times_there_is_a_dash_and_no_ratio() {
        let rows =
            rows(CASE, contest().competitors, &[ran(Variant::Rust), ran(Variant::Nccl)], None);
        assert_eq!(
            rows[0].cells()[4..],
            [
                "-", "rust", "4x128", "-", "-", "-", "0", "-", "-", "-", "-", "-", "650", "-", "-",
                "-", "-"
            ]
            .map(str::to_owned)
        );
    }
}
