//! A computing warpgroup of a main loop.

use crate::track_callers;
use devcomm_types::TensorMap;

use super::{RegTile, SharedTile};
use crate::convert::Half;
use crate::strided::Strided;
use crate::wgmma::{self, Factor, Layout, Sums};
use crate::{thread, tma, warp};

/// Threads of a warpgroup.
pub(super) const WARPGROUP: u32 = 128;

/// A computing warpgroup, whose 128 threads call its methods together. Only
/// [`Mainloop::run`](super::Mainloop::run) makes one.
#[derive(Debug)]
pub struct Warpgroup(pub(super) ());

#[track_callers]
impl Warpgroup {
    /// Returns the warpgroup's number in the block.
    #[must_use]
    pub fn index(&self) -> u32 {
        thread::thread_idx_x() / WARPGROUP
    }

    /// Returns the calling thread's number in the warpgroup.
    #[must_use]
    pub fn thread(&self) -> u32 {
        thread::thread_idx_x() % WARPGROUP
    }

    /// Returns the number of the calling thread's warp in the block.
    #[must_use]
    pub fn warp(&self) -> u32 {
        thread::thread_idx_x() / warp::WARP_SIZE
    }

    /// Waits for all threads of the warpgroup, at the named barrier `index() + 1`.
    pub fn sync(&self) {
        thread::named_barrier_sync(1 + self.index(), WARPGROUP);
    }

    /// Adds the product of a tile of 64 rows of A and the transpose of a tile of B to the sums, or
    /// sets the sums to it. The `wgmma` group is committed and not waited for.
    pub fn multiply<T: Factor, D: Sums, const N: u32>(
        &self,
        sums: &mut D,
        a: SharedTile<T, 64>,
        b: SharedTile<T, N>,
        accumulate: bool,
    ) {
        self.multiply_factors(sums, a.factor(), b.factor(), accumulate);
    }

    /// Does the same as [`multiply`](Self::multiply) with factors that may be
    /// [transposed](SharedTile::transposed_factor). They have the terms of one tile.
    pub fn multiply_factors<T: Factor, A: Layout<T>, B: Layout<T>, D: Sums>(
        &self,
        sums: &mut D,
        a: wgmma::Tile<T, A>,
        b: wgmma::Tile<T, B>,
        accumulate: bool,
    ) {
        // SAFETY: the warpgroup calls this together. The implementation of `Mainloop` promises that
        // the tiles are those of a full stage, and that nothing else accesses the sums until the
        // main loop has waited.
        unsafe {
            order_sums();
            for term in Strided::new(0, SharedTile::<T, 64>::COLUMNS, T::TERMS) {
                let (a, b) = (a.columns_from(term), b.columns_from(term));
                wgmma::multiply(sums, a, b, accumulate || term > 0);
            }
            wgmma::commit_group();
        }
    }

    /// Stores the sums of the warpgroup's rows of a tile, rounded to `T`, to a matrix by TMA,
    /// transposed: columns of `sums` become rows from `row` on, and their 64 rows become columns
    /// from `column` on. Elements outside the matrix are not stored. The sums pass through a tile
    /// of shared memory with the rows of the map's tiles. The first thread commits the store as a
    /// bulk group, which may be pending on return.
    pub fn store_transposed<T: Half, const BLOCKS: usize, const R: u32>(
        &self,
        sums: &RegTile<f32, BLOCKS>,
        through: SharedTile<T, R>,
        map: &TensorMap,
        row: u32,
        column: u32,
    ) {
        const { assert!(R == 8 * BLOCKS as u32, "the tile has a row for each column of the sums") };
        if self.thread() == 0 {
            tma::wait_stores_read::<0>();
        }
        self.sync();
        for block in 0..BLOCKS {
            let rows = through.rows::<8>(8 * block as u32);
            // SAFETY: the warpgroup calls this together, and the tile is its own, as the
            // implementation of `Mainloop` promises. The previous store has read it.
            unsafe { sums.store_transposed(block, rows) };
        }
        tma::fence_async_shared();
        self.sync();
        if self.thread() == 0 {
            // SAFETY: the tile is written, and not written again until the next call has waited.
            // The implementation of `Mainloop` promises that the kernel may write the matrix.
            unsafe { through.store(map, row, column) };
            tma::commit_stores();
        }
    }

    /// Waits until TMA has read the shared memory of all stores that the calling warp's first lane
    /// has begun, so that the memory may be written again.
    pub fn wait_until_read(&self) {
        if warp::lane_id() == 0 {
            tma::wait_stores_read::<0>();
        }
        // SAFETY: the lanes of the warp call it together.
        unsafe { warp::sync() };
    }

    /// Calls `store` in one lane of the warp, which stores by TMA what all lanes have written to
    /// shared memory, and commits these stores as a bulk group.
    pub fn store(&self, store: impl FnOnce()) {
        publish_shared();
        if warp::lane_id() == 0 {
            store();
            tma::commit_stores();
        }
    }
}

/// Orders accesses of the sums before the products that follow. This is a function of its own so
/// that reports distinguish it from the products.
///
/// # Safety
///
/// A warpgroup calls this together.
unsafe fn order_sums() {
    // SAFETY: the caller's threads are a warpgroup that calls this together.
    unsafe { wgmma::fence() };
}

/// Makes what the lanes of a warp have written to shared memory visible to TMA. All lanes call it.
fn publish_shared() {
    tma::fence_async_shared();
    // SAFETY: the lanes of the warp call it together.
    unsafe { warp::sync() };
}
