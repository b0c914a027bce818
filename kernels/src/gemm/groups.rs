//! Groups of rows of a product, each with a B of its own, and the order of their tiles.

use super::prelude::*;

/// Parts of the groups, before each of which the rows of tiles are counted: a power of two, for the
/// binary search. Shared memory has room for this number and the pipeline of `gemm_grouped`.
const PARTS: u32 = 256;

/// The most warps of a block.
const WARPS: usize = 12;

/// The rows of A and C in groups, as [`ep_layout`](crate::ep_layout()) leaves them.
#[repr(C)]
#[derive(Clone, Copy, KernelParam)]
pub struct Groups {
    /// The number of groups.
    pub count: u32,
    /// The first row of each group.
    pub offsets: *const u32,
    /// The number of rows of each group.
    pub sizes: *const u32,
}

impl Groups {
    /// Returns the first row of a group, and the end of its rows, at most `m`. The group is below
    /// the count, and nothing writes the offsets and sizes.
    unsafe fn rows(&self, group: u32, m: u32) -> (u32, u32) {
        // SAFETY: the caller passes a group below the count, and nothing writes the arrays.
        let (first, size) = unsafe {
            let first = mem::load(self.offsets.wrapping_add(group as usize));
            (first.min(m), mem::load(self.sizes.wrapping_add(group as usize)))
        };
        (first, first + size.min(m - first))
    }
}

/// The tiles of groups, one group after the other. The tiles of a group are in the order of
/// [`TileOrder<GROUP>`].
#[derive(Clone, Copy)]
pub(super) struct GroupTiles<const GROUP: u32> {
    groups: Groups,
    /// Rows of a tile.
    height: u32,
    /// Rows of A and C, and columns of C.
    m: u32,
    n: u32,
    /// Rows and columns of tiles.
    pub(super) rows: u32,
    pub(super) columns: u32,
}

impl<const GROUP: u32> GroupTiles<GROUP> {
    /// Counts the tiles of `height` rows of groups of `m` rows of A and C, where C has `n` columns,
    /// in `columns` columns of tiles. Groups end at row `m` at the latest. There is a group, its
    /// arrays have elements for each, and nothing writes them any more. The whole block calls this,
    /// once.
    pub(super) unsafe fn new(groups: Groups, height: u32, [m, n]: [u32; 2], columns: u32) -> Self {
        let this = Self { groups, height, m, n, rows: 0, columns };
        // SAFETY: the caller has all threads of the block here, with arrays that nothing writes.
        Self { rows: unsafe { this.count_rows() }, ..this }
    }

    /// Returns the array in shared memory of the rows of tiles before each part of the groups.
    fn before() -> *mut u32 {
        shared_array![u32; PARTS as usize]
    }

    /// Returns the number of groups of a part.
    fn part_len(&self) -> u32 {
        self.groups.count.div_ceil(PARTS)
    }

    /// Counts the rows of tiles before each part, and returns the number of all. The conditions are
    /// those of [`new`](Self::new).
    unsafe fn count_rows(&self) -> u32 {
        let thread = thread::thread_idx_x();
        let warps = thread::block_dim_x() / warp::WARP_SIZE;
        let sums = shared_array![u32; WARPS];
        let before = Self::before();
        let parts = PARTS.div_ceil(thread::block_dim_x());
        // SAFETY: the caller has all threads here; shared memory has a word per warp and part.
        unsafe {
            // Ranges of parts would be unrolled.
            let mut own = 0;
            for part in Strided::new(0, parts, 1) {
                own += self.rows_of_part(thread * parts + part);
            }
            let sum = warp_prefix_sum(own);
            if warp::lane_id() == warp::WARP_SIZE - 1 {
                mem::store(sums.wrapping_add(warp::warp_id() as usize), sum);
            }
            thread::sync_threads();
            let (mut at, mut all) = (sum - own, 0);
            for warp in 0..warps {
                let of_warp = mem::load(sums.wrapping_add(warp as usize));
                at += if warp < warp::warp_id() { of_warp } else { 0 };
                all += of_warp;
            }
            for part in Strided::new(0, parts, 1) {
                let index = thread * parts + part;
                if index < PARTS {
                    mem::store(before.wrapping_add(index as usize), at);
                }
                at += self.rows_of_part(index);
            }
            thread::sync_threads();
            all
        }
    }

    /// Returns how many rows of tiles a part has, under the conditions of [`new`](Self::new).
    unsafe fn rows_of_part(&self, part: u32) -> u32 {
        let (mut rows, begin) = (0, part * self.part_len());
        let end = (begin + self.part_len()).min(self.groups.count);
        for group in Strided::new(begin, end, 1) {
            // SAFETY: the group is below the count, and the caller lets nothing write the arrays.
            let (first, end) = unsafe { self.groups.rows(group, self.m) };
            rows += (end - first).div_ceil(self.height);
        }
        rows
    }

    /// Returns the position of a tile, whose number is below the product of the rows and columns.
    /// The conditions are those of [`new`](Self::new), but any threads may call it.
    pub(super) unsafe fn position(&self, number: u32) -> Position {
        let row = number / self.columns.max(1); // `max` spares the check of the division.
        // The last part with no more rows before it: only empty parts or later rows come after it.
        let (mut part, mut distance) = (0, PARTS / 2);
        // SAFETY: nothing writes the arrays, as the caller guarantees; part and group exist.
        unsafe {
            while distance > 0 {
                let before = Self::before().wrapping_add((part + distance) as usize);
                part += if mem::load(before) <= row { distance } else { 0 };
                distance /= 2;
            }
            let mut before = mem::load(Self::before().wrapping_add(part as usize));
            let mut group = part * self.part_len();
            loop {
                let (first, end) = self.groups.rows(group, self.m);
                let rows = (end - first).div_ceil(self.height);
                if row - before < rows {
                    let order = TileOrder::<GROUP> { rows, columns: self.columns };
                    let (row, column) = order.position(number - before * self.columns);
                    let group = Group { first, end, b_row: group * self.n };
                    return Position { row, column, group };
                }
                before += rows;
                group += 1;
            }
        }
    }
}
