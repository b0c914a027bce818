//! How kernels reduce.

use std::any::Any;

use devcomm_host::ReduceScale;
use devcomm_kernels::collectives::reduction::{Reduction, ReductionArgs};

use crate::prelude::*;

/// How kernels reduce the elements of the ranks.
#[derive(Clone, Copy)]
pub(super) enum KernelReduction {
    /// Floats of 16 and 32 bits, reduced in `f32`.
    Floats(ReductionArgs<u32, f32, f32>),
    /// Other elements, by one of [`Reduction`]'s operators; results are divided.
    Any { operator: u32, divisor: u32 },
}

impl KernelReduction {
    /// Returns `None` for what no kernel does: products of floats of 16 and 32 bits, scalars in
    /// device memory, and scalars for other elements.
    pub(super) fn new<T: Element>(
        op: ReduceOp,
        scale: ReduceScale<T>,
        ranks: usize,
    ) -> Option<Self> {
        let (operator, divisor) = match op {
            ReduceOp::Sum => (Reduction::SUM, 1),
            ReduceOp::Avg => (Reduction::SUM, ranks as u32),
            ReduceOp::Max => (Reduction::MAX, 1),
            ReduceOp::Min => (Reduction::MIN, 1),
            ReduceOp::Prod => (Reduction::PROD, 1),
        };
        if !matches!(T::DATA_TYPE, DataType::Float32 | DataType::Float16 | DataType::Bfloat16) {
            let is_plain = matches!(scale, ReduceScale::One);
            return is_plain.then_some(Self::Any { operator, divisor });
        }
        let input = match scale {
            ReduceScale::One => 1.0,
            ReduceScale::Value(value) => as_f32(&value)?,
            ReduceScale::Unknown => return None,
        };
        let output = 1.0 / divisor as f32;
        let is_done = operator != Reduction::PROD;
        is_done.then_some(Self::Floats(ReductionArgs { operator, input, output }))
    }
}

/// Returns the value of a float of 16 or 32 bits.
fn as_f32(value: &dyn Any) -> Option<f32> {
    let of_f16 = || value.downcast_ref().copied().map(f16::to_f32);
    let of_bf16 = || value.downcast_ref().copied().map(bf16::to_f32);
    value.downcast_ref().copied().or_else(of_f16).or_else(of_bf16)
}
