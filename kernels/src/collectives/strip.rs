//! The division of vectors among whole warps: a warp takes strips of rows, which have a vector per
//! lane.

use crate::prelude::*;

/// Vectors of a row.
pub(super) const ROW: usize = warp::WARP_SIZE as usize;

/// Returns this thread's first vector in its warp's first strip of `ROWS` rows. Its vectors of a
/// strip are [`ROW`] apart, so their addresses differ by constants, which take no registers. The
/// warp's next strip begins `ROWS` times the number of threads further.
pub(super) fn first<const ROWS: usize>(thread: u32) -> usize {
    let (strip, lane) = (thread / warp::WARP_SIZE, thread % warp::WARP_SIZE);
    strip as usize * ROWS * ROW + lane as usize
}

/// Returns this thread's first vector in each strip of its warp, where the grid divides `vectors`.
pub(super) fn of_grid<const ROWS: usize>(vectors: usize) -> Strided<usize> {
    let threads = (thread::grid_dim_x() * thread::block_dim_x()) as usize;
    Strided::new(first::<ROWS>(thread::index_1d()), vectors, ROWS * threads)
}
