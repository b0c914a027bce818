//! Sums of rows of experts, in f32.

use cuda_std::prelude::*;
use cuda_std::{math, mem};
use half::bf16;

use super::ep_layout::{DROPPED, NONE, RETURN_WORDS};
use super::parts::Part;

/// The words that `ep_layout` has stored for a token, one in each lane: position and weight of each
/// expert in this rank. All are [`NONE`] without a token.
pub(super) type Entries = u32;

const _: () = assert!(RETURN_WORDS == warp::WARP_SIZE as usize);

/// A lane's vectors of a part of a row.
pub(super) type Row<const VECTORS: usize> = [Vec16<bf16>; VECTORS];

/// Returns how many experts a token has in this rank.
///
/// # Safety
///
/// All lanes of a warp call this together.
#[track_caller]
unsafe fn len(entries: Entries) -> u32 {
    // SAFETY: the caller's contract. Words of even lanes are positions.
    unsafe { warp::ballot(warp::lane_id().is_multiple_of(2) && entries != NONE) }.count_ones()
}

/// Begins to bring the rows of a token's experts into the L2 cache.
///
/// # Safety
///
/// `rows` are there, and `entries` are positions of some. All lanes of a warp call this together.
pub(super) unsafe fn prefetch<const VECTORS: usize>(
    rows: *const bf16,
    entries: Entries,
    part: Part<VECTORS>,
) {
    // SAFETY: the caller's contract; positions are those of rows.
    unsafe {
        let len = len(entries);
        for k in 0..len {
            let row = warp::shuffle_idx(entries, 2 * k);
            let mut i = 0;
            while i < VECTORS && row < DROPPED {
                if let Some(at) = part.vector_of(row as usize, i) {
                    mem::prefetch(rows.wrapping_add(8 * at));
                }
                i += 1;
            }
        }
    }
}

/// Returns the sum of this rank's experts for a token, rounded; `None` if it has none here.
///
/// # Safety
///
/// `rows` are there, and `entries` are positions of some. All lanes of a warp call this together.
pub(super) unsafe fn sum<const VECTORS: usize, const TOGETHER: usize>(
    rows: *const bf16,
    entries: Entries,
    part: Part<VECTORS>,
) -> Option<Row<VECTORS>> {
    // SAFETY: all lanes of the warp are here, and `entries` are positions of rows, as the caller
    // guarantees.
    let len = unsafe { len(entries) };
    if len == 0 {
        return None;
    }
    let mut sums = [[0.0; 8]; VECTORS];
    // SAFETY: all lanes of the warp are here, and `entries` are positions of rows, as the caller
    // guarantees.
    unsafe { add_rows::<VECTORS, TOGETHER>(&mut sums, rows, (entries, len), part) };
    Some(sums.map(bf16::narrow))
}

/// Adds the first `len` rows of `entries` times their weights.
///
/// # Safety
///
/// As [`sum`].
pub(super) unsafe fn add_rows<const VECTORS: usize, const TOGETHER: usize>(
    sums: &mut [[f32; 8]; VECTORS],
    rows: *const bf16,
    (entries, len): (Entries, u32),
    part: Part<VECTORS>,
) {
    let mut k = 0;
    while k < len {
        let mut at = [NONE; TOGETHER];
        let mut loaded = [[Vec16::from_bits([0; 4]); VECTORS]; TOGETHER];
        for entry in 0..TOGETHER {
            // SAFETY: all lanes of the warp are here, and `entries` are positions of rows, as the
            // caller guarantees.
            unsafe {
                at[entry] = warp::shuffle_idx(entries, 2 * (k + entry as u32));
                if at[entry] < DROPPED {
                    loaded[entry] = part.load(rows, at[entry] as usize);
                }
            }
        }
        for entry in 0..TOGETHER {
            // SAFETY: all lanes of the warp are here, and `entries` are positions of rows, as the
            // caller guarantees.
            let weight = unsafe { warp::shuffle_idx(entries, 2 * (k + entry as u32) + 1) };
            if at[entry] < DROPPED {
                add(sums, &loaded[entry], f32::from_bits(weight));
            }
        }
        k += TOGETHER as u32;
    }
}

/// Adds a row times a weight.
pub(super) fn add<const VECTORS: usize>(
    sums: &mut [[f32; 8]; VECTORS],
    row: &Row<VECTORS>,
    weight: f32,
) {
    for i in 0..VECTORS {
        let wide = bf16::widen(row[i]);
        for lane in 0..8 {
            sums[i][lane] = math::fma(weight, wide[lane], sums[i][lane]);
        }
    }
}
