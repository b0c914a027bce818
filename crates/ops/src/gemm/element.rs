//! The element types of products, and their kernels.

use devcomm_host::TensorMap;
use devcomm_kernels::gemm::groups::GroupsArgs;
use devcomm_types::F8E5M2;
use half::f16;

use super::launches::Matrices;
use super::product::EpilogueArgs;
use crate::prelude::*;

/// The arguments of `gemm_wgmma`: maps of A, B and C, C's address if its map is not used, the
/// shape, and whether A and B are transposed.
pub type WideArgs = (TensorMap, TensorMap, TensorMap, u64, u32, u32, u32, bool, bool, EpilogueArgs);
/// The arguments of `gemm_mma`: the addresses of A, B and C, and the rest of [`WideArgs`].
pub type PortableArgs = (u64, u64, u64, u32, u32, u32, bool, bool, EpilogueArgs);
/// The arguments of `gemm_blocks`: those of [`WideArgs`], but for A and B addresses of scales.
pub type BlocksArgs = (TensorMap, TensorMap, TensorMap, u64, u32, u32, u32, u64, u64, EpilogueArgs);
/// The arguments of `gemm_grouped`: maps of A, B and C, C's address, the groups, and the shape.
pub type GroupedArgs = (TensorMap, TensorMap, TensorMap, u64, Groups, u32, u32, u32, EpilogueArgs);
/// The arguments of `gemm_grouped_mma`: the addresses of A, B and C, the groups, and the shape.
pub type GroupedPortableArgs = (u64, u64, u64, Groups, u32, u32, u32, EpilogueArgs);
type Groups = GroupsArgs<u32, u64, u64>;

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
pub trait GemmOutput<T>: Element + Sealed {
    #[doc(hidden)]
    type Wide: LaunchWith<WideArgs>;
    #[doc(hidden)]
    type Portable: LaunchWith<PortableArgs>;
    #[doc(hidden)]
    const HAS_PORTABLE: bool;
}

/// An element type of A and B whose matrices have scales: `F8E4M3` or `F8E5M2`.
pub trait ScaledElement: GemmElement {
    #[doc(hidden)]
    type Blocks: LaunchWith<BlocksArgs>;
}

/// An element type of 16 bits, whose A and B may be stored transposed or have groups of rows:
/// `bf16` or `f16`. Hopper's tensor cores take 8-bit floats only with the terms of a sum side by
/// side.
#[diagnostic::on_unimplemented(
    message = "products of `{Self}` have no transposed A or B, and no groups",
    note = "tensor cores transpose 16-bit floats only: store A as `m x k` and B as `n x k`"
)]
pub trait HalfElement: GemmElement {
    #[doc(hidden)]
    type Grouped: LaunchWith<GroupedArgs>;
    #[doc(hidden)]
    type GroupedPortable: LaunchWith<GroupedPortableArgs>;
}

impl HalfElement for bf16 {
    type Grouped = kernels::gemm_grouped<Self>;
    type GroupedPortable = kernels::gemm_grouped_mma<Self>;
}

impl HalfElement for f16 {
    type Grouped = kernels::gemm_grouped<Self>;
    type GroupedPortable = kernels::gemm_grouped_mma<Self>;
}

impl ScaledElement for F8E4M3 {
    type Blocks = kernels::gemm_blocks<Self>;
}

impl ScaledElement for F8E5M2 {
    type Blocks = kernels::gemm_blocks<Self>;
}

/// Implements the traits for types of A and B. Each has a type of C, and a type of the portable
/// kernel with whether that kernel is for it: 8-bit floats have none.
macro_rules! elements {
    ($($type:ident in $output:ident, $portable:ident $has_portable:literal;)*) => { $(
        impl Sealed for $type {}

        impl GemmElement for $type {
            type Output = $output;
        }

        impl GemmOutput<$type> for $output {
            type Wide = kernels::gemm_wgmma<$type>;
            type Portable = kernels::gemm_mma<$portable>;
            const HAS_PORTABLE: bool = $has_portable;
        }

        impl GemmOutput<$type> for f32 {
            type Wide = kernels::gemm_wgmma_f32<$type>;
            type Portable = kernels::gemm_mma_f32<$portable>;
            const HAS_PORTABLE: bool = $has_portable;
        }
    )* };
}

elements! {
    bf16 in bf16, bf16 true;
    f16 in f16, f16 true;
    F8E4M3 in bf16, bf16 false;
    F8E5M2 in bf16, bf16 false;
}

/// Refuses a product of 8-bit floats, and says what their kernels need.
pub(super) fn no_kernel<T: Element>(Matrices { shape: [.., k], .. }: Matrices) -> Result<()> {
    refuse(format!(
        "products of {} need a GPU of the Hopper family, A, B and C at multiples of 16 bytes, \
         and rows of them too: k is {k}, pad it with zeros to a multiple of 16",
        T::NAME,
    ))
}

#[cfg(doctest)]
mod tests;
