//! Matrices for GEMM tests, and the reference result.
//!
//! Elements are random multiples of 1/8 from -1 to 1 or, if a rank adds more than [`FINE_TERMS`]
//! terms, of 1/2. So products are multiples of 1/64, and f32 holds the sum of up to 2^18 of them
//! exactly, in any order and with any rounding of tensor cores. The only error is the final
//! rounding: an element is right if it equals the number nearest to the reference.
//!
//! The coarse elements are for 8-bit floats, in which all elements are exact too. Hopper adds
//! products of 8-bit floats with 13 bits after the largest addend's leading bit: multiples of 1/64
//! exactly while sums are below 2^8, and the multiples of 1/4 that coarse elements give while they
//! are below 2^12. Random sums of `k` products hardly reach that: their standard deviation is
//! `3/8 sqrt(k)`, 17 for [`FINE_TERMS`], or `sqrt(k) / 2` for coarse elements, 256 for
//! [`MOST_TERMS`].

use std::collections::HashMap;

use crate::numbers::Number;
use anyhow::{Result, ensure};

/// Maximum number of terms of an exact sum, over all ranks.
pub const MOST_TERMS: usize = 1 << 18;

/// Maximum number of a rank's terms for which elements are multiples of 1/8, not of 1/2.
pub const FINE_TERMS: usize = 1 << 11;

/// A problem: C of `m x n`, with `k` terms per rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Rows of C.
    pub m: usize,
    /// Columns of C.
    pub n: usize,
    /// Terms per rank.
    pub k: usize,
    /// Seed of the random inputs, of which [`factor`](Self::factor) uses the low 8 bits.
    pub seed: u64,
}

/// A factor of the product.
#[derive(Clone, Copy)]
pub enum Factor {
    /// The left one, `m x k`.
    A,
    /// The right one, `n x k`.
    B,
}

/// Returns a bijection under which keys that differ in one bit differ in about half of them (the
/// finaliser of MurmurHash3).
fn mixed(mut key: u64) -> u64 {
    for factor in [0xff51_afd7_ed55_8ccd, 0xc4ce_b9fe_1a85_ec53] {
        key = (key ^ key >> 33).wrapping_mul(factor);
    }
    key ^ key >> 33
}

impl Problem {
    /// Returns every combination of the lists, for a sum over `ranks` ranks.
    ///
    /// # Errors
    ///
    /// For a combination whose sums would not be exact, or that the kernels do not support.
    pub fn combinations(lists: [&[usize]; 3], ranks: usize, seed: u64) -> Result<Vec<Self>> {
        let [rows, columns, terms] = lists;
        let mut problems = Vec::new();
        for &k in terms {
            ensure!(k.is_multiple_of(8), "--k {k}: rows of A and B need a multiple of 8 elements");
            ensure!(
                k.checked_mul(ranks).is_some_and(|terms| terms <= MOST_TERMS),
                "--k {k}: sums of more than {MOST_TERMS} terms over all ranks would not be exact"
            );
            for &n in columns {
                for &m in rows {
                    ensure!(m > 0 && n > 0 && k > 0, "{m} x {n} with {k} terms is empty");
                    problems.push(Self { m, n, k, seed });
                }
            }
        }
        Ok(problems)
    }

    /// Returns `[m, n, k]`.
    pub fn shape(&self) -> [usize; 3] {
        [self.m, self.n, self.k]
    }

    /// Returns an element of a rank's factor, in eighths: from -8 to 8.
    fn eighths(&self, factor: Factor, rank: usize, row: usize, column: usize) -> i64 {
        // From bit 40 on: 8 bits each for rank, factor and seed, of which higher bits are lost. The
        // index has the 40 bits below.
        let base = self.seed << 56 ^ (factor as u64) << 48 ^ (rank as u64) << 40;
        let key = mixed(base ^ (row * self.k + column) as u64);
        let (numbers, step) = if self.k > FINE_TERMS { (5, 4) } else { (17, 1) };
        step * (((key >> 32) * numbers) >> 32) as i64 - 8
    }

    /// Returns a rank's factor: `m x k` or `n x k`, row-major.
    pub fn factor<T: Number>(&self, factor: Factor, rank: usize) -> Vec<T> {
        let table: [T; 17] = std::array::from_fn(|i| T::nearest((i as f32 - 8.0) / 8.0));
        let rows = match factor {
            Factor::A => self.m,
            Factor::B => self.n,
        };
        let element = |row, column| table[(self.eighths(factor, rank, row, column) + 8) as usize];
        (0..rows).flat_map(|row| (0..self.k).map(move |column| element(row, column))).collect()
    }

