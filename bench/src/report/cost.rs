//! The time of a collective from a floor, a ramp and a rate, fitted to measurements.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Result, ensure};
use devcomm::Algorithm::{self, Lamport, Nccl};
use devcomm::CollectiveKind::{self, AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter};

/// The library that does a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CollectiveBy {
    /// [`Collectives`](devcomm::Collectives).
    Devcomm,
    /// NCCL, on memory that is not registered.
    Nccl,
    /// NCCL, on symmetric windows.
    NcclSymmetric,
}

/// A collective whose time is measured, or asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CollectiveCase {
    /// Which one.
    pub kind: CollectiveKind,
    /// The library that does it.
    pub by: CollectiveBy,
    /// How it is done; [`Algorithm::Nccl`] for NCCL's.
    pub algorithm: Algorithm,
    /// The ranks, all of one host.
    pub ranks: usize,
    /// Whether it is launched in a CUDA graph.
    pub in_graph: bool,
    /// The size of the larger buffer, in bytes.
    pub bytes: usize,
}

/// What collectives cost: a GPU that sends `wire` bytes takes
///
/// ```text
/// floor + ramp x (doublings of wire from 1 KiB to 64 KiB) + wire / rate
/// ```
///
/// The floor is the launch and the hops; the ramp is what more blocks take to start and to meet,
/// until there are enough to fill the wire; the rate is that of the wire, or of the
/// multiprocessors that feed it. Every algorithm has its own three numbers. Where the algorithm is
/// not known (NCCL's) there are two of them, for short and for long messages.
///
/// They are fitted to measured times of two ranks; docs/model.md says how near the predictions are,
/// and what more ranks of one host add. As text, a line for each algorithm.
#[derive(Clone, Debug)]
pub struct CostModel(BTreeMap<Key, Fitted>);

/// What a hop to several ranks takes longer than one to a single peer, in microseconds: measured,
/// as the next one, with four H200.
const MORE_PEERS: f64 = 0.3;
/// What a further step of NCCL's ring takes, in microseconds.
const STEP_OF_NCCL: f64 = 0.77;
/// Bytes between which the ramp grows.
const RAMP: [f64; 2] = [1024.0, 65536.0];
/// Ranks, more than two, send messages of up to this divided by their number in one step: the
/// default of `Collectives`.
const ONE_STEP: usize = 4 << 20;

/// What the algorithms of a collective cost.
trait Costing: Sized {
    /// Returns the collective whose costs this one has too: for the same bytes on the wire
    /// devcomm's reduce-scatter takes as long as its all-reduce, and its all-to-all as its
    /// all-gather. NCCL's collectives have costs of their own.
    fn costs_as(self, algorithm: Algorithm) -> Self;

    /// Returns the collective whose costs this one has on more than two ranks. There NCCL's
    /// reduce-scatter has those of its all-gather; between two ranks it is slower.
    fn costs_on_more_as(self, algorithm: Algorithm) -> Self;

    /// Returns whether more than two ranks use an algorithm, by the defaults of `Collectives`.
    fn uses(self, algorithm: Algorithm, size: usize, ranks: usize) -> bool;

    /// Returns how many hops follow each other: devcomm's are to all ranks at once, and NCCL's to
    /// the next rank.
    fn hops(self, algorithm: Algorithm, ranks: usize) -> f64;

    /// Returns the bytes that the busiest rank sends.
    fn wire(self, algorithm: Algorithm, size: usize, ranks: usize) -> f64;
}

impl Costing for CollectiveKind {
    fn costs_as(self, algorithm: Algorithm) -> Self {
        match self {
            ReduceScatter if algorithm != Nccl => AllReduce,
            AllToAll if algorithm != Nccl => AllGather,
            _ => self,
        }
    }

    fn costs_on_more_as(self, algorithm: Algorithm) -> Self {
        match (self, algorithm) {
            (ReduceScatter, Nccl) => AllGather,
            _ => self.costs_as(algorithm),
        }
    }

    fn uses(self, algorithm: Algorithm, size: usize, ranks: usize) -> bool {
        match (self, algorithm) {
            (AllReduce, Lamport) => size <= ONE_STEP / ranks,
            // A broadcast's messages are longer than their payload.
            (Broadcast, Lamport) => size < ONE_STEP / ranks,
            // The messages are the buffer divided by the ranks.
            (_, Lamport) => size <= ONE_STEP,
            // `Collectives` leaves others to NCCL, whose ranks pass the message on.
            (Broadcast, _) => algorithm == Nccl,
            _ => true,
        }
    }

