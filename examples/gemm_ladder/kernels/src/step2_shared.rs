//! Step 2: a block copies tiles of A and B to shared memory, which all its threads read.

use cuda_std::convert::{bf16_to_f32, f32_to_bf16};
use cuda_std::prelude::*;

/// Rows and columns of C of a block, and terms of a tile.
pub const TILE: u32 = 32;
const SIZE: usize = TILE as usize;
/// Words of a row of B's tile. A warp reads the same term of 32 rows at once: with 33 words per row
/// the 32 terms lie in different banks.
const B_ROW: usize = SIZE + 1;

/// Computes `C = A x B^T`.
///
/// Grid: a block for each tile of [`TILE`] x [`TILE`] elements, `x` along rows of C. Block:
/// [`TILE`] x [`TILE`] threads.
#[kernel(max_threads = 1024)]
pub unsafe fn step2_shared(a: *const bf16, b: *const bf16, c: *mut bf16, n: u32, k: u32) {
    let (n, k) = (n as usize, k as usize);
    let tile_a = shared_array![f32; SIZE * SIZE];
    let tile_b = shared_array![f32; SIZE * B_ROW];
    let (x, y) = (thread::thread_idx_x() as usize, thread::thread_idx_y() as usize);
    let (row, column) =
        (SIZE * thread::block_idx_y() as usize, SIZE * thread::block_idx_x() as usize);
    // SAFETY: the crate's contract; a barrier lies between the writes of a tile and the reads.
    unsafe {
        let (a, b) = (a.add((row + y) * k + x), b.add((column + y) * k + x));
        let (mut sum, mut first) = (0.0, 0);
        while first < k {
            mem::store(tile_a.add(y * SIZE + x), bf16_to_f32(mem::load(a.add(first))));
            mem::store(tile_b.add(y * B_ROW + x), bf16_to_f32(mem::load(b.add(first))));
            thread::sync_threads();
            let mut term = 0;
            while term < SIZE {
                let left = mem::load(tile_a.add(y * SIZE + term));
                let right = mem::load(tile_b.add(x * B_ROW + term));
                sum = left.mul_add(right, sum);
                term += 1;
            }
            thread::sync_threads();
            first += SIZE;
        }
        mem::store(c.add((row + y) * n + column + x), f32_to_bf16(sum));
    }
}
