//! What the steps with `wgmma` share.

use cuda_std::convert::f32_to_bf16x2;
use cuda_std::prelude::*;
use cuda_std::tile::SharedTile;
use cuda_std::wgmma::{self, Sums};

/// Rows of a warpgroup's product.
pub const ROWS: u32 = 64;
/// Terms of a tile: its rows have 128 bytes.
pub const TERMS: u32 = 64;

/// Begins the products of two tiles, as a group: adds them to the sums, or sets the sums to them.
///
/// # Safety
///
/// As [`wgmma::multiply`].
#[inline(always)]
pub unsafe fn multiply<S: Sums, const N: u32>(
    sums: &mut S,
    a: SharedTile<bf16, ROWS>,
    b: SharedTile<bf16, N>,
    accumulate: bool,
) {
    // SAFETY: the caller's contract.
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
#[inline(always)]
pub unsafe fn store(sums: &[f32], c: *mut bf16, n: u32, row: u32, column: u32) {
    let (warp, lane) = (thread::thread_idx_x() / warp::WARP_SIZE % 4, warp::lane_id());
    // A thread has two neighbouring columns of two rows of each eight columns.
    let (row, column) = (row + 16 * warp + lane / 4, column + lane % 4 * 2);
    let to = c.wrapping_add(row as usize * n as usize + column as usize);
    let mut i = 0;
    while i < sums.len() {
        let to = to.wrapping_add(2 * i);
        // SAFETY: the caller's contract.
        unsafe {
            mem::store(to.cast(), f32_to_bf16x2([sums[i], sums[i + 1]]));
            let below = to.wrapping_add(8 * n as usize);
            mem::store(below.cast(), f32_to_bf16x2([sums[i + 2], sums[i + 3]]));
        }
        i += 4;
    }
}
