//! The stores of [`gemm_swapped`](super::gemm_swapped): the epilogue is applied to groups of eight
//! rows, which a [`Target`] stores.

use cuda_std::wgmma::Factor;

use super::prelude::*;
use super::shapes::{STORE_EIGHTS, STORE_M, Shape};
use super::swapped_tiles::Block;

/// The named barrier of the first warpgroup.
pub(super) const WARPGROUP_BARRIER: u32 = 1;

type Eight<O> = SharedTile<O, STORE_M>;

/// The destination of the sums of a tile.
pub(super) trait Target: Copy {
    /// Prefetches what a store needs.
    fn prefetch(self);

    /// Applies the epilogue to groups of eight rows, and stores them. C is as the kernel needs it,
    /// and a whole warpgroup calls this.
    unsafe fn store<T: Factor, S: Shape, E: Epilogue<Output: Half>, P: Epilogue<Output: Half>>(
        self,
        block: &Block<T, S, E>,
        groups: Groups<S>,
        epilogue: P,
    );
}

/// Rows of C, which TMA stores.
impl Target for &TensorMap {
    fn prefetch(self) {
        tma::prefetch_map(self);
    }

    unsafe fn store<T: Factor, S: Shape, E: Epilogue<Output: Half>, P: Epilogue<Output: Half>>(
        self,
        block: &Block<T, S, E>,
        Groups { first, count, origin: (row, column), mut part }: Groups<S>,
        epilogue: P,
    ) {
        let thread = thread::thread_idx_x();
        let (warpgroup, warp, lane) = (thread / 128, thread / warp::WARP_SIZE % 4, warp::lane_id());
        let buffer = 2 * warpgroup + first / STORE_EIGHTS % 2;
        let place = |eight: u32| -> Eight<P::Output> {
            let index = buffer * STORE_EIGHTS + eight;
            block.memory.tile(block.division.stages * S::STAGE + index * Eight::<P::Output>::BYTES)
        };
        epilogue.apply(&mut part);
        // SAFETY: the caller is a whole warpgroup, and guarantees C. The buffer is written after
        // its previous stores have read it, and read after it is written. The previous tile's last
        // part may be in this buffer, the previous part of this tile is in the other one.
        unsafe {
            if lane == 0 && first == 0 {
                tma::wait_stores_read::<0>();
            } else if lane == 0 {
                tma::wait_stores_read::<1>();
            }
            thread::named_barrier_sync(WARPGROUP_BARRIER + warpgroup, 128);
            for eight in 0..STORE_EIGHTS {
                if first + eight < count {
                    place(eight).store_transposed(warp, lane, four(&part.sums, eight));
                }
            }
            tma::fence_async_shared();
            thread::named_barrier_sync(WARPGROUP_BARRIER + warpgroup, 128);
            // Each warp stores one group.
            if lane == 0 {
                if first + warp < count {
                    place(warp).store(self, row + 8 * (first + warp), column);
                }
                tma::commit_stores();
            }
        }
    }
}

/// Returns a thread's four sums of a group of eight rows.
pub(super) fn four(sums: &[f32], eight: u32) -> [f32; 4] {
    let first = 4 * eight as usize;
    [sums[first], sums[first + 1], sums[first + 2], sums[first + 3]]
}

/// A thread's sums that are stored together.
pub(super) type Sums = [f32; 4 * STORE_EIGHTS as usize];

/// Up to [`STORE_EIGHTS`] of the `count` groups of eight rows of a tile, from the `first` on.
pub(super) struct Groups<S> {
    pub(super) first: u32,
    pub(super) count: u32,
    /// The row and the column at which group 0 begins.
    pub(super) origin: (u32, u32),
    /// A thread's sums of these groups.
    pub(super) part: Part<S>,
}

/// A thread's part of a warpgroup's sums, in an array `A`, from `row` and `column` on: by default
/// the sums that are stored together. Rows from `end.0` on are not stored.
pub(super) struct Part<S, A = Sums> {
    pub(super) sums: A,
    row: u32,
    pub(super) column: u32,
    pub(super) end: (u32, u32),
    shape: PhantomData<S>,
}

impl<S, A> Part<S, A> {
    /// Returns this thread's part of the sums of its warpgroup, from the `first` group of eight
    /// rows on. Group 0 begins at this row and column of C.
    pub(super) fn of_thread(
        sums: A,
        first: u32,
        (row, column): (u32, u32),
        end: (u32, u32),
    ) -> Self {
        let (warp, lane) = (thread::thread_idx_x() / warp::WARP_SIZE % 4, warp::lane_id());
        let (row, column) = (row + 8 * first + lane % 4 * 2, column + 16 * warp + lane / 4);
        Self { sums, row, column, end, shape: PhantomData }
    }
}

impl<S: Shape, A: AsMut<[f32]>> Fragment for Part<S, A> {
    /// Two of each eight rows, for which a thread has four sums: as many as `A` has room for, or as
    /// a shorter tile has.
    const ROWS: u32 = {
        let rows = (size_of::<A>() / (2 * size_of::<f32>())) as u32;
        if S::M / 4 < rows { S::M / 4 } else { rows }
    };
    const COLUMNS: u32 = 2;
    const PAIRS: bool = false;

    fn row(&self, i: u32) -> u32 {
        self.row + 8 * (i / 2) + i % 2
    }

    fn column(&self, j: u32) -> u32 {
        self.column + 8 * j
    }

    fn end(&self) -> (u32, u32) {
        self.end
    }

    fn sum(&mut self, i: u32, j: u32) -> &mut f32 {
        &mut self.sums.as_mut()[(4 * (i / 2) + 2 * j + i % 2) as usize]
    }
}
