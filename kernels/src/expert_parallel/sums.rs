//! Sums of rows of experts, in f32. Whole warps call these functions, with positions of rows.

use super::prelude::*;

/// The results of a rank's experts, and the sums of its tokens' results.
#[repr(C)]
#[derive(Clone, Copy, KernelParam)]
pub struct Results {
    /// The rows of results, in the order of the experts.
    pub rows: *const bf16,
    /// The number of this rank's tokens.
    pub tokens: u32,
    /// The sum for each of these tokens.
    pub output: *mut bf16,
    /// What is added to each sum, or null; it may be the output.
    pub residual: *const bf16,
}

impl Results {
    /// Loads a part of the residual of a token; 0 without one.
    pub(super) unsafe fn residual<const V: usize>(&self, part: Part<V>) -> Row<V> {
        if self.residual.is_null() {
            return [Vec16::from_bits([0; 4]); V];
        }
        // SAFETY: the residual has the row, as the kernel's caller guarantees.
        unsafe { part.load(self.residual, part.row as usize) }
    }

    /// Stores a part of the output: the sums plus the residual. Only this warp has the part.
    #[track_caller]
    pub(super) unsafe fn store<const V: usize>(
        &self,
        part: Part<V>,
        mut sums: Sums<V>,
        residual: &Row<V>,
    ) {
        add(&mut sums, residual, 1.0);
        // SAFETY: the output has the row, as the kernel's caller guarantees.
        unsafe { part.store(self.output, part.row as usize, &sums.map(bf16::narrow)) };
    }
}

/// The words that `ep_layout` has stored for a token, one in each lane: position and weight of each
/// expert in this rank. All are [`NONE`] without a token.
pub(super) type Entries = u32;

const _: () = assert!(RETURN_WORDS == warp::WARP_SIZE as usize);

/// Results that are loaded together.
pub(super) const TOGETHER: usize = 4;

/// A lane's vectors of a part of a row, and sums of such vectors.
pub(super) type Row<const V: usize> = [Vec16<bf16>; V];
pub(super) type Sums<const V: usize> = [[f32; 8]; V];

/// Returns how many experts a token has in this rank.
#[track_caller]
unsafe fn len(entries: Entries) -> u32 {
    // SAFETY: all lanes are here. Words of even lanes are positions.
    unsafe { warp::ballot(warp::lane_id().is_multiple_of(2) && entries != NONE) }.count_ones()
}

/// Begins to bring the rows of a token's experts into the L2 cache.
pub(super) unsafe fn prefetch<const V: usize>(rows: *const bf16, entries: Entries, part: Part<V>) {
    // SAFETY: the whole warp is here; positions are those of rows.
    unsafe {
        for k in 0..len(entries) {
            let row = warp::shuffle_idx(entries, 2 * k);
            for i in 0..V {
                if let Some(at) = part.vector_of(row as usize, i).filter(|_| row < DROPPED) {
                    mem::prefetch(rows.wrapping_add(8 * at));
                }
            }
        }
    }
}

/// Returns the sum of this rank's experts for a token, rounded; `None` if it has none here.
pub(super) unsafe fn sum<const V: usize, const TOGETHER: usize>(
    rows: *const bf16,
    entries: Entries,
    part: Part<V>,
) -> Option<Row<V>> {
    let mut sums = [[0.0; 8]; V];
    // SAFETY: the whole warp is here, with positions of rows, as the caller guarantees.
    unsafe {
        let len = len(entries);
        if len == 0 {
            return None;
        }
        add_rows::<V, TOGETHER>(&mut sums, rows, (entries, len), part);
    }
    Some(sums.map(bf16::narrow))
}

/// Adds the first `len` rows of `entries` times their weights.
pub(super) unsafe fn add_rows<const V: usize, const TOGETHER: usize>(
    sums: &mut Sums<V>,
    rows: *const bf16,
    (entries, len): (Entries, u32),
    part: Part<V>,
) {
    for k in Strided::new(0, len, TOGETHER as u32) {
        let mut at = [NONE; TOGETHER];
        let mut loaded = [[Vec16::from_bits([0; 4]); V]; TOGETHER];
        // SAFETY: the whole warp is here, with positions of rows, as the caller guarantees.
        unsafe {
            for entry in 0..TOGETHER {
                at[entry] = warp::shuffle_idx(entries, 2 * (k + entry as u32));
                if at[entry] < DROPPED {
                    loaded[entry] = part.load(rows, at[entry] as usize);
                }
            }
            for entry in 0..TOGETHER {
                let weight = warp::shuffle_idx(entries, 2 * (k + entry as u32) + 1);
                if at[entry] < DROPPED {
                    add(sums, &loaded[entry], f32::from_bits(weight));
                }
            }
        }
    }
}

/// Adds a row times a weight.
pub(super) fn add<const V: usize>(sums: &mut Sums<V>, row: &Row<V>, weight: f32) {
    for i in 0..V {
        let wide = bf16::widen(row[i]);
        for lane in 0..8 {
            sums[i][lane] = math::fma(weight, wide[lane], sums[i][lane]);
        }
    }
}
