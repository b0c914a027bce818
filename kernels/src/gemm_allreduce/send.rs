//! The stores of a strip's sums by the warps that compute it.

use super::exchange::{Exchange, ROWS, SCALED_FRAGMENTS, WIDTH};
use super::partial::Partial;
use super::tiles::{Strip, Tiles};
use crate::files::gemm::part::Part;
use crate::prelude::*;

/// Fragments of a tile in registers.
const FRAGMENTS: usize = 8;

impl<W: Partial> Exchange<'_, W> {
    /// Stores a warp's sums of a strip, from row `16 * i` and column `8 * j` of the strip on: to
    /// the owner's workspace, or to C if there is a single rank. All lanes of a warp call it
    /// together; no other warp stores these elements.
    pub(super) unsafe fn send(
        &self,
        strip: Strip,
        (i, j): (u32, u32),
        sums: &mut [RegTile<f32, FRAGMENTS>; 2],
    ) {
        let (row, column) = (strip.row + ROWS * i, strip.column + WIDTH * j);
        let Tiles { m, n } = self.tiles;
        // SAFETY: the caller's warp, with all lanes here, alone stores these elements, which lie in
        // C and in the slot of this rank.
        unsafe {
            if self.local_only {
                return Part::of_warp(sums, (row, column), (m, n)).store(self.c.local().as_ptr());
            }
            let slot = self.outgoing(strip);
            if row < m {
                Self::send_rows(slot, i, j, n.saturating_sub(column), &sums[0]);
            }
            if row + ROWS < m {
                Self::send_rows(slot, i + 1, j, n.saturating_sub(column), &sums[1]);
            }
        }
    }

    /// Stores 16 rows of a warp's sums to a slot, and as many columns as C has. The conditions are
    /// those of [`send`](Self::send).
    unsafe fn send_rows(
        slot: *mut u32,
        i: u32,
        j: u32,
        columns: u32,
        sums: &RegTile<f32, FRAGMENTS>,
    ) {
        let lane = warp::lane_id();
        // The number of fragments that share scales, or of those in a vector.
        let block = if W::HAS_SCALES { SCALED_FRAGMENTS as usize } else { W::FRAGMENTS };
        for first in Strided::new(0, FRAGMENTS as u32, block as u32) {
            let (j, mut scales) = (j + first, [Scale::ONE; 2]);
            let fragment = |x: usize| sums.blocks()[first as usize + x];
            if first * WIDTH >= columns {
                break;
            }
            // SAFETY: the caller's warp, with all lanes here, alone stores to its part of the slot.
            unsafe {
                if W::HAS_SCALES {
                    scales = Self::scales_of(fragment);
                    if lane.is_multiple_of(4) {
                        let to = slot.add(Self::scales(i, j, lane / 4));
                        mem::store(to, Scale::pack(scales));
                    }
                }
                let [top, bottom] = scales.map(Scale::inverse);
                for x in Strided::new(0, block, W::FRAGMENTS) {
                    let vector = W::pack(|f| {
                        let [a, b, c, d] = fragment(x + f);
                        [a * top, b * top, c * bottom, d * bottom]
                    });
                    let to = Self::vector(i, j + x as u32, lane);
                    mem::store_vec(slot.add(to).cast(), vector);
                }
            }
        }
    }

    /// Returns the scales of the lane's two rows, of fragments that share them. All lanes of a warp
    /// call it together.
    unsafe fn scales_of(fragment: impl Fn(usize) -> [f32; 4]) -> [Scale; 2] {
        let mut largest = [0_f32; 2];
        for x in 0..SCALED_FRAGMENTS as usize {
            let [a, b, c, d] = fragment(x).map(f32::abs);
            largest = [largest[0].max(a).max(b), largest[1].max(c).max(d)];
        }
        // SAFETY: the caller has all lanes of the warp here.
        largest.map(|mine| Scale::of(unsafe { segment_reduce::<4, _>(mine, f32::max) }))
    }
}
