//! Random inputs of reductions, and checks of the sums.

use cuda_std::vector::Accumulate;
use devcomm_types::{F8E4M3, F8E5M2};
use half::{bf16, f16};

/// An element type of sums.
pub trait Number: Accumulate + PartialEq + std::fmt::Debug {
    /// The limit of inputs, which lie between its negative and itself.
    const MOST: f32 = 1.0;
    /// Distance from 1 to the next larger number.
    const EPSILON: f64;
    /// Half the distance between subnormal numbers; 0 for a type in which that is far below the
    /// other errors of sums.
    const HALF_STEP_AT_ZERO: f64;
    /// Returns the nearest number to `x`.
    fn nearest(x: f32) -> Self;
    /// Returns the number's value.
    fn value(self) -> f64;
    /// Returns the number's bits.
    fn bits(self) -> u64;
}

macro_rules! numbers {
    ($($type:ty, $epsilon:expr, $half_step:expr, $nearest:expr, $value:expr);* $(;)?) => { $(
        impl Number for $type {
            const EPSILON: f64 = $epsilon;
            const HALF_STEP_AT_ZERO: f64 = $half_step;
            fn nearest(x: f32) -> Self {
                $nearest(x)
            }
            fn value(self) -> f64 {
                $value(self)
            }
            fn bits(self) -> u64 {
                self.to_bits().into()
            }
        }
    )* };
}
numbers! {
    f32, f32::EPSILON as f64, 0.0, |x| x, f64::from;
    f16, 1.0 / (1u64 << 10) as f64, 1.0 / (1u64 << 25) as f64, f16::from_f32, f16::to_f64;
    bf16, 1.0 / (1u64 << 7) as f64, 0.0, bf16::from_f32, bf16::to_f64;
    F8E4M3, 1.0 / 8.0, 1.0 / (1u64 << 10) as f64, F8E4M3::from_f32, |x| F8E4M3::to_f64(&x);
    F8E5M2, 1.0 / 4.0, 1.0 / (1u64 << 17) as f64, F8E5M2::from_f32, |x| F8E5M2::to_f64(&x);
}

impl Number for i32 {
    const MOST: f32 = 1000.0;
    const EPSILON: f64 = 0.0;
    const HALF_STEP_AT_ZERO: f64 = 0.0;
    fn nearest(x: f32) -> Self {
        x.round() as Self
    }
    fn value(self) -> f64 {
        self.into()
    }
    fn bits(self) -> u64 {
        u64::from(self as u32)
    }
}

/// The result of a reduction of the ranks' elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduced {
    /// The sum.
    Sum,
    /// The greatest.
    Max,
    /// The least.
    Min,
    /// The sum divided by the number of ranks.
    Avg,
}

/// Returns the element `index` of rank `rank`'s input, uniform up to ±[`Number::MOST`].
pub fn input<T: Number>(seed: u64, rank: usize, index: usize) -> T {
    let key = seed ^ ((rank as u64) << 48) ^ index as u64;
    T::nearest(T::MOST * (2.0 * fastrand::Rng::with_seed(key).f32() - 1.0))
}

/// Returns the rank `rank`'s input, `count` elements.
pub fn inputs<T: Number>(seed: u64, rank: usize, count: usize) -> Vec<T> {
    (0..count).map(|index| input(seed, rank, index)).collect()
}

/// Returns how many elements of `got` differ from the sum over `n_ranks` by more than the error of
/// one f32 rounding per addition and `roundings` roundings to `T`, at least one.
pub fn count_wrong<T: Number>(seed: u64, n_ranks: usize, roundings: usize, got: &[T]) -> usize {
    count_wrong_from(Reduced::Sum, seed, n_ranks, roundings, 0, got)
}

