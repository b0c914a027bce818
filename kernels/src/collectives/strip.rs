//! Vectors of 16 bytes divided among warps in strips: a row of them is a vector for each lane.

use cuda_std::warp;

/// Vectors of a row.
pub(super) const ROW: usize = warp::WARP_SIZE as usize;

/// The first vector of this thread's in its warp's first strip of `ROWS` rows. The others are
/// [`ROW`] apart, so their addresses differ by constants, which take no registers. The next strip
/// begins `ROWS` vectors for each thread further.
pub(super) fn first<const ROWS: usize>(thread: u32) -> usize {
    let (strip, lane) = (thread / warp::WARP_SIZE, thread % warp::WARP_SIZE);
    strip as usize * ROWS * ROW + lane as usize
}
