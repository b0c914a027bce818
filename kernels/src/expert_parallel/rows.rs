//! Formats of the rows of tokens in transit: 16-bit floats without conversion, or 8-bit floats with
//! scales.

use super::prelude::*;

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

#[track_callers]
impl<const V: usize> Part<V> {
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
