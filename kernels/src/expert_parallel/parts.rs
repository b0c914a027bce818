//! The division of rows among the warps of a grid.

use super::prelude::*;

/// Vectors of a part that each lane has, where there are many tokens: of a row that is copied, of
/// one that becomes 8-bit floats (a vector is made from two), and of a sum.
pub(super) const VECTORS: usize = 4;
pub(super) const F8_VECTORS: usize = VECTORS / 2;
pub(super) const SUMMED: usize = 2;

/// Rows in parts of [`WARP_SIZE`](warp::WARP_SIZE) `* V` vectors, `V` for each lane; a warp has a
/// part at a time.
#[derive(Clone, Copy)]
pub(super) struct Parts<const V: usize> {
    vectors: u32, // Of a row.
    per_row: u32, // Parts of a row.
}

/// A warp's share of the parts that a round receives: from each other rank as many as the grid has
/// warps, which divide the ranks first, so that none waits for many ranks if there are few parts.
#[derive(Clone, Copy)]
pub(super) struct Share {
    /// The distance of the warp's first rank, and the step from one rank to the next.
    pub(super) distance: usize,
    pub(super) distance_step: usize,
    /// The warp's first part of a round, and the step from one part to the next.
    pub(super) part: u32,
    pub(super) part_step: u32,
}

impl Share {
    /// Returns the share of warp `warp` of `warps`, among `ranks` ranks.
    pub(super) fn new(warp: u32, warps: u32, ranks: usize) -> Self {
        let distance_step = (ranks as u32 - 1).min(warps).max(1); // 1 for a single rank.
        let part_step = warps / distance_step;
        // The last warps may have no part, but not if all warps have the same rank.
        let has_part = distance_step == 1 || warp < part_step * distance_step;
        let distance = if has_part { 1 + warp % distance_step } else { ranks as u32 };
        Self {
            distance: distance as usize,
            distance_step: distance_step as usize,
            part: warp / distance_step,
            part_step,
        }
    }
}

/// This lane's vectors of a part.
#[derive(Clone, Copy)]
pub(super) struct Part<const V: usize> {
    /// The index of the row.
    pub(super) row: u32,
    /// Whether it is the row's first part.
    pub(super) is_first: bool,
    /// The index in the row of this lane's first vector, and the number of vectors of the row.
    first: u32,
    end: u32,
}

impl<const V: usize> Parts<V> {
    /// Divides rows of `vectors` vectors.
    pub(super) fn new(vectors: u32) -> Self {
        Self { vectors, per_row: vectors.div_ceil(warp::WARP_SIZE * V as u32) }
    }

    pub(super) fn count(self, rows: u32) -> u32 {
        rows * self.per_row
    }

    /// Returns the parts of `rows` rows, from row `first` on, that this warp of its block has.
    pub(super) fn of_block(self, first: u32, rows: u32) -> impl Iterator<Item = Part<V>> {
        let (mine, end) = (self.count(first) + warp::warp_id(), self.count(first + rows));
        Strided::new(mine, end, block_warps()).map(move |index| self.at(index))
    }

    /// Returns the parts of `rows` rows that this warp of the grid has.
    pub(super) fn of_grid(self, rows: u32) -> impl Iterator<Item = Part<V>> {
        Strided::new(warp_index(), self.count(rows), warps()).map(move |index| self.at(index))
    }

    pub(super) fn at(self, index: u32) -> Part<V> {
        let (row, part) = (index / self.per_row, index % self.per_row);
        let first = part * warp::WARP_SIZE * V as u32 + warp::lane_id();
        Part { row, is_first: part == 0, first, end: self.vectors }
    }
}

#[track_callers]
impl<const V: usize> Part<V> {
    /// Returns the index among the vectors of all rows of vector `i` of this lane, if there is one
    /// and this is a part of row `row`.
    pub(super) fn vector_of(self, row: usize, i: usize) -> Option<usize> {
        let at = self.first + i as u32 * warp::WARP_SIZE;
        (at < self.end).then(|| row * self.end as usize + at as usize)
    }

    /// Returns the slot of vector `i` of this lane, which is the vector's index, if there is one.
    pub(super) fn slot(self, i: usize) -> Option<u32> {
        self.vector_of(self.row as usize, i).map(|at| at as u32)
    }

    /// Returns the index of this lane's vector of scales among those of all rows, if this is a part
    /// of row `row`: lane `i` has the scales of the vectors `i` of all lanes.
    pub(super) fn scales_of(self, row: usize) -> Option<usize> {
        let lane = warp::lane_id();
        let at = (self.first - lane) / warp::WARP_SIZE + lane;
        let per_row = self.end.div_ceil(warp::WARP_SIZE);
        let is_mine = lane < V as u32 && at < per_row;
        is_mine.then(|| row * per_row as usize + at as usize)
    }

    /// Loads this part of row `row`, which nothing else accesses; vectors after its end are 0.
    pub(super) unsafe fn load<T: Element>(self, rows: *const T, row: usize) -> [Vec16<T>; V] {
        let mut vectors = [Vec16::from_bits([0; 4]); V];
        for i in 0..V {
            if let Some(at) = self.vector_of(row, i) {
                let from = rows.wrapping_add(Vec16::<T>::LANES * at);
                // SAFETY: the row is allocated, as the caller guarantees, and has the vector.
                vectors[i] = unsafe { mem::load_vec_once(from) };
            }
        }
        vectors
    }

    /// Stores this part of row `row`, which nothing else accesses.
    pub(super) unsafe fn store<T: Element>(
        self,
        rows: *mut T,
        row: usize,
        vectors: &[Vec16<T>; V],
    ) {
        for i in 0..V {
            if let Some(at) = self.vector_of(row, i) {
                // SAFETY: the row is allocated, as the caller guarantees, and has the vector.
                unsafe { mem::store_vec(rows.wrapping_add(Vec16::<T>::LANES * at), vectors[i]) };
            }
        }
    }
}

/// Returns the index of this warp in its grid. Neighbouring warps are in different blocks, so that
/// few parts are spread over many multiprocessors.
pub(super) fn warp_index() -> u32 {
    thread::thread_idx_x() / warp::WARP_SIZE * thread::grid_dim_x() + thread::block_idx_x()
}

pub(super) fn block_warps() -> u32 {
    thread::block_dim_x() / warp::WARP_SIZE
}

/// Returns the number of warps of the grid.
pub(super) fn warps() -> u32 {
    block_warps() * thread::grid_dim_x()
}
