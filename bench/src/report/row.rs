//! The rows of a comparison (one variant at one size and type each) and their summary.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::base::Spread;
use crate::contenders::{PeerResult, Variant};
use crate::harness::Rounds;
use crate::report::table::{self, Column, number};

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
    pub fn has(&self, peer: &PeerResult) -> bool {
        (self.size, self.dtype, self.shape) == (peer.size, &*peer.dtype, peer.shape)
            && (peer.hidden.is_none() || (self.tokens, self.hidden) == (peer.tokens, peer.hidden))
            && peer.operation.as_deref().is_none_or(|operation| operation == self.redop)
    }

    /// Returns a row without wrong elements and without measurements.
    pub fn row(&self, variant: Variant) -> Row {
        let [m, n, k] = self.shape.map_or([None; 3], |extents| extents.map(Some));
        let Self { size, count, l2, tokens, hidden, .. } = *self;
        let (dtype, redop) = (self.dtype.to_owned(), self.redop.to_owned());
        let case = Row { size, count, dtype, redop, m, n, k, tokens, hidden, l2, ..Row::default() };
        Row { variant, wrong: Some(0), ..case }
    }

    /// Returns the shape as text, empty without one.
    pub fn shape(&self) -> String {
        self.shape.map_or_else(String::new, |[m, n, k]| format!("{m}x{n}x{k}"))
    }
}

/// One variant's result in one case.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
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
    /// Whether the variant sends and receives in one buffer.
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
    /// The rate of a matrix product: 10^12 operations (a multiply-add counts as two) per second, on
    /// each rank.
    pub tflops: Option<f64>,
    /// Wrong elements over all ranks, of those that are checked: of large results some are. `None`
    /// without checks.
    pub wrong: Option<usize>,
    /// Interquartile range of the times in percent of their median.
    pub noise_percent: Option<f64>,
    /// This variant's time over that of the fastest competitor: the median of ratios within a
    /// round.
    pub time_over_best: Option<f64>,
    /// The library's algorithm, or the plan of the product in Rust.
    pub algorithm: Option<String>,
    /// The plan, or the configuration of NCCL, that the command line names for it; of a peer
    /// program, the algorithm that its result names. It tells rows of one variant apart.
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
    /// Microseconds of a peer program in its second run, after this program.
    pub again_us: Option<f64>,
    /// Microseconds of the operation when a plain kernel runs before each call, without that
    /// kernel's own time (--between).
    pub between_us: Option<f64>,
    /// The interquartile range of these times in percent of their median; `None` in files of
    /// earlier versions.
    pub between_noise_percent: Option<f64>,
}

/// Adds the columns that follow from the times to the rows of a case, and sorts the rows: out of
/// place first, then by variant in the order in which these first come. `bus` is [`Case::bus`].
/// Each of `rounds` has a time for each row, in the order that the rows have before.
pub fn add_times(rows: &mut [Row], bus: f64, competitors: &[Variant], rounds: Option<&Rounds>) {
    let spread = |time: &dyn Fn(&[f64]) -> f64| Spread::of(rounds?.iter().map(|round| time(round)));
    let median = |i: usize| spread(&|round| round[i]).map_or(f64::INFINITY, |time| time.median);
    // The fastest competitor out of place, and in place.
    let best = [false, true].map(|in_place| {
        (0..rows.len())
            .filter(|&i| competitors.contains(&rows[i].variant) && rows[i].in_place == in_place)
            .min_by(|&a, &b| median(a).total_cmp(&median(b)))
    });
    for (i, row) in rows.iter_mut().enumerate() {
        let Some(time) = spread(&|round| round[i]) else { continue };
        let best = best[usize::from(row.in_place)];
        let bandwidth = (row.size > 0).then(|| row.size as f64 / time.median / 1e9);
        row.time_us = Some(time.median * 1e6);
        row.p99_us = Some(time.p99 * 1e6);
        row.noise_percent = Some(time.iqr / time.median * 100.0);
        row.spread_percent = Some(time.range / time.median * 100.0);
        row.algbw = bandwidth;
        row.busbw = bandwidth.map(|bandwidth| bandwidth * bus);
        row.tflops = row.operations().map(|count| count / time.median / 1e12);
        row.time_over_best =
            best.and_then(|best| Some(spread(&|round| round[i] / round[best])?.median));
    }
    let order: Vec<Variant> = rows.iter().map(|row| row.variant).collect();
    rows.sort_by_key(|row| (row.in_place, order.iter().position(|other| *other == row.variant)));
}