/// Does the same as [`count_wrong`], for any reduction; `got` has the results from element `first`
/// on.
pub fn count_wrong_from<T: Number>(
    reduced: Reduced,
    seed: u64,
    n_ranks: usize,
    roundings: usize,
    first: usize,
    got: &[T],
) -> usize {
    let terms = |i| (0..n_ranks).map(move |rank| input::<T>(seed, rank, first + i).value());
    let wrong = |(i, got): (usize, &T)| match reduced {
        Reduced::Max => got.value() != terms(i).fold(f64::NEG_INFINITY, f64::max),
        Reduced::Min => got.value() != terms(i).fold(f64::INFINITY, f64::min),
        _ => is_wrong(reduced, terms(i), roundings, *got),
    };
    got.iter().enumerate().filter(|&element| wrong(element)).count()
}

/// Returns whether `got` is wrong as a sum or an average of these terms.
fn is_wrong<T: Number>(
    reduced: Reduced,
    terms: impl Iterator<Item = f64>,
    roundings: usize,
    got: T,
) -> bool {
    let (mut sum, mut magnitude, mut n_ranks) = (0.0f64, 0.0f64, 0.0f64);
    for x in terms {
        sum += x;
        magnitude += x.abs();
        n_ranks += 1.0;
    }
    let accumulation = n_ranks * f64::from(f32::EPSILON) / 2.0 * magnitude;
    // One rounding is that of the result, the others are those of partial sums.
    let mut result_error = T::EPSILON / 2.0 * (sum.abs() + accumulation);
    let mut partial_error = (roundings - 1) as f64 * T::EPSILON / 2.0 * magnitude;
    let mut bound = accumulation;
    if reduced == Reduced::Avg {
        // Integers are rounded towards zero, by less than 1. For floats the reciprocal of the ranks
        // is rounded; each term may be multiplied by it before it is added, and then rounded, also
        // to a subnormal number.
        sum /= n_ranks;
        partial_error = (partial_error + (n_ranks + 2.0) * T::EPSILON * magnitude) / n_ranks;
        result_error = if T::EPSILON == 0.0 { 1.0 } else { result_error / n_ranks };
        bound /= n_ranks;
        partial_error += n_ranks * T::HALF_STEP_AT_ZERO;
    }
    bound += partial_error + result_error.max(T::HALF_STEP_AT_ZERO);
    let error = (got.value() - sum).abs();
    error.is_nan() || error > bound
}

/// Returns a checksum of the bits, an FNV-1a hash: equal on all ranks if their results are.
pub fn checksum<T: Number>(data: &[T]) -> u64 {
    data.iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, x| (hash ^ x.bits()).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_sees_a_wrong_element() {
        let sum = |i| input::<f32>(11, 0, i) + input::<f32>(11, 1, i);
        let mut sums: Vec<f32> = (0..100).map(sum).collect();
        assert_eq!(count_wrong(11, 2, 1, &sums), 0);
        sums[41] += 1e-5;
        sums[77] = f32::NAN;
        assert_eq!(count_wrong(11, 2, 1, &sums), 2);
    }

    #[test]
    fn the_check_of_every_reduction_sees_a_wrong_element() {
        let wrong_before_and_after = |reduced| {
            let element = |i| {
                let [a, b] = [0, 1].map(|rank| input::<i32>(11, rank, i));
                match reduced {
                    Reduced::Sum => a + b,
                    Reduced::Max => a.max(b),
                    Reduced::Min => a.min(b),
                    Reduced::Avg => (a + b) / 2,
                }
            };
            let mut got: Vec<i32> = (5..105).map(element).collect();
            let right = count_wrong_from(reduced, 11, 2, 1, 5, &got);
            got[41] += 2;
            [right, count_wrong_from(reduced, 11, 2, 1, 5, &got)]
        };
        for reduced in [Reduced::Sum, Reduced::Max, Reduced::Min, Reduced::Avg] {
            assert_eq!(wrong_before_and_after(reduced), [0, 1], "{reduced:?}");
        }
    }
}
