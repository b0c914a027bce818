//! Matrix products, `C = A x B^T`: A has `m x k` elements, B `n x k` (as `nn.Linear` keeps its
//! weights), C `m x n`, all row-major. Sums are in f32 and rounded once.

pub mod gemm_swapped;
pub mod gemm_wgmma;
