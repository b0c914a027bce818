//! Reduction operators, and the number types that they work on.
//!
//! A [`ReduceOp`] works on [`Accumulate::Acc`], the type that an element is reduced in. Any
//! `Fn(Acc, Acc) -> Acc` that is `Copy` is an operator too.
//!
//! The order in which elements are combined is not part of an operator: sums of floats in another
//! order may differ in the last bits.
//!
//! # Safety model
//!
//! Arithmetic only; safe.
//!
//! # Example
//!
//! ```
//! use cuda_std::reduce::{Max, ReduceOp, Sum, fold};
//! assert_eq!(fold::<u8, _>(Sum, &[200, 100]), Some(44));
//! assert_eq!(fold::<f32, _>(Max, &[1.0, 3.0, 2.0]), Some(3.0));
//! assert_eq!(fold::<i32, _>(|a: i32, b: i32| a.max(-b), &[1, -7, 3]), Some(7));
//! ```

use core::cmp::Ordering;
use core::ops::{Add, AddAssign, Mul};

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};

pub use crate::accumulate::Accumulate;
use crate::math;
use crate::warp::WarpShuffleValue;

/// A number type that elements are reduced in. Unlike `+` and `*` of integers, `wrapping_add` and
/// `wrapping_mul` wrap around in every build.
pub trait Number: Copy + PartialOrd + Add<Output = Self> + AddAssign + Mul<Output = Self> {
    /// Returns the sum.
    fn wrapping_add(self, other: Self) -> Self;
    /// Returns the product.
    fn wrapping_mul(self, other: Self) -> Self;
    /// Returns the smaller value; if one is NaN, the other.
    fn min(self, other: Self) -> Self;
    /// Returns the larger value; if one is NaN, the other.
    fn max(self, other: Self) -> Self;
    /// Returns `self` divided by `count`: for integers rounded towards zero, for floats as the
    /// product with the rounded reciprocal.
    fn div_count(self, count: u32) -> Self;
}

/// Methods of two numbers, each defined by an expression.
macro_rules! binary_methods {
    ($self:ident, $other:ident: $($name:ident => $result:expr;)*) => { $(
        fn $name($self, $other: Self) -> Self {
            $result
        }
    )* };
}

macro_rules! floats {
    ($($type:ident)*) => { $(
        impl Number for $type {
            binary_methods! {
                self, other:
                wrapping_add => self + other;
                wrapping_mul => self * other;
                min => $type::min(self, other);
                max => $type::max(self, other);
            }

            fn div_count(self, count: u32) -> Self {
                self * (1.0 / count as $type)
            }
        }
    )* };
}

floats!(f32 f64);

/// An integer type, with bitwise operations.
pub trait Bits: Number {
    /// Returns the bitwise AND.
    fn and(self, other: Self) -> Self;
    /// Returns the bitwise OR.
    fn or(self, other: Self) -> Self;
    /// Returns the bitwise XOR.
    fn xor(self, other: Self) -> Self;
}

macro_rules! integers {
    ($($type:ident $wide:ident;)*) => { $(
        impl Number for $type {
            binary_methods! {
                self, other:
                wrapping_add => $type::wrapping_add(self, other);
                wrapping_mul => $type::wrapping_mul(self, other);
                min => Ord::min(self, other);
                max => Ord::max(self, other);
            }

            fn div_count(self, count: u32) -> Self {
                // For a count of 0 the result is 0, so that the GPU does not trap.
                (self as $wide).checked_div(count as $wide).unwrap_or_default() as Self
            }
        }

        impl Bits for $type {
            binary_methods! {
                self, other:
                and => self & other;
                or => self | other;
                xor => self ^ other;
            }
        }
    )* };
}

// Each type with the type that it is divided in, which can represent the values and the count.
integers! {
    i8 i64;
    u8 u32;
    i32 i64;
    u32 u32;
    i64 i64;
    u64 u64;
}

/// An associative operator over elements `T`.
///
/// Elements `e` reduce to `result(combine(.. combine(input(e0), input(e1)) .., input(en)))`, in any
/// grouping.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not reduce elements of `{T}`",
    note = "an operator over `T`s is an `Fn(Acc, Acc) -> Acc` on `<T as Accumulate>::Acc`, which \
            is `f32` for floats of 16 and 8 bits"
)]
pub trait ReduceOp<T: Accumulate>: Copy {
    /// Transforms an element before it is combined.
    fn input(self, value: T::Acc) -> T::Acc {
        value
    }

    /// Combines two inputs or partial results.
    fn combine(self, a: T::Acc, b: T::Acc) -> T::Acc;

    /// Transforms the combined value into the result.
    fn result(self, value: T::Acc) -> T::Acc {
        value
    }
}

impl<T: Accumulate, F: Fn(T::Acc, T::Acc) -> T::Acc + Copy> ReduceOp<T> for F {
    fn combine(self, a: T::Acc, b: T::Acc) -> T::Acc {
        self(a, b)
    }
}

/// Returns `elements` reduced by `op`; `None` if there are none.
#[inline]
pub fn fold<T: Accumulate, Op: ReduceOp<T>>(op: Op, elements: &[T]) -> Option<T> {
    let inputs = elements.iter().map(|element| op.input(element.to_acc()));
    Some(T::from_acc(op.result(inputs.reduce(|a, b| op.combine(a, b))?)))
}

macro_rules! operators {
    ($($name:ident $bound:ident $method:ident $doc:literal;)*) => { $(
        #[doc = $doc]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name;

        impl<T: Accumulate<Acc: $bound>> ReduceOp<T> for $name {
            fn combine(self, a: T::Acc, b: T::Acc) -> T::Acc {
                $bound::$method(a, b)
            }
        }
    )* };
}

