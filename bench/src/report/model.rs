//! `model`: the time of a collective from a floor, a ramp and a rate, fitted to measurements.
//!
//! A GPU that sends `wire` bytes takes
//!
//! ```text
//! floor + ramp x (doublings of wire from 1 KiB to 64 KiB) + wire / rate
//! ```
//!
//! The floor is the launch and the hops; the ramp is what more blocks take to start and to meet,
//! until there are enough to fill the wire; the rate is that of the wire, or of the
//! multiprocessors that feed it. Every algorithm has its own three numbers. Where the algorithm is
//! not known (NCCL's) there are two of them, for short and for long messages.
//!
//! They are fitted to two ranks. What more ranks of one host add is in `us_on`.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::Serialize;

use crate::base::output::OutputOptions;
use crate::base::stats::Spread;
use crate::contenders::contender::Variant;
use crate::report::row;
use crate::report::table::{self, Report};

/// The flags of `model`.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Files of rows (--json of the collectives) to compare with the model: of two ranks, or, in
    /// graphs, of more, which are those of one host
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,

    /// Files of rows to fit the model to, of two ranks, comma-separated [default: the same]
    #[arg(long, value_delimiter = ',', value_name = "FILE")]
    fit: Vec<PathBuf>,

    /// Only these variants, comma-separated
    #[arg(long, value_delimiter = ',', value_name = "VARIANT")]
    #[arg(default_value = "rust-ops,nccl,nccl-sym")]
    variants: Vec<Variant>,

    /// Fail if the model is further off than this, in percent, in any row
    #[arg(long, value_name = "PERCENT")]
    within: Option<f64>,

    #[command(flatten)]
    output: OutputOptions,
}

/// What a hop to several ranks takes longer than one to a single peer, in microseconds.
const MORE_PEERS: f64 = 0.3;
/// What a further step of NCCL's ring takes, in microseconds.
const STEP_OF_NCCL: f64 = 0.77;
/// Bytes between which the ramp grows.
const RAMP: [f64; 2] = [1024.0, 65536.0];
/// Ranks, more than two, send messages of up to this divided by their number in one step: devcomm's
/// default.
const ONE_STEP: usize = 4 << 20;
/// Numbers of ranks to which the model is extrapolated.
const MORE_RANKS: [usize; 2] = [4, 8];

/// Fits, compares and prints.
pub fn run(options: &Options) -> Result<()> {
    options.output.validate()?;
    let read = |files: &[PathBuf]| -> Result<Vec<Point>> {
        let points = files.iter().map(|file| read(file)).collect::<Result<Vec<_>>>()?.concat();
        let has = |name: &str| options.variants.iter().any(|variant| variant.name() == name);
        Ok(points.into_iter().filter(|point| has(&point.variant)).collect())
    };
    let points = read(&options.files)?;
    let model = match &*options.fit {
        [] => Model::fit(&points)?,
        files => Model::fit(&read(files)?)?,
    };
    let mut report = Report::new();
    let rows: Vec<Row> = points.iter().filter_map(|point| model.row(point)).collect();
    ensure!(!rows.is_empty(), "the files of --fit have none of these collectives");
    println!("{}", report.add(rows, Some(&options.output))?);
    let summary = Summary { model: &model, errors: Errors::of(&report.rows) };
    println!("\n{summary}");
    let worst = summary.errors.worst;
    if let Some(within) = options.within {
        ensure!(worst <= within, "the model is {worst:.1} % off, which is more than {within} %");
    }
    Ok(())
}

/// What the model knows of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Collective {
    AllReduce,
    ReduceScatter,
    AllGather,
    AllToAll,
    Broadcast,
}

