//! Matrix products, `C = A x B^T`: A has `m x k` elements, B `n x k` (as `nn.Linear` keeps its
//! weights), C `m x n`, all row-major. Sums are in f32 and rounded once.
//!
//! Two kernels: [`gemm_wgmma`] for Hopper and rows that begin at multiples of 16 bytes, and
//! [`gemm_mma`] for every GPU since Ampere and any rows.

pub mod gemm_mma;
pub mod gemm_wgmma;
