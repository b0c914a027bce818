//! Step 1: each thread computes an element of C, in a loop over its terms.

use cuda_std::convert::{bf16_to_f32, f32_to_bf16};
use cuda_std::prelude::*;

/// Rows and columns of C of a block.
pub const TILE: u32 = 16;

/// Computes `C = A x B^T`.
///
/// Grid: a block for each tile of [`TILE`] x [`TILE`] elements, `x` along rows of C. Block:
/// [`TILE`] x [`TILE`] threads.
#[kernel(max_threads = 256)]
pub unsafe fn step1_loop(a: *const bf16, b: *const bf16, c: *mut bf16, n: u32, k: u32) {
    let (n, k) = (n as usize, k as usize);
    let index = thread::index_2d();
    let (row, column) = (index.y as usize, index.x as usize);
    // SAFETY: the launch has matrices of this size, and each thread stores elements of its own.
    unsafe {
        let (a, b) = (a.add(row * k), b.add(column * k));
        let (mut sum, mut term) = (0.0, 0);
        while term < k {
            let (left, right) = (mem::load(a.add(term)), mem::load(b.add(term)));
            sum = bf16_to_f32(left).mul_add(bf16_to_f32(right), sum);
            term += 1;
        }
        mem::store(c.add(row * n + column), f32_to_bf16(sum));
    }
}