impl Collective {
    fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "all-reduce" => Self::AllReduce,
            "reduce-scatter" => Self::ReduceScatter,
            "all-gather" => Self::AllGather,
            "all-to-all" => Self::AllToAll,
            "broadcast" => Self::Broadcast,
            _ => return None,
        })
    }

    fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllGather => "all-gather",
            Self::AllToAll => "all-to-all",
            Self::Broadcast => "broadcast",
        }
    }

    /// Devcomm's kernels have the same costs for each of these: a reduction in one step or two, and
    /// an exchange. NCCL's algorithms differ.
    fn costs_as(self, algorithm: &str) -> Self {
        match self {
            Self::ReduceScatter if algorithm != UNKNOWN => Self::AllReduce,
            Self::AllToAll if algorithm != UNKNOWN => Self::AllGather,
            _ => self,
        }
    }

    /// On more than two ranks. Between two, NCCL's reduce-scatter is slower than its all-gather.
    fn costs_on_more_as(self, algorithm: &str) -> Self {
        match (self, algorithm) {
            (Self::ReduceScatter, UNKNOWN) => Self::AllGather,
            _ => self.costs_as(algorithm),
        }
    }

    /// Whether more than two ranks use an algorithm, by devcomm's defaults.
    fn uses(self, algorithm: &str, size: usize, ranks: usize) -> bool {
        match (self, algorithm) {
            (Self::AllReduce, "Lamport") => size <= ONE_STEP / ranks,
            // A broadcast's messages are longer than their payload.
            (Self::Broadcast, "Lamport") => size < ONE_STEP / ranks,
            (_, "Lamport") => size <= ONE_STEP,
            // Left to NCCL, whose ranks pass it on.
            (Self::Broadcast, _) => algorithm == UNKNOWN,
            _ => true,
        }
    }

    /// How many hops follow each other: devcomm's are to all ranks at once, and NCCL's to the next
    /// rank.
    fn hops(self, algorithm: &str, ranks: usize) -> f64 {
        let ring = match self {
            Self::AllReduce => 2 * (ranks - 1),
            Self::ReduceScatter | Self::AllGather => ranks - 1,
            // All are sent at once, and what is passed on is not waited for.
            Self::AllToAll | Self::Broadcast => 1,
        };
        match algorithm {
            UNKNOWN => ring as f64,
            "Lamport" => 1.0,
            _ => 2.0,
        }
    }

    /// The bytes that the busiest rank sends.
    fn wire(self, algorithm: &str, size: usize, ranks: usize) -> f64 {
        let (size, ranks) = (size as f64, ranks as f64);
        let others = ranks - 1.0;
        match (self, algorithm) {
            // In one step every rank sends all to every other.
            (Self::AllReduce, "Lamport") => others * size,
            (Self::AllReduce, _) => 2.0 * others / ranks * size,
            // NCCL's ranks pass it on.
            (Self::Broadcast, UNKNOWN) => size,
            (Self::Broadcast, _) => others * size,
            (Self::ReduceScatter | Self::AllGather | Self::AllToAll, _) => others / ranks * size,
        }
    }
}

/// The algorithm of a row that names none: NCCL's.
const UNKNOWN: &str = "-";

/// A measured time.
#[derive(Clone, Debug)]
struct Point {
    collective: Collective,
    ranks: usize,
    in_graph: bool,
    dtype: String,
    size: usize,
    variant: String,
    algorithm: String,
    us: f64,
}

/// The measured times of a file.
fn read(path: &Path) -> Result<Vec<Point>> {
    let name = path.display();
    let Report { header, rows, .. } = Report::<row::Row>::read(path)?;
    let header = header.with_context(|| format!("{name} has no header"))?;
    let Some(collective) = Collective::parse(header.subcommand()) else {
        bail!("{name} is of no collective");
    };
    let (ranks, in_graph) = (header.ranks, header.in_graphs());
    ensure!(ranks > 1, "{name} is of one rank, which sends nothing");
    ensure!(ranks == 2 || in_graph, "{name} is of {ranks} ranks without graphs: there is no model");
    let mut points = Vec::new();
    for row::Row { variant, dtype, size, algorithm, time_us, .. } in rows {
        // What falls back to NCCL has NCCL's costs.
        let algorithm = algorithm.filter(|name| name != "Nccl").unwrap_or(UNKNOWN.to_owned());
        points.extend(time_us.map(|us| Point {
            collective,
            ranks,
            in_graph,
            dtype,
            size,
            variant: variant.name().to_owned(),
            algorithm,
            us,
        }));
    }
    Ok(points)
}

