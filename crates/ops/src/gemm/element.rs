//! The element types of products.

use crate::prelude::*;

/// A sealed trait: launches rely on each type having the kernels of its elements.
pub trait Sealed {}

impl Sealed for f32 {}

/// An element type of A and B: `bf16`, `f16`, `F8E4M3` or `F8E5M2`.
pub trait GemmElement: Element + Sealed {
    /// C's element type of [`Gemm::launch`](super::Gemm::launch): the same, or `bf16` for 8-bit
    /// floats.
    type Output: GemmOutput<Self>;
}

/// An element type of C, for A and B of `T`: [`GemmElement::Output`] or `f32`.
pub trait GemmOutput<T>: Element + Sealed {}

/// An element type of A and B whose matrices have scales: `F8E4M3` or `F8E5M2`.
pub trait ScaledElement: GemmElement {}

/// An element type of 16 bits, whose A and B may be stored transposed or have groups of rows:
/// `bf16` or `f16`.
#[diagnostic::on_unimplemented(
    message = "products of `{Self}` have no transposed A or B, and no groups",
    note = "tensor cores transpose 16-bit floats only: store A as `m x k` and B as `n x k`"
)]
pub trait HalfElement: GemmElement {}

/// Implements the traits for types of A and B, each with a type of C.
macro_rules! elements {
    ($($kind:ident: $type:ident in $output:ident;)*) => { $(
        impl Sealed for $type {}

        impl GemmElement for $type {
            type Output = $output;
        }

        impl GemmOutput<$type> for $output {}

        impl GemmOutput<$type> for f32 {}

        impl $kind for $type {}
    )* };
}

elements! {
    HalfElement: bf16 in bf16;
    HalfElement: f16 in f16;
    ScaledElement: F8E4M3 in bf16;
    ScaledElement: F8E5M2 in bf16;
}

#[cfg(doctest)]
mod tests;
