//! Medians, quartiles and geometric means.

/// Median and spread of samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The distance between the first and the third quartile.
    pub iqr: f64,
    /// The 99th percentile.
    pub p99: f64,
    /// The distance between the least and the greatest sample.
    pub range: f64,
}

impl Spread {
    /// Returns the spread of samples; `None` if there are none.
    pub fn of(samples: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = samples.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        Some(Self {
            median: quantile(&sorted, 0.5)?,
            iqr: quantile(&sorted, 0.75)? - quantile(&sorted, 0.25)?,
            p99: quantile(&sorted, 0.99)?,
            range: sorted.last()? - sorted.first()?,
        })
    }
}

/// Returns the `part` quantile of sorted samples, interpolated linearly.
fn quantile(sorted: &[f64], part: f64) -> Option<f64> {
    let at = part * sorted.len().checked_sub(1)? as f64;
    let (below, above) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    Some(below + (above - below) * at.fract())
}

/// Returns the geometric mean of positive numbers; `None` if empty.
pub fn geometric_mean(numbers: impl IntoIterator<Item = f64>) -> Option<f64> {
    let (mut logarithms, mut count) = (0.0, 0);
    for number in numbers {
        logarithms += number.ln();
        count += 1;
    }
    (count > 0).then(|| (logarithms / f64::from(count)).exp())
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
        assert_eq!(spread, Spread { median: 3.0, iqr: 2.0, p99: 4.96, range: 4.0 });
        // The median lies between two samples.
        let spread = Spread::of([4.0, 1.0, 2.0, 3.0]).unwrap();
        assert_eq!((spread.median, spread.iqr), (2.5, 1.5));
        let alone = Spread { median: 7.0, iqr: 0.0, p99: 7.0, range: 0.0 };
        assert_eq!(Spread::of([7.0]), Some(alone));
        assert_eq!(Spread::of([]), None);
    }

    #[test]
    fn an_outlier_moves_neither_median_nor_quartiles() {
        let usual = Spread::of((0..101).map(f64::from)).unwrap();
        let outlier = Spread::of((0..100).map(f64::from).chain([1e9])).unwrap();
        assert_eq!((usual.median, usual.iqr), (outlier.median, outlier.iqr));
    }

    #[test]
    fn the_geometric_mean_of_a_ratio_and_its_inverse_is_one() {
        assert!(near(geometric_mean([2.0, 0.5]).unwrap(), 1.0));
        assert!(near(geometric_mean([1.0, 10.0, 100.0]).unwrap(), 10.0));
        assert_eq!(geometric_mean([]), None);
    }
}