/// What distinguishes costs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    collective: Collective,
    in_graph: bool,
    variant: String,
    algorithm: String,
}

impl Key {
    fn of(point: &Point) -> Self {
        let Point { collective, in_graph, variant, algorithm, .. } = point.clone();
        Self { collective: collective.costs_as(&algorithm), in_graph, variant, algorithm }
    }
}

/// The costs of one algorithm, in microseconds: of a message, of a doubling, of a byte.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Costs {
    floor: f64,
    ramp: f64,
    byte: f64,
}

impl Costs {
    fn terms(wire: f64) -> [f64; 3] {
        // In the order in which they matter, should there be few points.
        [wire, 1.0, (wire / RAMP[0]).log2().clamp(0.0, (RAMP[1] / RAMP[0]).log2())]
    }

    fn us(&self, wire: f64) -> f64 {
        let [wire, one, doublings] = Self::terms(wire);
        self.byte * wire + self.floor * one + self.ramp * doublings
    }

    /// The costs with the least sum of squares of relative errors, none negative.
    fn fit(points: &[(f64, f64)]) -> Self {
        let all: [usize; 3] = [0, 1, 2];
        let mut used = &all[..points.len().min(3)];
        let mut dropped: Vec<usize> = Vec::new();
        loop {
            let terms: Vec<usize> = used.iter().copied().filter(|t| !dropped.contains(t)).collect();
            let Some(solved) = least_squares(points, &terms) else {
                used = &used[..used.len() - 1];
                continue;
            };
            if let Some(at) = (0..terms.len()).find(|&i| solved[i] < 0.0) {
                dropped.push(terms[at]);
                continue;
            }
            let mut costs = [0.0; 3];
            terms.iter().zip(solved).for_each(|(term, cost)| costs[*term] = cost);
            let [byte, floor, ramp] = costs;
            return Self { floor, ramp, byte };
        }
    }
}

/// Solves for the costs of these terms by Gaussian elimination of the normal equations; `None` if
/// the points do not tell the terms apart.
fn least_squares(points: &[(f64, f64)], terms: &[usize]) -> Option<Vec<f64>> {
    let n = terms.len();
    let mut matrix = vec![vec![0.0; n + 1]; n];
    for (wire, us) in points {
        let relative: Vec<f64> = terms.iter().map(|&term| Costs::terms(*wire)[term] / us).collect();
        for (row, a) in matrix.iter_mut().zip(&relative) {
            for (cell, b) in row.iter_mut().zip(relative.iter().chain([&1.0])) {
                *cell += a * b;
            }
        }
    }
    // Bytes are many: terms of one scale.
    let scales: Vec<f64> = (0..n).map(|i| matrix[i][i].sqrt()).collect();
    for (row, a) in matrix.iter_mut().zip(&scales) {
        row.iter_mut().zip(scales.iter().chain([&1.0])).for_each(|(cell, b)| *cell /= a * b);
    }
    for i in 0..n {
        let pivot = (i..n).max_by(|&a, &b| matrix[a][i].abs().total_cmp(&matrix[b][i].abs()))?;
        matrix.swap(i, pivot);
        if matrix[i][i].abs() < 1e-9 {
            return None;
        }
        let pivot = matrix[i].clone();
        for (_, row) in matrix.iter_mut().enumerate().filter(|(other, _)| *other != i) {
            let factor = row[i] / pivot[i];
            row.iter_mut().zip(&pivot).for_each(|(cell, above)| *cell -= factor * above);
        }
    }
    Some((0..n).map(|i| matrix[i][n] / matrix[i][i] / scales[i]).collect())
}

/// The costs of a key: one set, or two of which the faster one holds.
#[derive(Clone, Debug)]
struct Fitted {
    costs: Vec<Costs>,
    /// The fewest bytes that it was fitted to.
    least: f64,
    points: usize,
}

