//! Groups of rows of a product, each with a B of its own, and the order of their tiles.

use super::prelude::*;

/// Parts of the groups, before each of which the rows of tiles are counted: a power of two, for the
/// binary search, and at most the threads of a block, which count one each.
const PARTS: u32 = 128;

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

/// A group of rows of A and C.
#[derive(Clone, Copy)]
pub(super) struct Group {
    /// The first row.
    pub(super) first: u32,
    /// The row after the last one.
    pub(super) end: u32,
    /// The first row of the group's B.
    pub(super) b_row: u32,
}

impl Group {
    pub(super) const ALL: Self = Self { first: 0, end: u32::MAX, b_row: 0 };
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
        let thread = thread::thread_idx_x();
        let warps = thread::block_dim_x() / warp::WARP_SIZE;
        let sums = shared_array![u32; WARPS];
        // SAFETY: the caller has all threads here; shared memory has a word per warp and part.
        unsafe {
            let own = this.rows_of_part(thread);
            let sum = warp_prefix_sum(own);
            if warp::lane_id() == warp::WARP_SIZE - 1 {
                mem::store(sums.wrapping_add(warp::warp_id() as usize), sum);
            }
            thread::sync_threads();
            let (mut before, mut all) = (sum - own, 0);
            for warp in 0..warps {
                let of_warp = mem::load(sums.wrapping_add(warp as usize));
                before += if warp < warp::warp_id() { of_warp } else { 0 };
                all += of_warp;
            }
            if thread < PARTS {
                mem::store(Self::before().wrapping_add(thread as usize), before);
            }
            thread::sync_threads();
            Self { rows: all, ..this }
        }
    }

    /// Returns the array in shared memory of the rows of tiles before each part of the groups.
    fn before() -> *mut u32 {
        shared_array![u32; PARTS as usize]
    }

    /// Returns the number of groups of a part.
    fn part_len(&self) -> u32 {
        self.groups.count.div_ceil(PARTS)
    }

    /// Returns how many rows of tiles a part has: none after the last part. The conditions are
    /// those of [`new`](Self::new).
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

    /// Returns the group of a tile, and its row among those of the group and its column, in tiles.
    /// The number is below that of all tiles. The conditions are those of [`new`](Self::new), but
    /// any threads may call it.
    pub(super) unsafe fn position(&self, number: u32) -> (Group, (u32, u32)) {
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
                    let position = order.position(number - before * self.columns);
                    return (Group { first, end, b_row: group * self.n }, position);
                }
                before += rows;
                group += 1;
            }
        }
    }
}
