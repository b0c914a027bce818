//! Random inputs of reductions, and checks of the sums.

use cuda_std::vector::Accumulate;
use devcomm_types::{F8E4M3, F8E5M2};
use half::{bf16, f16};

/// An element type of sums.
pub trait Number: Accumulate + PartialEq + std::fmt::Debug {
    /// Distance from 1 to the next larger number.
    const EPSILON: f64;
    /// Half the distance between subnormal numbers (0 where it does not matter).
    const HALF_STEP_AT_ZERO: f64;
    /// The nearest number to `x`.
    fn nearest(x: f32) -> Self;
    /// The number's value.
    fn value(self) -> f64;
    /// The number's bits.
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

/// Element `index` of rank `rank`'s input: uniform in -1 to 1.
pub fn input<T: Number>(seed: u64, rank: usize, index: usize) -> T {
    let key = seed ^ ((rank as u64) << 48) ^ index as u64;
    T::nearest(2.0 * fastrand::Rng::with_seed(key).f32() - 1.0)
}

/// Rank `rank`'s input, `count` elements.
pub fn inputs<T: Number>(seed: u64, rank: usize, count: usize) -> Vec<T> {
    (0..count).map(|index| input(seed, rank, index)).collect()
}

/// How many of `got` differ from the sum over `n_ranks` by more than rounding allows: one f32
/// rounding per addition, and `roundings` roundings to `T`.
pub fn count_wrong<T: Number>(seed: u64, n_ranks: usize, roundings: usize, got: &[T]) -> usize {
    count_wrong_from(seed, n_ranks, roundings, 0, got)
}

/// As [`count_wrong`]; `got` are the sums from element `first` on.
pub fn count_wrong_from<T: Number>(
    seed: u64,
    n_ranks: usize,
    roundings: usize,
    first: usize,
    got: &[T],
) -> usize {
    let wrong = |(i, got): (usize, &T)| is_wrong(seed, n_ranks, roundings, first + i, *got);
    got.iter().enumerate().filter(|&element| wrong(element)).count()
}

fn is_wrong<T: Number>(seed: u64, n_ranks: usize, roundings: usize, index: usize, got: T) -> bool {
    let (mut sum, mut magnitude) = (0.0f64, 0.0f64);
    for rank in 0..n_ranks {
        let x = input::<T>(seed, rank, index).value();
        sum += x;
        magnitude += x.abs();
    }
    let accumulation = n_ranks as f64 * f64::from(f32::EPSILON) / 2.0 * magnitude;
    // One rounding is that of the result, the others are those of partial sums.
    let of_the_result = T::EPSILON / 2.0 * (sum.abs() + accumulation);
    let of_partial_sums = (roundings - 1) as f64 * T::EPSILON / 2.0 * magnitude;
    let bound = accumulation + of_partial_sums + of_the_result.max(T::HALF_STEP_AT_ZERO);
    let error = (got.value() - sum).abs();
    error.is_nan() || error > bound
}

/// A checksum of the bits: equal on all ranks if their results are.
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
}