    fn hops(self, algorithm: Algorithm, ranks: usize) -> f64 {
        let ring = match self {
            AllReduce => 2 * (ranks - 1),
            ReduceScatter | AllGather => ranks - 1,
            // All are sent at once, and what is passed on is not waited for.
            _ => 1,
        };
        match algorithm {
            Nccl => ring as f64,
            Lamport => 1.0,
            _ => 2.0,
        }
    }

    fn wire(self, algorithm: Algorithm, size: usize, ranks: usize) -> f64 {
        let (size, ranks) = (size as f64, ranks as f64);
        let others = ranks - 1.0;
        match (self, algorithm) {
            // In one step every rank sends all to every other.
            (AllReduce, Lamport) => others * size,
            (AllReduce, _) => 2.0 * others / ranks * size,
            // NCCL's ranks pass it on.
            (Broadcast, Nccl) => size,
            (Broadcast, _) => others * size,
            _ => others / ranks * size,
        }
    }
}

/// What distinguishes costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    kind: CollectiveKind,
    in_graph: bool,
    by: CollectiveBy,
    algorithm: Algorithm,
}

impl Key {
    fn of(case: &CollectiveCase) -> Self {
        let CollectiveCase { kind, by, algorithm, in_graph, .. } = *case;
        Self { kind: kind.costs_as(algorithm), in_graph, by, algorithm }
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
        // The order counts: with fewer than three points `fit` uses the first of them.
        [wire, 1.0, (wire / RAMP[0]).log2().clamp(0.0, (RAMP[1] / RAMP[0]).log2())]
    }

    fn us(&self, wire: f64) -> f64 {
        let [wire, one, doublings] = Self::terms(wire);
        self.byte * wire + self.floor * one + self.ramp * doublings
    }

    /// Returns the costs with the least sum of squares of relative errors, none negative, of the
    /// terms that the points tell apart.
    fn fit(points: &[(f64, f64)]) -> Self {
        let mut used = std::array::from_fn(|term| term < points.len());
        // Each turn drops a term: one with a negative cost or, where the points do not tell the
        // terms apart, the last one. Without terms there is a solution, of zeros.
        loop {
            let solved = least_squares(points, used);
            let negative = |costs: &[f64; 3]| costs.iter().position(|cost| *cost < 0.0);
            let dropped = match solved.as_ref().map(negative) {
                None => used.iter().rposition(|used| *used),
                Some(negative) => negative,
            };
            match (dropped, solved) {
                (Some(term), _) => used[term] = false,
                (None, solved) => {
                    let [byte, floor, ramp] = solved.unwrap_or_default();
                    return Self { floor, ramp, byte };
                }
            }
        }
    }
}

