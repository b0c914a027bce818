//! The arithmetic of reductions.
//!
//! Elements are combined in rank order. Integers wrap; `f64` accumulates in `f64`, all other floats
//! in `f32`, rounded once at the end. (In NCCL, order and rounding depend on the algorithm.) The
//! average is the sum divided by the number of ranks.

use devcomm_types::{DataType, F8E4M3, F8E5M2};
use half::{bf16, f16};

use super::operator::Operator;

/// One rank's input.
pub(super) struct Input {
    pub(super) elements: *const u8,
    /// Bytes of `PreMulSum`'s scalar, in the element type.
    pub(super) scalar: [u8; 8],
}

/// An element type and its accumulator.
trait ReduceElement: Copy {
    type Acc: Copy;
    fn to_acc(self) -> Self::Acc;
    fn from_acc(acc: Self::Acc) -> Self;
    fn add(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn mul(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn max(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn min(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn div_count(acc: Self::Acc, n: usize) -> Self::Acc;
}

macro_rules! integers {
    ($($type:ident)*) => { $(
        impl ReduceElement for $type {
            type Acc = Self;

            fn to_acc(self) -> Self {
                self
            }

            fn from_acc(acc: Self) -> Self {
                acc
            }

            fn add(a: Self, b: Self) -> Self {
                a.wrapping_add(b)
            }

            fn mul(a: Self, b: Self) -> Self {
                a.wrapping_mul(b)
            }

            fn max(a: Self, b: Self) -> Self {
                a.max(b)
            }

            fn min(a: Self, b: Self) -> Self {
                a.min(b)
            }

            fn div_count(acc: Self, n: usize) -> Self {
                // A rank count beyond the type's range gives 0.
                Self::try_from(n).map_or(0, |n| acc / n)
            }
        }
    )* };
}
integers!(i8 u8 i32 u32 i64 u64);

macro_rules! floats {
    ($($type:ident as $acc:ident, $to:expr, $from:expr;)*) => { $(
        impl ReduceElement for $type {
            type Acc = $acc;

            fn to_acc(self) -> $acc {
                $to(self)
            }

            fn from_acc(acc: $acc) -> Self {
                $from(acc)
            }

            fn add(a: $acc, b: $acc) -> $acc {
                a + b
            }

            fn mul(a: $acc, b: $acc) -> $acc {
                a * b
            }

            fn max(a: $acc, b: $acc) -> $acc {
                a.max(b)
            }

            fn min(a: $acc, b: $acc) -> $acc {
                a.min(b)
            }

            fn div_count(acc: $acc, n: usize) -> $acc {
                acc / n as $acc
            }
        }
    )* };
}
floats! {
    f64 as f64, |v| v, |v| v;
    f32 as f32, |v| v, |v| v;
    f16 as f32, f16::to_f32, f16::from_f32;
    bf16 as f32, bf16::to_f32, bf16::from_f32;
    F8E4M3 as f32, |v: F8E4M3| v.to_f32(), F8E4M3::from_f32;
    F8E5M2 as f32, |v: F8E5M2| v.to_f32(), F8E5M2::from_f32;
}

/// Reduces `count` elements of each input; returns the results' bytes.
///
/// # Safety
///
/// Every input has `count` elements, which are not written during the call.
pub(super) unsafe fn combine(
    data_type: DataType,
    operator: Operator,
    inputs: &[Input],
    count: usize,
) -> Vec<u8> {
    use DataType as T;
    let combine = match data_type {
        T::Int8 => fold::<i8>,
        T::Uint8 => fold::<u8>,
        T::Int32 => fold::<i32>,
        T::Uint32 => fold::<u32>,
        T::Int64 => fold::<i64>,
        T::Uint64 => fold::<u64>,
        T::Float16 => fold::<f16>,
        T::Float32 => fold::<f32>,
        T::Float64 => fold::<f64>,
        T::Bfloat16 => fold::<bf16>,
        T::Float8e4m3 => fold::<F8E4M3>,
        T::Float8e5m2 => fold::<F8E5M2>,
    };
    // SAFETY: the caller passes the address of `count` elements of each input.
    unsafe { combine(operator, inputs, count) }
}

/// Does the same as [`combine`], for elements of type `T`.
///
/// # Safety
///
/// The contract is that of [`combine`].
unsafe fn fold<T: ReduceElement>(operator: Operator, inputs: &[Input], count: usize) -> Vec<u8> {
    let op = match operator {
        Operator::Sum | Operator::Avg | Operator::PreMulSum(_) => T::add,
        Operator::Prod => T::mul,
        Operator::Max => T::max,
        Operator::Min => T::min,
    };
    let mut results = Vec::<T::Acc>::new();
    for Input { elements, scalar } in inputs {
        // SAFETY: a scalar has 8 bytes, the size of the largest element type.
        let scalar = unsafe { scalar.as_ptr().cast::<T>().read_unaligned() }.to_acc();
        let scaled = |value| match operator {
            Operator::PreMulSum(_) => T::mul(value, scalar),
            _ => value,
        };
        // SAFETY: the caller passes the address of `count` elements of each input.
        let element = |index| unsafe { elements.cast::<T>().add(index).read_unaligned() };
        let values = (0..count).map(|index| scaled(element(index).to_acc()));
        if results.is_empty() {
            results = values.collect();
        } else {
            results.iter_mut().zip(values).for_each(|(acc, value)| *acc = op(*acc, value));
        }
    }
    if operator == Operator::Avg {
        results.iter_mut().for_each(|acc| *acc = T::div_count(*acc, inputs.len()));
    }
    let mut bytes = vec![0; count * size_of::<T>()];
    for (out, acc) in bytes.chunks_exact_mut(size_of::<T>()).zip(results) {
        // SAFETY: `out` has the size of `T`.
        unsafe { out.as_mut_ptr().cast::<T>().write_unaligned(T::from_acc(acc)) };
    }
    bytes
}
