//! Step 4: tensor cores multiply (`mma.sync`), while the next tiles are copied (`cp.async`).

use cuda_std::convert::f32_to_bf16x2;
use cuda_std::prelude::*;
use cuda_std::tile::{Matrix, MmaProduct};

/// Rows and columns of C of a block.
pub const TILE: u32 = 128;
/// Rows and columns of C of a warp.
const WARP_TILE: u32 = 64;
/// Stages of the pipeline.
const STAGES: u32 = 3;
/// Threads per block: four warps.
pub const THREADS: u32 = 128;
/// Dynamic shared memory in bytes.
pub const SHARED: u32 = Product::BYTES;

type Product = MmaProduct<bf16, TILE, TILE, STAGES, THREADS>;

/// Computes `C = A x B^T`.
///
/// Grid: a block for each tile of [`TILE`] x [`TILE`] elements, `x` along rows of C. Block:
/// [`THREADS`] threads, with [`SHARED`] bytes.
#[kernel(max_threads = 128)]
pub unsafe fn step4_mma(a: *const bf16, b: *const bf16, c: *mut bf16, m: u32, n: u32, k: u32) {
    let product = Product {
        a: Matrix { address: a, rows: m, columns: k },
        b: Matrix { address: b, rows: n, columns: k },
        memory: shared::dynamic_shared_mem(),
    };
    let (row, column) = (TILE * thread::block_idx_y(), TILE * thread::block_idx_x());
    let warp = warp::warp_id();
    let part = (warp / 2 * WARP_TILE, warp % 2 * WARP_TILE);
    // A warp's sums are 4 register tiles of 16 rows and 8 x 8 columns.
    // SAFETY: the crate's contract; rows are aligned to 16 bytes, those of a copy.
    let sums = unsafe { product.sums::<16, 4, 8>((row, column), part, thread::sync_threads) };
    for (i, sums) in sums.iter().enumerate() {
        let (row, column) = (row + part.0 + 16 * i as u32, column + part.1);
        sums.for_each_pair(|i, j, pair| {
            let at = (row + i) as usize * n as usize + (column + j) as usize;
            // SAFETY: the launch has matrices of this size, and each thread stores elements of its
            // own.
            unsafe { mem::store(c.wrapping_add(at).cast(), f32_to_bf16x2(pair)) };
        });
    }
}