impl table::Row for Row {
    const COLUMNS: &'static [Column<Self>] = &[
        Column::new("size", "B", 10, |row| Some(row.size.to_string())),
        Column::new("count", "elements", 10, |row| Some(row.count.to_string())),
        Column::new("type", "", 6, |row| Some(row.dtype.clone())),
        Column::new("redop", "", 0, |row| Some(row.redop.clone())),
        Column::new("shape", "m x n x k", 16, Self::shape),
        Column::new("variant", "", 14, |row| Some(row.variant.to_string())),
        Column::new("grid", "blocks x threads", 0, Self::grid),
        Column::new("time", "us", 8, |row| number(row.time_us, 2)),
        Column::new("algbw", "GB/s", 7, |row| number(row.algbw, 2)),
        Column::new("busbw", "GB/s", 7, |row| number(row.busbw, 2)),
        Column::new("#wrong", "", 0, |row| Some(wrong(row.wrong))),
        Column::new("noise", "% IQR", 0, |row| number(row.noise_percent, 1)),
        Column::if_any("p99", "us", 8, |row| number(row.p99_us, 2)),
        Column::if_any("spread", "%", 0, |row| number(row.spread_percent, 1)),
        Column::if_any("between", "us", 0, |row| number(row.between_us, 2)),
        Column::if_any("time/best", "<1: faster", 0, |row| number(row.time_over_best, 3)),
        Column::if_any("power", "W", 0, |row| number(row.power_w, 0)),
        Column::if_any("SM clock", "MHz", 0, |row| number(row.sm_mhz, 0)),
        Column::if_any("temperature", "C", 0, |row| number(row.temperature_c, 0)),
        Column::if_any("rate", "TFLOP/s", 0, |row| number(row.tflops, 1)),
        Column::if_any("algorithm", "", 0, |row| row.algorithm.clone()),
    ];
}

/// Returns a number of wrong elements as text.
pub fn wrong(wrong: Option<usize>) -> String {
    wrong.map_or("N/A".to_owned(), |wrong| wrong.to_string())
}

impl Row {
    /// Returns the extents `[m, n, k]` of a matrix product.
    pub fn extents(&self) -> Option<[usize; 3]> {
        Some([self.m?, self.n?, self.k?])
    }

    /// Returns the matrix product's `m x n x k`.
    pub fn shape(&self) -> Option<String> {
        self.extents().map(|[m, n, k]| format!("{m}x{n}x{k}"))
    }