operators! {
    Sum Number wrapping_add "The sum; integers wrap around. NCCL: `ncclSum`.";
    Prod Number wrapping_mul "The product; integers wrap around. NCCL: `ncclProd`.";
    Min Number min "The minimum; NaN only if all elements are NaN. NCCL: `ncclMin`.";
    Max Number max "The maximum; NaN only if all elements are NaN. NCCL: `ncclMax`.";
    And Bits and "Bitwise AND; integers only.";
    Or Bits or "Bitwise OR; integers only.";
    Xor Bits xor "Bitwise XOR; integers only.";
}

/// The sum of the elements, each multiplied by a factor first. NCCL: `ncclRedOpCreatePreMulSum`.
///
/// The factor has the type that elements are reduced in: `f32` for 16-bit and 8-bit floats.
#[doc(alias = "ncclRedOpCreatePreMulSum")]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PreMulSum<Acc>(pub Acc);

impl<T: Accumulate> ReduceOp<T> for PreMulSum<T::Acc> {
    fn input(self, value: T::Acc) -> T::Acc {
        value.wrapping_mul(self.0)
    }

    fn combine(self, a: T::Acc, b: T::Acc) -> T::Acc {
        a.wrapping_add(b)
    }
}

/// The sum of the elements, divided by their number. NCCL: `ncclAvg`.
///
/// `Avg { of: team.n_ranks as u32 }` averages over a team. Integers are summed with wrap-around and
/// rounded towards zero.
#[doc(alias = "ncclAvg")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avg {
    /// The number of elements, at least one.
    pub of: u32,
}

impl<T: Accumulate> ReduceOp<T> for Avg {
    fn combine(self, a: T::Acc, b: T::Acc) -> T::Acc {
        a.wrapping_add(b)
    }

    fn result(self, value: T::Acc) -> T::Acc {
        value.div_count(self.of)
    }
}

/// Returns the pair with the larger value or, if these are equal, the smaller index: an operator
/// for [`warp_reduce`](crate::collective::warp_reduce) and its like. A NaN is less than every
/// number and equal to a NaN, so that the order of the pairs does not matter.
///
/// ```
/// use cuda_std::reduce::arg_max;
/// assert_eq!(arg_max((1.5, 7), (2.5, 9)), (2.5, 9));
/// assert_eq!(arg_max((2.5, 9), (2.5, 7)), (2.5, 7));
/// assert_eq!(arg_max((f32::NAN, 7), (2.5, 9)), (2.5, 9));
/// ```
pub fn arg_max<V: PartialOrd, I: PartialOrd>(a: (V, I), b: (V, I)) -> (V, I) {
    let is_number = |value: &V| value.partial_cmp(value).is_some();
    let is_larger = match b.0.partial_cmp(&a.0) {
        Some(Ordering::Equal) => b.1 < a.1,
        Some(order) => order == Ordering::Greater,
        None if is_number(&a.0) == is_number(&b.0) => b.1 < a.1,
        None => is_number(&b.0),
    };
    if is_larger { b } else { a }
}

/// The sum of `exp(x - max)` over values `x` and their maximum, in one pass: the denominator of a
/// softmax.
///
/// ```
/// use cuda_std::reduce::SoftmaxSum;
/// let all = [1.0, 3.0, 2.0].map(SoftmaxSum::of);
/// let all = all.into_iter().fold(SoftmaxSum::EMPTY, SoftmaxSum::combine);
/// assert!((all.weight(3.0) - 0.665_24).abs() < 1e-4);
/// ```
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct SoftmaxSum {
    /// The largest value.
    pub max: f32,
    /// The sum of `exp(x - max)`.
    pub sum: f32,
}

impl SoftmaxSum {
    /// The maximum and sum of no value.
    pub const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };

    /// Returns the maximum and sum of one value.
    pub fn of(x: f32) -> Self {
        Self { max: x, sum: 1.0 }
    }

    /// Returns the maximum and sum of the values of both.
    pub fn combine(self, other: Self) -> Self {
        let max = Number::max(self.max, other.max);
        // The difference of two infinities would be NaN.
        let base = if max == f32::NEG_INFINITY { 0.0 } else { max };
        let part = |one: Self| one.sum * math::exp(one.max - base);
        Self { max, sum: part(self) + part(other) }
    }

    /// Returns the softmax of one of the values: `exp(x - max) / sum`; 0 if all values are
    /// -infinity, as those of a row that is masked.
    pub fn weight(self, x: f32) -> f32 {
        if self.max == f32::NEG_INFINITY { 0.0 } else { math::exp(x - self.max) / self.sum }
    }
}

impl WarpShuffleValue for SoftmaxSum {
    const WORDS: usize = 2;

    fn to_words(self) -> [u32; 4] {
        (self.max, self.sum).to_words()
    }

    fn from_words(words: [u32; 4]) -> Self {
        let (max, sum) = WarpShuffleValue::from_words(words);
        Self { max, sum }
    }
}

/// The sum with each addition rounded to 16 bits, for [`crate::multimem`]: PTX's
/// `multimem.ld_reduce.add` without `.acc::f32`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SumInHalf;

macro_rules! sum_in_half {
    ($($type:ident)*) => { $(
        impl ReduceOp<$type> for SumInHalf {
            fn combine(self, a: f32, b: f32) -> f32 {
                $type::from_acc(a + b).to_acc()
            }
        }
    )* };
}

sum_in_half!(f16 bf16);
