//! Medians, quartiles, geometric means, and a random order that all ranks know.

use crate::number::splitmix;

/// The median and the spread of some samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The distance between the first and the third quartile.
    pub iqr: f64,
}

impl Spread {
    /// Of these samples; `None` of none.
    pub fn of(samples: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = samples.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let median = quantile(&sorted, 0.5)?;
        Some(Self { median, iqr: quantile(&sorted, 0.75)? - quantile(&sorted, 0.25)? })
    }
}

/// The value below which a `part` of the sorted samples lies, between two of them in proportion.
fn quantile(sorted: &[f64], part: f64) -> Option<f64> {
    let at = part * sorted.len().checked_sub(1)? as f64;
    let (below, above) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    Some(below + (above - below) * at.fract())
}

/// The geometric mean of positive numbers; `None` of none.
pub fn geometric_mean(numbers: impl IntoIterator<Item = f64>) -> Option<f64> {
    let (mut logarithms, mut count) = (0.0, 0);
    for number in numbers {
        logarithms += number.ln();
        count += 1;
    }
    (count > 0).then(|| (logarithms / f64::from(count)).exp())
}

/// A source of random orders: ranks that begin with one seed get the same ones.
#[derive(Clone, Debug)]
pub struct Shuffle(u64);

impl Shuffle {
    /// Begins with a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        let drawn = splitmix(self.0);
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        drawn
    }

    /// The numbers below `n` in a random order.
    pub fn order(&mut self, n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        for last in (1..n).rev() {
            // The bias of a remainder of 64 bits is beyond measure.
            order.swap(last, (self.next() % (last as u64 + 1)) as usize);
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-12
    }

    #[test]
    fn the_spread_of_known_samples() {
        let spread = Spread::of([5.0, 1.0, 4.0, 2.0, 3.0]).unwrap();
        assert_eq!(spread, Spread { median: 3.0, iqr: 2.0 });
        // Between two samples.
        let spread = Spread::of([4.0, 1.0, 2.0, 3.0]).unwrap();
        assert_eq!(spread, Spread { median: 2.5, iqr: 1.5 });
        assert_eq!(Spread::of([7.0]), Some(Spread { median: 7.0, iqr: 0.0 }));
        assert_eq!(Spread::of([]), None);
    }

    #[test]
    fn an_outlier_moves_neither_median_nor_quartiles() {
        let usual = Spread::of((0..101).map(f64::from)).unwrap();
        let outlier = Spread::of((0..100).map(f64::from).chain([1e9])).unwrap();
        assert_eq!(usual, outlier);
    }

    #[test]
    fn the_geometric_mean_of_a_ratio_and_its_inverse_is_one() {
        assert!(near(geometric_mean([2.0, 0.5]).unwrap(), 1.0));
        assert!(near(geometric_mean([1.0, 10.0, 100.0]).unwrap(), 10.0));
        assert_eq!(geometric_mean([]), None);
    }

    #[test]
    fn every_order_comes_up_about_as_often() {
        let mut shuffle = Shuffle::new(1);
        let mut counts = std::collections::BTreeMap::new();
        for _ in 0..6000 {
            *counts.entry(shuffle.order(3)).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), 6);
        assert!(counts.values().all(|count| (900..1100).contains(count)), "{counts:?}");
        let (mut a, mut b) = (Shuffle::new(7), Shuffle::new(7));
        assert!((0..100).all(|_| a.order(3) == b.order(3)));
    }
}