impl Fitted {
    /// `may_change`: whether there may be another algorithm for long messages.
    fn new(mut points: Vec<(f64, f64)>, may_change: bool) -> Self {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let least = points.first().map_or(0.0, |point| point.0);
        let of = |costs| Self { costs, least, points: points.len() };
        let mut best = of(vec![Costs::fit(&points)]);
        // Short messages have three costs, and long ones two.
        for at in if may_change { 3..points.len().max(4) - 1 } else { 0..0 } {
            let (short, long) = points.split_at(at);
            let two = of(vec![Costs::fit(short), Costs::fit(long)]);
            if two.errors(&points) < best.errors(&points) {
                best = two;
            }
        }
        best
    }

    /// The sum of the squares of the relative errors.
    fn errors(&self, points: &[(f64, f64)]) -> f64 {
        points.iter().map(|(wire, us)| (self.us(*wire) / us - 1.0).powi(2)).sum()
    }

    fn us(&self, wire: f64) -> f64 {
        self.costs.iter().map(|costs| costs.us(wire)).fold(f64::INFINITY, f64::min)
    }
}

/// The costs of all algorithms.
struct Model(BTreeMap<Key, Fitted>);

impl Model {
    fn fit(points: &[Point]) -> Result<Self> {
        let mut by_key: BTreeMap<Key, Vec<(f64, f64)>> = BTreeMap::new();
        for point in points {
            ensure!(
                point.ranks == 2,
                "--fit: the model is fitted to two ranks, not {}",
                point.ranks
            );
            let wire = point.collective.wire(&point.algorithm, point.size, 2);
            by_key.entry(Key::of(point)).or_default().push((wire, point.us));
        }
        let fit = |(key, points): (Key, _)| {
            let may_change = key.algorithm == UNKNOWN;
            (key, Fitted::new(points, may_change))
        };
        Ok(Self(by_key.into_iter().map(fit).collect()))
    }

    /// The model's time: on two ranks of the algorithm that was measured.
    fn us(&self, point: &Point) -> Option<f64> {
        if point.ranks > 2 {
            return self.us_on(point, point.ranks);
        }
        let wire = point.collective.wire(&point.algorithm, point.size, 2);
        Some(self.0.get(&Key::of(point))?.us(wire))
    }

    /// The model's time on more ranks, in graphs: of the fastest algorithm that it has for them.
    fn us_on(&self, point: &Point, ranks: usize) -> Option<f64> {
        let collective = point.collective;
        let same = |other: &Key| {
            // What devcomm leaves to NCCL has NCCL's costs.
            let left = collective == Collective::Broadcast && other.algorithm == UNKNOWN;
            let by_nccl = left && point.variant == "rust-ops" && other.variant == "nccl";
            let graphs = point.in_graph && other.in_graph;
            graphs
                && other.collective == collective.costs_on_more_as(&other.algorithm)
                && (other.variant == point.variant || by_nccl)
        };
        let time = |(other, fitted): (&Key, &Fitted)| {
            let algorithm = &*other.algorithm;
            let wire = collective.wire(algorithm, point.size, ranks);
            // A rate alone does not say what short messages take.
            let known = wire >= fitted.least || fitted.costs.iter().all(|costs| costs.floor > 0.0);
            let used = collective.uses(algorithm, point.size, ranks);
            let hops = |ranks| collective.hops(algorithm, ranks);
            let more = match algorithm {
                UNKNOWN => STEP_OF_NCCL * (hops(ranks) - hops(2)),
                _ => MORE_PEERS * hops(ranks),
            };
            // But for its steps NCCL takes as long for a short message of any number of ranks.
            let of_two = collective.wire(algorithm, point.size, 2);
            let us = match &*fitted.costs {
                [short, long] => short.us(of_two).min(long.us(wire)),
                _ => fitted.us(wire),
            };
            (known && used).then_some(us + more)
        };
        let times = self.0.iter().filter(|(other, _)| same(other)).filter_map(time);
        times.reduce(f64::min)
    }