/// Returns the costs of the terms that are used, and 0 for others, with the least sum of squares of
/// relative errors, by Gaussian elimination of the normal equations; `None` if the points do not
/// tell the terms apart.
fn least_squares(points: &[(f64, f64)], used: [bool; 3]) -> Option<[f64; 3]> {
    let mut matrix = [[0.0; 4]; 3];
    for (wire, us) in points {
        let terms = Costs::terms(*wire);
        let relative = [0, 1, 2].map(|i| if used[i] { terms[i] / us } else { 0.0 });
        for (row, a) in matrix.iter_mut().zip(relative) {
            row.iter_mut().zip(relative.into_iter().chain([1.0])).for_each(|(x, b)| *x += a * b);
        }
    }
    (0..3).filter(|i| !used[*i]).for_each(|i| matrix[i][i] = 1.0);
    // Bytes are large numbers: all terms are scaled to 1 on the diagonal, so that pivots compare.
    let scales = [0, 1, 2].map(|i: usize| matrix[i][i].sqrt());
    if scales.contains(&0.0) {
        // All messages are below the ramp, so that its term is 0 in all points.
        return None;
    }
    for (row, a) in matrix.iter_mut().zip(scales) {
        row.iter_mut().zip(scales.into_iter().chain([1.0])).for_each(|(x, b)| *x /= a * b);
    }
    for i in 0..3 {
        let pivot = (i..3).max_by(|&a, &b| matrix[a][i].abs().total_cmp(&matrix[b][i].abs()))?;
        matrix.swap(i, pivot);
        let pivot = matrix[i];
        if pivot[i].abs() < 1e-9 {
            return None;
        }
        for (_, row) in matrix.iter_mut().enumerate().filter(|(other, _)| *other != i) {
            let factor = row[i] / pivot[i];
            row.iter_mut().zip(pivot).for_each(|(cell, above)| *cell -= factor * above);
        }
    }
    Some([0, 1, 2].map(|i| matrix[i][3] / matrix[i][i] / scales[i]))
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
    /// Fits one set of costs, or two if `may_change`: there may be another algorithm for long
    /// messages.
    fn new(mut points: Vec<(f64, f64)>, may_change: bool) -> Self {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let least = points.first().map_or(0.0, |point| point.0);
        let of = |costs| Self { costs, least, points: points.len() };
        let mut best = of(vec![Costs::fit(&points)]);
        // At least three points for the three costs of short messages, and two for long ones, which
        // have no ramp.
        for at in if may_change { 3..points.len().max(4) - 1 } else { 0..0 } {
            let (short, long) = points.split_at(at);
            let two = of(vec![Costs::fit(short), Costs::fit(long)]);
            if two.errors(&points) < best.errors(&points) {
                best = two;
            }
        }
        best
    }

    /// Returns the sum of the squares of the relative errors.
    fn errors(&self, points: &[(f64, f64)]) -> f64 {
        points.iter().map(|(wire, us)| (self.us(*wire) / us - 1.0).powi(2)).sum()
    }

    fn us(&self, wire: f64) -> f64 {
        self.costs.iter().map(|costs| costs.us(wire)).fold(f64::INFINITY, f64::min)
    }
}

impl CostModel {
    /// Fits the costs to times in microseconds, by least squares of relative errors.
    ///
    /// Fails for a case of another number of ranks than two, or a time that is not above 0.
    pub fn fit(measured: &[(CollectiveCase, f64)]) -> Result<Self> {
        let mut by_key: BTreeMap<Key, Vec<(f64, f64)>> = BTreeMap::new();
        for (case, us) in measured {
            ensure!(case.ranks == 2, "the model is fitted to two ranks, not {}", case.ranks);
            ensure!(
                us.is_finite() && *us > 0.0,
                "the model is fitted to times above 0, not {us} us"
            );
            let wire = case.kind.wire(case.algorithm, case.bytes, 2);
            by_key.entry(Key::of(case)).or_default().push((wire, *us));
        }
        let fit = |(key, points): (Key, _)| (key, Fitted::new(points, key.algorithm == Nccl));
        Ok(Self(by_key.into_iter().map(fit).collect()))
    }

    /// Returns the time in microseconds: on two ranks by the algorithm of the case, and on more, in
    /// graphs, by the fastest that the model knows for them. `None` for what it was not fitted to.
    pub fn us(&self, case: &CollectiveCase) -> Option<f64> {
        let CollectiveCase { kind, by, algorithm, ranks, in_graph, bytes } = *case;
        if ranks == 2 {
            return Some(self.0.get(&Key::of(case))?.us(kind.wire(algorithm, bytes, 2)));
        }
        let same = |other: &Key| {
            // Broadcasts that devcomm leaves to NCCL have NCCL's costs.
            let is_left = kind == Broadcast && other.algorithm == Nccl;
            let by_nccl = is_left && (by, other.by) == (CollectiveBy::Devcomm, CollectiveBy::Nccl);
            let costs_so = other.kind == kind.costs_on_more_as(other.algorithm);
            ranks > 2 && in_graph && other.in_graph && costs_so && (other.by == by || by_nccl)
        };
        let time = |(other, fitted): (&Key, &Fitted)| {
            let algorithm = other.algorithm;
            let wire = kind.wire(algorithm, bytes, ranks);
            // A rate alone does not say what short messages take.
            let known = wire >= fitted.least || fitted.costs.iter().all(|costs| costs.floor > 0.0);
            let hops = |ranks| kind.hops(algorithm, ranks);
            let more = match algorithm {
                Nccl => STEP_OF_NCCL * (hops(ranks) - hops(2)),
                _ => MORE_PEERS * hops(ranks),
            };
            // But for its steps NCCL takes as long for a short message of any number of ranks.
            let of_two = kind.wire(algorithm, bytes, 2);
            let us = match &*fitted.costs {
                [short, long] => short.us(of_two).min(long.us(wire)),
                _ => fitted.us(wire),
            };
            (known && kind.uses(algorithm, bytes, ranks)).then_some(us + more)
        };
        let times = self.0.iter().filter(|(other, _)| same(other)).filter_map(time);
        times.reduce(f64::min)
    }
}