    /// Returns a factor for measurements: numbers from -1 to 1 with random mantissas. With few
    /// distinct values a GPU draws less power and is faster.
    pub fn noise<T: Number>(&self, factor: Factor, rank: usize) -> Vec<T> {
        /// The period of the numbers, a prime: repeating them is faster than drawing all.
        const PERIOD: usize = 1_000_003;
        let rows = match factor {
            Factor::A => self.m,
            Factor::B => self.n,
        };
        let key = self.seed ^ (factor as u64) << 48 ^ (rank as u64) << 40;
        let mut rng = fastrand::Rng::with_seed(key);
        let len = rows * self.k;
        let numbers = (0..len.min(PERIOD)).map(|_| T::nearest(2.0 * rng.f32() - 1.0));
        let numbers: Vec<T> = numbers.collect();
        numbers.iter().copied().cycle().take(len).collect()
    }

    /// Returns the element (`row`, `column`) of the sum of the products of `ranks`, exactly.
    pub fn exact(&self, ranks: impl Iterator<Item = usize>, row: usize, column: usize) -> f64 {
        let ranks: Vec<usize> = ranks.collect();
        product(&self.row(Factor::A, &ranks, row), &self.row(Factor::B, &ranks, column))
    }

    /// Returns the row of a factor of each of `ranks`, one after the other, in eighths.
    fn row(&self, factor: Factor, ranks: &[usize], row: usize) -> Vec<i8> {
        let of_rank =
            |&rank| (0..self.k).map(move |column| self.eighths(factor, rank, row, column) as i8);
        ranks.iter().flat_map(of_rank).collect()
    }

    /// Returns how many of the elements at these positions are wrong in `c`, the whole C of the
    /// products of `ranks`, row-major.
    pub fn count_wrong<T: Number>(
        &self,
        ranks: std::ops::Range<usize>,
        c: &[T],
        positions: impl Iterator<Item = (usize, usize)>,
    ) -> usize {
        let ranks: Vec<usize> = ranks.collect();
        let (mut rows, mut columns) = (HashMap::new(), HashMap::new());
        let is_wrong = |&(row, column): &(usize, usize)| {
            let a = rows.entry(row).or_insert_with(|| self.row(Factor::A, &ranks, row));
            let b = columns.entry(column).or_insert_with(|| self.row(Factor::B, &ranks, column));
            // `f32` holds the sum exactly.
            let right = T::nearest(product(a, b) as f32);
            // -0 equals 0.
            c[row * self.n + column] != right
        };
        positions.filter(is_wrong).count()
    }

    /// Returns every position.
    pub fn all(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (m, n) = (self.m, self.n);
        (0..m).flat_map(move |row| (0..n).map(move |column| (row, column)))
    }

    /// Returns the corners and `count` random positions.
    pub fn samples(&self, count: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (m, n, seed) = (self.m, self.n, self.seed);
        let corners = [(0, 0), (0, n - 1), (m - 1, 0), (m - 1, n - 1)];
        let mut rng = fastrand::Rng::with_seed(seed);
        let random = (0..count).map(move |_| (rng.usize(..m), rng.usize(..n)));
        corners.into_iter().chain(random)
    }
}

/// Returns the product of a row of A and one of B, both in eighths.
fn product(a: &[i8], b: &[i8]) -> f64 {
    let sum: i64 = a.iter().zip(b).map(|(a, b)| i64::from(*a) * i64::from(*b)).sum();
    sum as f64 / 64.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_of_long_sums_are_coarse_and_sums_are_those_of_the_elements() {
        for (k, step) in [(FINE_TERMS, 0.125), (FINE_TERMS + 1, 0.5)] {
            let problem = Problem { m: 1, n: 1, k, seed: 5 };
            let [a, b]: [Vec<f32>; 2] =
                [Factor::A, Factor::B].map(|factor| problem.factor(factor, 0));
            let has = |x: f32| a.contains(&x) && b.contains(&-x);
            assert!(has(1.0) && has(-step), "{k}");
            assert!(a.iter().chain(&b).all(|x| x % step == 0.0), "{k}");
            let sum: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(a * b)).sum();
            assert_eq!(problem.exact(0..1, 0, 0), sum);
        }
    }

    #[test]
    fn sums_are_as_small_as_those_of_independent_factors() {
        let problem = Problem { m: 2, n: 512, k: FINE_TERMS, seed: 3 };
        let squares: f64 =
            problem.all().map(|(row, column)| problem.exact(0..1, row, column).powi(2)).sum();
        let deviation = (squares / (problem.m * problem.n) as f64).sqrt();
        // It is about 17, as the module's documentation says.
        assert!((15.0..19.0).contains(&deviation), "{deviation}");
    }
}
