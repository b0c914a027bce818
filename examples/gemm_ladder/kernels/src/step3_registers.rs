//! Step 3: each thread keeps 8 x 8 sums in registers, and loads 16 bytes at once.

use cuda_std::convert::{bf16_to_f32, f32_to_bf16x2};
use cuda_std::prelude::*;

/// Rows and columns of C of a block.
pub const TILE: u32 = 128;
const SIZE: usize = TILE as usize;
/// Terms of a tile in shared memory.
const TERMS: usize = 16;
/// Threads per block: 16 x 16, with 8 x 8 elements of C each.
pub const THREADS: u32 = 256;

/// Computes `C = A x B^T`.
///
/// Grid: a block for each tile of [`TILE`] x [`TILE`] elements, `x` along rows of C. Block:
/// [`THREADS`] threads.
#[kernel(max_threads = 256)]
pub unsafe fn step3_registers(a: *const bf16, b: *const bf16, c: *mut bf16, n: u32, k: u32) {
    let (n, k) = (n as usize, k as usize);
    // The tiles are stored term by term, since a thread reads neighbouring rows of a term.
    let tile_a = shared_array![f32; TERMS * SIZE];
    let tile_b = shared_array![f32; TERMS * SIZE];
    let thread = thread::thread_idx_x() as usize;
    let (row, column) =
        (SIZE * thread::block_idx_y() as usize, SIZE * thread::block_idx_x() as usize);
    // This thread copies eight terms of a row of each factor.
    let (copied, from) = (thread % SIZE, 8 * (thread / SIZE));
    // It sums four rows from `y` on and four from `y + 64` on, and columns in the same way. With
    // eight neighbouring columns, a load of neighbouring threads would use half of the banks.
    let (y, x) = (thread / 16 * 4, thread % 16 * 4);
    // SAFETY: the crate's contract; a barrier lies between the writes of a tile and the reads.
    unsafe {
        let (a, b) = (a.add((row + copied) * k + from), b.add((column + copied) * k + from));
        let (to_a, to_b) = (tile_a.add(from * SIZE + copied), tile_b.add(from * SIZE + copied));
        let mut sums = [[0.0; 8]; 8];
        let mut first = 0;
        while first < k {
            transpose(to_a, mem::load_vec(a.add(first)));
            transpose(to_b, mem::load_vec(b.add(first)));
            thread::sync_threads();
            let mut term = 0;
            while term < TERMS {
                let left = load_eight(tile_a.add(term * SIZE + y));
                let right = load_eight(tile_b.add(term * SIZE + x));
                let mut i = 0;
                while i < 64 {
                    let sum = &mut sums[i / 8][i % 8];
                    *sum = left[i / 8].mul_add(right[i % 8], *sum);
                    i += 1;
                }
                term += 1;
            }
            thread::sync_threads();
            first += TERMS;
        }
        let mut i = 0;
        while i < 8 {
            let to = c.add((row + y + i % 4 + i / 4 * 64) * n + column + x);
            let [p, q, r, s, ..] = sums[i];
            mem::store(to.cast(), round_four([p, q, r, s]));
            let [.., p, q, r, s] = sums[i];
            mem::store(to.add(64).cast(), round_four([p, q, r, s]));
            i += 1;
        }
    }
}

/// Stores eight terms of a row, each `SIZE` numbers after the previous one.
unsafe fn transpose(to: *mut f32, terms: Vec16<bf16>) {
    let mut i = 0;
    while i < 8 {
        // SAFETY: the tile has the element, and only this thread writes it.
        unsafe { mem::store(to.add(i * SIZE), bf16_to_f32(terms.lane(i))) };
        i += 1;
    }
}

/// Loads four numbers at `from`, and four that begin 64 numbers later, half of the tile.
unsafe fn load_eight(from: *const f32) -> [f32; 8] {
    // SAFETY: the tile has the elements.
    let (low, high) = unsafe { (mem::load_vec(from), mem::load_vec(from.add(64))) };
    let [low, high] = [low, high].map(|four: Vec16<f32>| four.to_bits().map(f32::from_bits));
    [low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]]
}

/// Rounds four numbers to bf16.
fn round_four([p, q, r, s]: [f32; 4]) -> u64 {
    u64::from(f32_to_bf16x2([p, q])) | u64::from(f32_to_bf16x2([r, s])) << 32
}
