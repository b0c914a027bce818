//! A plain kernel, which stands for those that a model runs between two operations.

use cuda_std::prelude::*;
use cuda_std::strided::Strided;

/// Adds 1 to each of `len` elements. It uses no programmatic dependent launch: it neither waits for
/// an earlier kernel nor lets a later one start before its end.
///
/// Grid: any, one-dimensional. Block: any, one-dimensional.
///
/// # Safety
///
/// `data` has `len` elements, and nothing else accesses them until the kernel has ended.
#[kernel]
pub unsafe fn plain(data: *mut u32, len: usize) {
    let step = thread::grid_dim_x() as usize * thread::block_dim_x() as usize;
    let first = thread::block_idx_x() as usize * thread::block_dim_x() as usize;
    for i in Strided::new(first + thread::thread_idx_x() as usize, len, step) {
        // SAFETY: the caller's `data` has `len` elements; one thread accesses an element.
        unsafe { *data.add(i) = (*data.add(i)).wrapping_add(1) };
    }
}
