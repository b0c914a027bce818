//! Weighted sums of experts' rows. A program that exchanges results by collectives computes them
//! before it sends, or after it receives.

use cuda_std::prelude::*;
use cuda_std::strided::Strided;
use cuda_std::vector::{Accumulate, Vec16};
use cuda_std::{math, mem};
use half::bf16;

/// The index of no row.
pub const NO_ROW: u32 = u32::MAX;
/// Terms whose rows a thread loads together.
const TOGETHER: usize = 8;

/// Computes weighted sums of rows, in f32 and rounded once: block `i` stores row `targets[i]` of
/// `sums`. `table` has `terms` pairs for each block: the index of a row of `rows`, and the bits of
/// its weight. Pairs with [`NO_ROW`] are left out.
///
/// Grid: a block for each sum, one-dimensional. Block: any, one-dimensional. Dependent launch:
/// allowed. A row has `vectors` vectors of eight elements.
///
/// # Safety
///
/// `rows` and `sums` have the rows that `table` and `targets` name, aligned to 16 bytes; targets
/// differ. No other kernel accesses the arrays, but those before a dependent launch.
#[kernel(max_threads = 1024)]
pub unsafe fn sum_rows(
    rows: *const bf16,
    sums: *mut bf16,
    targets: *const u32,
    table: *const [u32; 2],
    terms: u32,
    vectors: u32,
) {
    let block = thread::block_idx_x();
    grid::launch_next();
    grid::wait_for_previous();
    // SAFETY: the caller guarantees a target for each block.
    let target = unsafe { mem::load(targets.wrapping_add(block as usize)) };
    for at in Strided::new(thread::thread_idx_x(), vectors, thread::block_dim_x()) {
        let vector = |row: u32| 8 * (row as usize * vectors as usize + at as usize);
        let mut sum = [0.0; 8];
        for first in Strided::new(0, terms, TOGETHER as u32) {
            let mut loaded = [Vec16::<bf16>::from_bits([0; 4]); TOGETHER];
            let mut weights = [0.0; TOGETHER];
            for i in 0..TOGETHER {
                let term = (block * terms + first) as usize + i;
                // SAFETY: the caller guarantees the arrays.
                unsafe {
                    if first + (i as u32) < terms {
                        let [from, weight] = mem::load(table.wrapping_add(term));
                        if from != NO_ROW {
                            weights[i] = f32::from_bits(weight);
                            loaded[i] = mem::load_vec(rows.wrapping_add(vector(from)));
                        }
                    }
                }
            }
            for i in 0..TOGETHER {
                let wide = bf16::widen(loaded[i]);
                for lane in 0..8 {
                    sum[lane] = math::fma(weights[i], wide[lane], sum[lane]);
                }
            }
        }
        // SAFETY: the caller guarantees the sums; one thread stores a vector.
        unsafe { mem::store_vec(sums.wrapping_add(vector(target)), bf16::narrow(sum)) };
    }
}
