//! The rows of tokens: their parts, which the warps of a grid divide among them, and their formats
//! in transit, which are 16-bit floats without conversion, or 8-bit floats with scales.

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

    /// Loads what this part of row `row` is made from in transit.
    pub(super) unsafe fn load_input<R: Rows>(self, input: *const bf16, row: u32) -> [Loaded; V] {
        let mut loaded = [[Vec16::from_bits([0; 4]); 2]; V];
        for i in 0..V {
            if let Some(at) = self.vector_of(row as usize, i) {
                // SAFETY: the input has the vectors, as the caller guarantees.
                unsafe {
                    if R::HAS_SCALES {
                        let from = input.wrapping_add(16 * at);
                        loaded[i] = [mem::load_vec(from), mem::load_vec(from.wrapping_add(8))];
                    } else {
                        loaded[i][0] = mem::load_vec(input.wrapping_add(8 * at));
                    }
                }
            }
        }
        loaded
    }

    /// Stores this part of row `row`, with scales if rows have any. Only this warp has the part.
    pub(super) unsafe fn store_payload<R: Rows>(
        self,
        [rows, scales]: [*mut u32; 2],
        row: usize,
        payload: &Payload<V>,
    ) {
        // SAFETY: only this warp has the part, as the caller guarantees.
        unsafe {
            self.store(rows, row, &payload.row);
            if let (true, Some(at)) = (R::HAS_SCALES, self.scales_of(row)) {
                mem::store_vec(scales.wrapping_add(4 * at), payload.scales);
            }
        }
    }
}

/// Elements that share a scale, as neighbouring vectors of 8-bit floats of `SCALED_LANES` lanes.
pub const SCALED: usize = 128;

/// Lanes whose vectors share a scale.
const SCALED_LANES: u32 = 8;

/// The elements of rows in transit: [`bf16`] without conversion, or [`F8E4M3`] with scales.
pub trait Rows: Element {
    /// Whether a scale goes with each [`SCALED`] elements.
    const HAS_SCALES: bool;
}

impl Rows for bf16 {
    const HAS_SCALES: bool = false;
}

impl Rows for F8E4M3 {
    const HAS_SCALES: bool = true;
}

/// The vectors of the input from which one in transit is made: the second one only with scales.
pub(super) type Loaded = [Vec16<bf16>; 2];

/// Returns a vector of 8-bit floats, and the bits of its scale, which [`SCALED`] elements share;
/// NaN does not count for it. A whole warp calls this, with successive vectors of a row, from a
/// multiple of 32 on.
unsafe fn scaled(loaded: Loaded) -> (Vec16<u32>, u32) {
    let [low, high] = loaded.map(bf16::widen);
    let mut largest = 0_f32;
    for i in 0..8 {
        largest = largest.max(low[i].abs()).max(high[i].abs());
    }
    // SAFETY: all lanes of the warp call this together, as the caller guarantees.
    let largest = unsafe { segment_reduce::<SCALED_LANES, _>(largest, f32::max) };
    let scale = Scale::of(largest);
    let inverse = scale.inverse();
    let mut wide = [0.0; 16];
    for i in 0..8 {
        (wide[i], wide[8 + i]) = (low[i] * inverse, high[i] * inverse);
    }
    (Vec16::from_bits(F8E4M3::narrow(wide).to_bits()), scale.to_bits())
}

/// A lane's vectors of a part of a row in transit, and its vector of scales, if there are any.
#[derive(Clone, Copy)]
pub(super) struct Payload<const V: usize> {
    pub(super) row: [Vec16<u32>; V],
    pub(super) scales: Vec16<u32>,
}

impl<const V: usize> Payload<V> {
    pub(super) const ZERO: Self =
        Self { row: [Vec16::from_bits([0; 4]); V], scales: Vec16::from_bits([0; 4]) };

    /// Makes a part from the input. Lane `i` gets the scales of the `i`-th vectors of all lanes. A
    /// whole warp calls this, with a part of a row.
    pub(super) unsafe fn of<R: Rows>(row: &[Loaded; V]) -> Self {
        let mut payload = Self::ZERO;
        for i in 0..V {
            if !R::HAS_SCALES {
                payload.row[i] = Vec16::from_bits(row[i][0].to_bits());
                continue;
            }
            // SAFETY: the caller has all lanes here; parts begin at multiples of a warp's vectors.
            unsafe {
                let (vector, scale) = scaled(row[i]);
                let scales =
                    [0, 1, 2, 3].map(|group| warp::shuffle_idx(scale, group * SCALED_LANES));
                payload.row[i] = vector;
                if warp::lane_id() == i as u32 {
                    payload.scales = Vec16::from_bits(scales);
                }
            }
        }
        payload
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
