//! Formats of the rows of tokens in transit: 16-bit floats without conversion, or 8-bit floats with
//! scales.

use super::prelude::*;

/// Elements that share a scale, as neighbouring vectors of 8-bit floats of `SCALED_LANES` lanes.
pub const SCALED: usize = 128;

/// Lanes whose vectors share a scale.
const SCALED_LANES: u32 = 8;

/// The elements of rows in transit: [`bf16`] without conversion, or [`F8E4M3`] with scales. A
/// vector of 16 bytes of a row is made from a lane's [`Loaded`](Self::Loaded) part of the input.
pub trait Rows: Element {
    /// Whether a scale goes with each [`SCALED`] elements.
    const HAS_SCALES: bool;
    /// The part of the input from which a vector is made.
    type Loaded: Copy;
    /// The part from which a vector after the end of a row is made.
    const NOTHING: Self::Loaded;

    /// Loads the part of the input from which a vector is made, by the vector's index among those
    /// of all rows.
    ///
    /// # Safety
    ///
    /// The input has this part.
    unsafe fn load(input: *const bf16, at: usize) -> Self::Loaded;

    /// Returns the vector, and the bits of its scale if there are scales.
    ///
    /// # Safety
    ///
    /// A whole warp calls this, with successive vectors of a row. The index of the first one is a
    /// multiple of 32.
    unsafe fn vector(loaded: Self::Loaded) -> (Vec16<u32>, u32);
}

impl Rows for bf16 {
    const HAS_SCALES: bool = false;
    type Loaded = Vec16<bf16>;
    const NOTHING: Self::Loaded = Vec16::from_bits([0; 4]);

    #[track_caller]
    unsafe fn load(input: *const bf16, at: usize) -> Self::Loaded {
        // SAFETY: the input has the vector, as the caller guarantees.
        unsafe { mem::load_vec(input.wrapping_add(8 * at)) }
    }

    unsafe fn vector(loaded: Self::Loaded) -> (Vec16<u32>, u32) {
        (Vec16::from_bits(loaded.to_bits()), 0)
    }
}

/// [`SCALED`] elements share a [`Scale`]; NaN does not count for it.
impl Rows for F8E4M3 {
    const HAS_SCALES: bool = true;
    type Loaded = [Vec16<bf16>; 2];
    const NOTHING: Self::Loaded = [Vec16::from_bits([0; 4]); 2];

    #[track_caller]
    unsafe fn load(input: *const bf16, at: usize) -> Self::Loaded {
        // SAFETY: the input has the vector, as the caller guarantees.
        unsafe {
            let from = input.wrapping_add(16 * at);
            [mem::load_vec(from), mem::load_vec(from.wrapping_add(8))]
        }
    }

    #[track_caller]
    unsafe fn vector(loaded: Self::Loaded) -> (Vec16<u32>, u32) {
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
}

/// Loads a part of row `row` of the input, from which the vectors in transit are made.
#[track_caller]
pub(super) unsafe fn load<R: Rows, const V: usize>(
    input: *const bf16,
    part: Part<V>,
    row: usize,
) -> [R::Loaded; V] {
    let mut loaded = [R::NOTHING; V];
    for i in 0..V {
        if let Some(at) = part.vector_of(row, i) {
            // SAFETY: the input has the vector, as the caller guarantees.
            loaded[i] = unsafe { R::load(input, at) };
        }
    }
    loaded
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
    pub(super) unsafe fn of<R: Rows>(row: &[R::Loaded; V]) -> Self {
        let mut payload = Self::ZERO;
        for i in 0..V {
            // SAFETY: the caller has all lanes here; parts begin at multiples of a warp's vectors.
            unsafe {
                let (vector, scale) = R::vector(row[i]);
                payload.row[i] = vector;
                if R::HAS_SCALES {
                    let scales = [
                        warp::shuffle_idx(scale, 0),
                        warp::shuffle_idx(scale, SCALED_LANES),
                        warp::shuffle_idx(scale, 2 * SCALED_LANES),
                        warp::shuffle_idx(scale, 3 * SCALED_LANES),
                    ];
                    if warp::lane_id() == i as u32 {
                        payload.scales = Vec16::from_bits(scales);
                    }
                }
            }
        }
        payload
    }
}

impl<const V: usize> Part<V> {
    /// Stores this part of row `row`, with scales if rows have any. Only this warp has the part.
    #[track_caller]
    pub(super) unsafe fn store_payload<R: Rows>(
        self,
        rows: *mut u32,
        scales: *mut u32,
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