    fn row(&self, point: &Point) -> Option<Row> {
        let model_us = self.us(point)?;
        let [us_on_4, us_on_8] = MORE_RANKS.map(|ranks| self.us_on(point, ranks));
        Some(Row {
            collective: point.collective,
            dtype: point.dtype.clone(),
            size: point.size,
            variant: point.variant.clone(),
            algorithm: point.algorithm.clone(),
            us: point.us,
            model_us,
            error_percent: (model_us / point.us - 1.0) * 100.0,
            us_on_4,
            us_on_8,
        })
    }
}

/// A measured time beside the model's.
#[derive(Debug, Serialize)]
struct Row {
    collective: Collective,
    #[serde(rename = "type")]
    dtype: String,
    size: usize,
    variant: String,
    algorithm: String,
    us: f64,
    model_us: f64,
    error_percent: f64,
    us_on_4: Option<f64>,
    us_on_8: Option<f64>,
}

impl table::Row for Row {
    const COLUMNS: &'static [(&'static str, &'static str, usize)] = &[
        ("collective", "", 0),
        ("type", "", 0),
        ("variant", "", 0),
        ("algorithm", "", 0),
        ("size", "B", 0),
        ("time", "us", 0),
        ("model", "us", 0),
        ("error", "%", 0),
        ("on 4 GPUs", "us, model", 0),
        ("on 8 GPUs", "us, model", 0),
    ];
    const TEXT_COLUMNS: usize = 4;

    fn cells(&self) -> Vec<String> {
        let number = |value: Option<f64>| value.map_or("-".to_owned(), |us| format!("{us:.2}"));
        vec![
            self.collective.name().to_owned(),
            self.dtype.clone(),
            self.variant.clone(),
            self.algorithm.clone(),
            self.size.to_string(),
            number(Some(self.us)),
            number(Some(self.model_us)),
            format!("{:+.1}", self.error_percent),
            number(self.us_on_4),
            number(self.us_on_8),
        ]
    }
}

/// How far the model is off, in percent.
#[derive(Clone, Copy, Debug)]
struct Errors {
    median: f64,
    worst: f64,
}

impl Errors {
    fn of(rows: &[Row]) -> Self {
        let errors = || rows.iter().map(|row| row.error_percent.abs());
        let median = Spread::of(errors()).map_or(0.0, |spread| spread.median);
        Self { median, worst: errors().fold(0.0, f64::max) }
    }
}

