//! The product of groups of rows, each with a B of its own, on every GPU since Ampere, for rows at
//! any addresses: by the tiles of [`gemm_mma`].

use cuda_std::mma::Factor;

use super::gemm_mma::{self, Factors, TILE};
use super::prelude::*;

/// Computes what [`gemm_grouped`](super::gemm_grouped::gemm_grouped()) does, with the grid and the
/// block of [`gemm_mma`](super::gemm_mma::gemm_mma()). It cannot be a dependent launch.
///
/// # Safety
///
/// The conditions are those of [`gemm_grouped`](super::gemm_grouped::gemm_grouped()).
#[kernel(T = [f16, bf16], arch = "sm_80", max_threads = 128)]
pub unsafe fn gemm_grouped_mma<T: Factor + Float>(
    a: *const T,
    b: *const T,
    c: *mut T,
    groups: Groups,
    m: u32,
    n: u32,
    k: u32,
    epilogue: Fused<T>,
) {
    const PLAIN: [bool; 2] = [false; 2];
    let alignment = Factors { a, b, m, n, k }.row_alignment(PLAIN);
    let columns = n.div_ceil(TILE);
    // SAFETY: the kernel's caller passes matrices and groups; the whole block is here.
    unsafe {
        let tiles = GroupTiles::<{ gemm_mma::GROUP }>::new(groups, TILE, [m, n], columns);
        for tile in thread::blocks_strided(tiles.rows * tiles.columns) {
            let (group, (row, column)) = tiles.position(tile);
            let b = b.wrapping_add(group.b_row as usize * k as usize);
            let factors = Factors { a, b, m: group.end, n, k };
            let origin = (group.first + row * TILE, column * TILE);
            factors.tile(c, origin, alignment, PLAIN, epilogue);
        }
    }
}