impl fmt::Display for CostModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (key, Fitted { costs, points, .. }) in &self.0 {
            let form = if key.in_graph { "graph" } else { "plain" };
            let Key { kind, by, algorithm, .. } = key;
            write!(f, "{kind} {by:?} {algorithm}, {form}, {points} points:")?;
            for (i, Costs { floor, ramp, byte }) in costs.iter().enumerate() {
                let or = if i > 0 { "; or" } else { "" };
                let rate = 1e-3 / byte;
                write!(f, "{or} {floor:.2} us + {ramp:.2} us a doubling + bytes / {rate:.0} GB/s")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use CollectiveBy::{Devcomm, Nccl as ByNccl};

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
        // Up to 1 KiB there is no ramp.
        let found = Costs::fit(&[(8.0, 2.0), (64.0, 2.0), (1024.0, 2.0)]);
        near(found.floor, 2.0);
        assert_eq!(found.ramp, 0.0);
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
        let key = |kind, by, algorithm| Key { kind, in_graph: true, by, algorithm };
        let nccl = vec![costs(6.0, 1e-5), costs(20.0, 2e-6)];
        let model = CostModel(BTreeMap::from([
            (key(AllReduce, Devcomm, Lamport), fitted(vec![costs(2.0, 3e-6)])),
            (key(AllReduce, ByNccl, Nccl), fitted(nccl.clone())),
            (key(AllGather, ByNccl, Nccl), fitted(nccl.clone())),
            (key(Broadcast, ByNccl, Nccl), fitted(nccl)),
        ]));
        let us = |kind, by, bytes, ranks| {
            let (algorithm, in_graph) = (Lamport, true);
            model.us(&CollectiveCase { kind, by, algorithm, ranks, in_graph, bytes })
        };
        // A hop to three peers, and three messages.
        near(us(AllReduce, Devcomm, 100_000, 4).unwrap(), 2.0 + MORE_PEERS + 3.0 * 0.3);
        assert_eq!(us(AllReduce, Devcomm, 2 << 20, 4), None);
        assert_eq!(us(AllReduce, Devcomm, 100_000, 1), None);
        // Six steps instead of two: of a short message, and of a long one.
        near(us(AllReduce, ByNccl, 100_000, 4).unwrap(), 6.0 + 1.0 + 4.0 * STEP_OF_NCCL);
        let long = 20.0 + 1.5 * 2e-6 * 1e8 + 4.0 * STEP_OF_NCCL;
        near(us(AllReduce, ByNccl, 100_000_000, 4).unwrap(), long);
        // As an all-gather.
        near(us(ReduceScatter, ByNccl, 2000, 8).unwrap(), 6.0 + 0.01 + 6.0 * STEP_OF_NCCL);
        // Left to NCCL.
        assert_eq!(us(Broadcast, Devcomm, 8 << 20, 4), us(Broadcast, ByNccl, 8 << 20, 4));
    }

    #[test]
    fn a_model_of_no_two_ranks_or_no_time_is_refused() {
        let case = CollectiveCase {
            kind: AllReduce,
            by: Devcomm,
            algorithm: Lamport,
            ranks: 4,
            in_graph: true,
            bytes: 8,
        };
        let refused = |case, us| CostModel::fit(&[(case, us)]).unwrap_err().to_string();
        assert!(refused(case, 1.0).contains("two ranks, not 4"));
        for us in [0.0, -1.0, f64::NAN] {
            assert!(refused(CollectiveCase { ranks: 2, ..case }, us).contains("above 0"));
        }
    }

    #[test]
    fn a_rank_sends_what_the_algorithm_says() {
        assert_eq!(AllReduce.wire(Lamport, 1000, 2), AllReduce.wire(Algorithm::Pull, 1000, 2));
        assert_eq!(AllReduce.wire(Lamport, 1000, 4), 3000.0);
        assert_eq!(AllReduce.wire(Nccl, 1000, 4), 1500.0);
        assert_eq!(AllGather.wire(Algorithm::Push, 1000, 4), 750.0);
        assert_eq!(
            [Broadcast.wire(Nccl, 10, 8), Broadcast.wire(Algorithm::Push, 10, 8)],
            [10.0, 70.0]
        );
    }
}
