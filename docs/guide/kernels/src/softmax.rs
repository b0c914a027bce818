//! The softmax of the rows of a product: the attention scores of one head.
//!
//! Q has `queries x terms` elements, K `keys x terms` and P `queries x keys`. `queries` and `keys`
//! are multiples of 64 and `terms` of 8; the matrices are aligned to 16 bytes.

// ANCHOR: kernel
use cuda_std::convert::f32_to_bf16x2;
use cuda_std::math;
use cuda_std::prelude::*;
use cuda_std::tile::{Matrix, MmaProduct, RegRows, RegTile};

/// Rows of a block and columns of a tile.
pub const TILE: u32 = 64;
/// Threads of a block: four warps, each with 16 rows of the tile.
pub const THREADS: u32 = 128;
type Product = MmaProduct<bf16, TILE, TILE, 3, THREADS>;
/// A warp's scores of a tile: 16 x 64.
type Scores = RegTile<f32, 8>;

/// Computes `P = softmax(scale * Q x K^T)`, by rows. Grid: a block for each 64 queries.
#[kernel(max_threads = 128)]
pub unsafe fn softmax_scores(
    q: *const bf16,
    k: *const bf16,
    p: *mut bf16,
    queries: u32,
    keys: u32,
    terms: u32,
    scale: f32,
) {
    let product = Product {
        a: Matrix { address: q, rows: queries, columns: terms },
        b: Matrix { address: k, rows: keys, columns: terms },
        memory: shared_array![u8; Product::BYTES as usize],
    };
    let (first_row, warps_row) = (TILE * thread::block_idx_x(), 16 * warp::warp_id());
    let scores_from = |column| -> Scores {
        // SAFETY: the caller passes whole matrices; all threads of the block are here.
        let [sums] = unsafe {
            product.sums::<16, 1, 8>((first_row, column), (warps_row, 0), thread::sync_threads)
        };
        sums.map(|sum| sum * scale)
    };
    // Each row's largest score, and the sum of the powers relative to it, of the tiles so far.
    let mut largest = RegRows::filled(f32::NEG_INFINITY);
    let mut sum = RegRows::filled(0.0_f32);
    let tiles = || (0..keys).step_by(TILE as usize);
    for column in tiles() {
        let scores = scores_from(column);
        // SAFETY: all lanes of the warp are here.
        let new = largest.zip(unsafe { scores.reduce_rows(f32::max) }, f32::max);
        let powers = scores.zip_rows(new, |score, new| math::exp(score - new));
        let scaled = sum.zip(largest.zip(new, |old, new| math::exp(old - new)), |a, b| a * b);
        // SAFETY: all lanes of the warp are here.
        sum = scaled.zip(unsafe { powers.reduce_rows(|a, b| a + b) }, |a, b| a + b);
        largest = new;
    }
    // The scores are computed again, since a whole row does not fit in registers.
    for column in tiles() {
        let scores = scores_from(column);
        let powers = scores.zip_rows(largest, |score, largest| math::exp(score - largest));
        powers.zip_rows(sum, |power, sum| power / sum).for_each_pair(|row, in_tile, pair| {
            let row = (first_row + warps_row + row) as usize;
            let to = p.wrapping_add(row * keys as usize + (column + in_tile) as usize);
            // SAFETY: the element is in P, and each lane has elements of its own.
            unsafe { mem::store(to.cast(), f32_to_bf16x2(pair)) };
        });
    }
}
// ANCHOR_END: kernel
