//! Weighted sums of rows of experts: what a program computes whose ranks exchange results by
//! collectives, before it sends or after it receives.

use cuda_std::prelude::*;
use cuda_std::strided::Strided;
use cuda_std::vector::{Accumulate, Vec16};
use cuda_std::{math, mem};
use half::bf16;

/// The index of no row.
pub const NO_ROW: u32 = u32::MAX;
/// Terms whose rows a thread loads together.
const TOGETHER: usize = 8;

/// Computes weighted sums of rows: row `r` of `sums` becomes the sum of its `terms` terms, each the
/// index of one of `rows` and the bits of a weight, in f32 and rounded once. Terms with [`NO_ROW`]
/// are left out.
///
/// Grid: a block for each row of `sums`, one-dimensional. Block: any, one-dimensional. Dependent
/// launch: allowed. A row has `vectors` vectors of eight elements.
///
/// # Safety
///
/// Both arrays have the rows, aligned to 16 bytes, and `table` has the terms of a sum for each
/// block. Nothing else accesses them until the kernel has ended.
#[kernel(max_threads = 1024)]
pub unsafe fn sum_rows(
    rows: *const bf16,
    sums: *mut bf16,
    table: *const [u32; 2],
    terms: u32,
    vectors: u32,
) {
    let row = thread::block_idx_x();
    grid::launch_next();
    grid::wait_for_previous();
    for at in Strided::new(thread::thread_idx_x(), vectors, thread::block_dim_x()) {
        let vector = |row: u32| 8 * (row as usize * vectors as usize + at as usize);
        let mut sum = [0.0; 8];
        for first in Strided::new(0, terms, TOGETHER as u32) {
            let mut loaded = [Vec16::<bf16>::from_bits([0; 4]); TOGETHER];
            let mut weights = [0.0; TOGETHER];
            for i in 0..TOGETHER {
                let term = (row * terms + first) as usize + i;
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
        unsafe { mem::store_vec(sums.wrapping_add(vector(row)), bf16::narrow(sum)) };
    }
}
