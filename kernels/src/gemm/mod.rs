//! Matrix products, `C = A x B^T`: A has `m x k` elements, B `n x k` (as `nn.Linear` keeps its
//! weights), C `m x n`, all row-major. A may be stored as `k x m` and B as `k x n`, if they are of
//! 16 bits and the kernel is not [`gemm_swapped`]. Sums are in f32; an [`epilogue`] adds to them,
//! and they are rounded once. Elements are bf16; [`gemm_mma`] has f16 too, [`gemm_wgmma`] also
//! 8-bit floats, and both have C in f32. [`gemm_blocks`] has 8-bit floats with scales per block.
//!
//! Four kernels: [`gemm_wgmma`], for few rows [`gemm_swapped`], and [`gemm_blocks`] for Hopper and
//! rows that begin at multiples of 16 bytes; [`gemm_mma`] for every GPU since Ampere and any rows.
//! [`gemm_grouped`] and [`gemm_grouped_mma`] have the products of groups of rows, by the tiles of
//! the first and of the last one.

pub mod epilogue;
pub(crate) mod follow;
pub mod gemm_blocks;
pub mod gemm_grouped;
pub mod gemm_grouped_mma;
pub mod gemm_mma;
pub mod gemm_swapped;
pub mod gemm_wgmma;
pub mod groups;
pub(crate) mod order;