    /// Returns the operations of a matrix product: a term is two.
    pub fn operations(&self) -> Option<f64> {
        self.extents().map(|[m, n, k]| 2.0 * m as f64 * n as f64 * k as f64)
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

    /// Returns whether it is of the same size, shape, type, reduction, L2 cache and place.
    pub fn is_like(&self, other: &Self) -> bool {
        let numbers = |row: &Self| {
            [Some(row.size), Some(row.count), row.m, row.n, row.k, row.tokens, row.hidden]
        };
        let names = |row: &Self| (row.dtype.clone(), row.redop.clone(), row.l2, row.in_place);
        numbers(self) == numbers(other) && names(self) == names(other)
    }

    /// Returns the shape, the tokens, the size or, without any, the grid.
    pub fn label(&self) -> String {
        let size = || match (self.tokens, self.hidden, self.size) {
            (Some(tokens), Some(hidden), _) => format!("{tokens} tokens of {hidden}"),
            (_, _, 0) => self.grid().unwrap_or("-".to_owned()),
            (_, _, size) => bytes(size),
        };
        let place = if self.in_place { " in place" } else { "" };
        let label = self.shape().unwrap_or_else(size) + place;
        match &*self.redop {
            "-" | "sum" => label,
            operation => format!("{operation} of {label}"),
        }
    }
}

/// Returns the rows of NCCL as this program prints them when it is another start's peer program.
/// They are of one variant, so that they still have the order of the times in a round.
pub fn lines_of_peer(algorithm: &str, rows: &[Row], rounds: Option<&Rounds>) -> String {
    let line = |(i, row): (usize, &Row)| {
        let times = rounds.into_iter().flatten().map(|round| round[i] * 1e6);
        let line = serde_json::json!({
            "variant": row.variant, "algorithm": algorithm, "type": row.dtype, "size": row.size,
            "tokens": row.tokens, "hidden": row.hidden, "operation": row.redop, "wrong": row.wrong,
            "shape": row.extents(),
            "times_us": times.collect::<Vec<_>>(),
        });
        line.to_string()
    };
    rows.iter().enumerate().map(line).collect::<Vec<_>>().join("\n")
}

/// Adds the times of the peers' second run, after this program, to their rows. Returns a line that
/// tells the difference.
pub fn join_again(rows: &mut [Row], again: &[PeerResult]) -> String {
    let mut drifts = Vec::new();
    for peer in again {
        let is_same = |row: &&mut Row| {
            (row.variant, row.size, &*row.dtype) == (peer.variant, peer.size, &*peer.dtype)
                && (row.extents(), &row.asked) == (peer.shape, &peer.algorithm)
                && (peer.hidden.is_none() || (row.tokens, row.hidden) == (peer.tokens, peer.hidden))
                && peer.operation.as_ref().is_none_or(|operation| *operation == row.redop)
        };
        let found = rows.iter_mut().find(is_same);
        let Some((row, time)) = found.zip(Spread::of(peer.times_us.iter().copied())) else {
            continue;
        };
        row.again_us = Some(time.median);
        drifts.extend(row.time_us.map(|before| (time.median / before - 1.0) * 100.0));
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

/// Returns a size, not 0, in the largest unit that it is a multiple of, with a suffix of
/// nccl-tests' flags.
pub fn bytes(size: usize) -> String {
    let units = [(30, "G"), (20, "M"), (10, "K")];
    let unit = units.into_iter().find(|(shift, _)| size.trailing_zeros() >= *shift);
    unit.map_or(size.to_string(), |(shift, unit)| format!("{}{unit}", size >> shift))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contenders::{Contest, Role};
    use crate::report::table::Row as _;

    const CASE: Case =
        Case { size: 3000, count: 750, dtype: "f32", redop: "sum", bus: 1.5, ..Case::NONE };

    /// Returns the contest in which the competitors are `nccl` and `nccl-sym`.
    fn contest() -> &'static Contest {
        Contest::of("barrier").unwrap()
    }

    fn row(variant: Variant) -> Row {
        let grid = (variant == Variant::Rust).then_some([4, 128]);
        let [blocks, threads] = grid.map_or([None; 2], |grid| grid.map(Some));
        Row { blocks, threads, power_w: Some(650.4), ..CASE.row(variant) }
    }

    fn measured() -> Vec<Row> {
        // The times differ more between rounds than between variants.
        let rounds =
            vec![vec![1e-6, 2e-6, 4e-6], vec![3e-6, 6e-6, 12e-6], vec![9e-6, 18e-6, 36e-6]];
        let mut rows = [Variant::Rust, Variant::NcclSym, Variant::Nccl].map(row);
        add_times(&mut rows, CASE.bus, &contest().with(Role::Theirs), Some(&rounds));
        rows.to_vec()
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
        assert_eq!(rows[2].cells()[6], "-");
    }

    #[test]
    fn peers_that_run_again_show_a_drift() {
        let mut rows = measured();
        rows[1].asked = Some("one-shot".to_owned());
        let again = |algorithm: &str| PeerResult {
            algorithm: Some(algorithm.to_owned()),
            times_us: vec![6.6],
            ..PeerResult::new(Variant::NcclSym, "f32", 3000)
        };
        let line = join_again(&mut rows, &[again("one-shot"), again("two-shot")]);
        assert!(line.ends_with("+10.0 % in the median of 1 rows, +10.0 % at most"), "{line}");
        assert!((rows[1].again_us.unwrap() - 6.6).abs() < 1e-9 && rows[2].again_us.is_none());
    }

    #[test]
    fn a_product_has_a_rate() {
        let mut rows = [Case { shape: Some([100, 200, 500]), ..CASE }.row(Variant::Rust)];
        add_times(&mut rows, CASE.bus, &[], Some(&vec![vec![1e-6]]));
        assert!((rows[0].tflops.unwrap() - 20.0).abs() < 1e-9, "{rows:?}");
        let rate = &Row::COLUMNS[19];
        assert!(rate.is_in(&rows) && !rate.is_in(&measured()));
    }

    #[test]
    fn without_times_there_is_a_dash_and_no_ratio() {
        let mut rows = [Variant::Rust, Variant::Nccl].map(row);
        add_times(&mut rows, CASE.bus, &contest().with(Role::Theirs), None);
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
