//! The products and stores of a warpgroup, which the steps with `wgmma` share.

use cuda_std::convert::f32_to_bf16x2;
use cuda_std::prelude::*;
use cuda_std::tile::{RegTile, SharedTile};
use cuda_std::wgmma::{self, Sums};

/// Rows of a warpgroup's product.
pub const ROWS: u32 = 64;
/// Terms of a tile: its rows have 128 bytes.
pub const TERMS: u32 = 64;

/// A warpgroup's sums of 64 x 256.
pub type Sums256 = RegTile<f32, 32>;

/// Begins the products of two tiles, as a group: adds them to the sums, or sets the sums to them.
///
/// # Safety
///
/// The contract is that of [`wgmma::multiply`].
pub unsafe fn multiply<S: Sums, const N: u32>(
    sums: &mut S,
    a: SharedTile<bf16, ROWS>,
    b: SharedTile<bf16, N>,
    accumulate: bool,
) {
    // SAFETY: the caller's warpgroup calls this together, with tiles in shared memory that no
    // thread writes.
    unsafe {
        wgmma::fence();
        let mut term = 0;
        while term < TERMS {
            let (a, b) = (a.factor().columns_from(term), b.factor().columns_from(term));
            wgmma::multiply(sums, a, b, accumulate || term > 0);
            // An instruction multiplies 16 terms.
            term += 16;
        }
        wgmma::commit_group();
    }
}

/// Stores a warpgroup's sums to C, whose rows have `n` elements, from `row` and `column` on.
///
/// # Safety
///
/// The 128 threads of a warpgroup call this; C has the elements, and no other thread accesses them.
pub unsafe fn store<const BLOCKS: usize>(
    sums: &RegTile<f32, BLOCKS>,
    c: *mut bf16,
    n: u32,
    row: u32,
    column: u32,
) {
    let warps_row = row + 16 * (thread::thread_idx_x() / warp::WARP_SIZE % 4);
    sums.for_each_pair(|row, in_tile, pair| {
        let at = (warps_row + row) as usize * n as usize + (column + in_tile) as usize;
        // SAFETY: the caller passes a matrix that has these rows and columns.
        unsafe { mem::store(c.wrapping_add(at).cast(), f32_to_bf16x2(pair)) };
    });
}