struct Summary<'a> {
    model: &'a Model,
    errors: Errors,
}

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (key, Fitted { costs, points, .. }) in &self.model.0 {
            let (name, form) =
                (key.collective.name(), if key.in_graph { "graph" } else { "plain" });
            write!(f, "# {name} {} {}, {form}, {points} points:", key.variant, key.algorithm)?;
            for (i, Costs { floor, ramp, byte }) in costs.iter().enumerate() {
                let or = if i > 0 { "; or" } else { "" };
                let rate = 1e-3 / byte;
                write!(f, "{or} {floor:.2} us + {ramp:.2} us a doubling + bytes / {rate:.0} GB/s")?;
            }
            writeln!(f)?;
        }
        let Errors { median, worst } = self.errors;
        write!(f, "# error of the model: median {median:.1} %, at most {worst:.1} %")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64) {
        assert!((a / b - 1.0).abs() < 1e-6, "{a} {b}");
    }

    #[test]
    fn known_costs_are_found_again() {
        let costs = Costs { floor: 1.8, ramp: 0.1, byte: 2.9e-6 };
        let sizes = [1024.0, 4096.0, 65536.0, 1e6, 1e7];
        let points = sizes.map(|wire| (wire, costs.us(wire)));
        let found = Costs::fit(&points);
        near(found.floor, 1.8);
        near(found.ramp, 0.1);
        near(found.byte, 2.9e-6);
        // Long messages do not tell a ramp from a floor, one does not tell anything but a rate, and
        // no cost is negative.
        let found = Costs::fit(&points[3..]);
        assert_eq!(found.ramp, 0.0);
        near(found.us(3e6), costs.us(3e6));
        assert_eq!(Costs::fit(&[(1e6, 4.0)]), Costs { byte: 4e-6, ..Costs::default() });
        assert_eq!(Costs::fit(&[(1e6, 2.0), (2e6, 5.0)]).floor, 0.0);
    }

    #[test]
    fn an_unknown_algorithm_may_change_with_the_size() {
        let short = Costs { floor: 5.0, ramp: 0.2, byte: 6e-6 };
        let long = Costs { floor: 25.0, ramp: 0.0, byte: 3e-6 };
        let sizes = [1e3, 4e3, 1.6e4, 6.4e4, 2.5e5, 1e6, 2e7, 5e7, 1e8, 2e8];
        let points = sizes.map(|wire| (wire, short.us(wire).min(long.us(wire))));
        let fitted = Fitted::new(points.to_vec(), true);
        for (wire, us) in points {
            near(fitted.us(wire), us);
        }
        assert_eq!((fitted.costs.len(), fitted.points), (2, 10));
        assert_eq!(Fitted::new(points.to_vec(), false).costs.len(), 1);
    }

    #[test]
    fn more_ranks_take_more_hops_and_send_more() {
        let costs = |floor, byte| Costs { floor, ramp: 0.0, byte };
        let fitted = |costs| Fitted { costs, least: 1024.0, points: 9 };
        let key = |collective, variant: &str, algorithm: &str| {
            let (variant, algorithm) = (variant.to_owned(), algorithm.to_owned());
            Key { collective, in_graph: true, variant, algorithm }
        };
        let nccl = vec![costs(6.0, 1e-5), costs(20.0, 2e-6)];
        let model = Model(BTreeMap::from([
            (key(Collective::AllReduce, "rust-ops", "Lamport"), fitted(vec![costs(2.0, 3e-6)])),
            (key(Collective::AllReduce, "nccl", UNKNOWN), fitted(nccl.clone())),
            (key(Collective::AllGather, "nccl", UNKNOWN), fitted(nccl.clone())),
            (key(Collective::Broadcast, "nccl", UNKNOWN), fitted(nccl)),
        ]));
        let us = |collective, variant: &str, size, ranks| {
            let (dtype, variant, algorithm) = ("f32".to_owned(), variant.to_owned(), String::new());
            let in_graph = true;
            let point =
                Point { collective, ranks, in_graph, dtype, size, variant, algorithm, us: 0.0 };
            model.us(&point)
        };
        use Collective::{AllReduce, Broadcast, ReduceScatter};
        // A hop to three peers, and three messages.
        near(us(AllReduce, "rust-ops", 100_000, 4).unwrap(), 2.0 + MORE_PEERS + 3.0 * 0.3);
        assert_eq!(us(AllReduce, "rust-ops", 2 << 20, 4), None);
        // Six steps instead of two: of a short message, and of a long one.
        near(us(AllReduce, "nccl", 100_000, 4).unwrap(), 6.0 + 1.0 + 4.0 * STEP_OF_NCCL);
        let long = 20.0 + 1.5 * 2e-6 * 1e8 + 4.0 * STEP_OF_NCCL;
        near(us(AllReduce, "nccl", 100_000_000, 4).unwrap(), long);
        // As an all-gather.
        near(us(ReduceScatter, "nccl", 2000, 8).unwrap(), 6.0 + 0.01 + 6.0 * STEP_OF_NCCL);
        // Left to NCCL.
        assert_eq!(us(Broadcast, "rust-ops", 8 << 20, 4), us(Broadcast, "nccl", 8 << 20, 4));
    }

    #[test]
    fn a_rank_sends_what_the_algorithm_says() {
        use Collective::{AllGather, AllReduce, Broadcast};
        assert_eq!(AllReduce.wire("Lamport", 1000, 2), AllReduce.wire("Pull", 1000, 2));
        assert_eq!(AllReduce.wire("Lamport", 1000, 4), 3000.0);
        assert_eq!(AllReduce.wire(UNKNOWN, 1000, 4), 1500.0);
        assert_eq!(AllGather.wire("Push", 1000, 4), 750.0);
        assert_eq!([Broadcast.wire(UNKNOWN, 10, 8), Broadcast.wire("Push", 10, 8)], [10.0, 70.0]);
    }
}
