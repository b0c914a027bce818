//! The stores of a strip's sums by the threads that compute it.

use core::marker::PhantomData;

use cuda_std::convert::f32_to_bf16x2;
use cuda_std::prelude::*;
use nccl_device::LsaPtr;

use super::exchange::{Exchange, ROWS, SCALED_FRAGMENTS, WIDTH};
use super::partial::{Elements, Partial};
use super::tiles::Strip;
use crate::scale::Scale;

/// The destination of a strip's sums: the owner's workspace, or this rank's C with `local_only`.
#[derive(Clone, Copy)]
pub(super) struct PartialTile<W> {
    pub(super) c: LsaPtr<bf16>,
    pub(super) partial: *mut u32,
    pub(super) strip: Strip,
    pub(super) m: u32,
    pub(super) n: u32,
    pub(super) local_only: bool,
    pub(super) wire: PhantomData<W>,
}

impl<W: Partial> PartialTile<W> {
    /// Stores the lane's elements of `J` fragments: rows from `16 * i` on, columns from `8 * j` on.
    /// A lane has four elements of each: columns `2 * (lane % 4)` and the next, in rows `lane / 4`
    /// and `lane / 4 + 8`. `J` is a multiple of the fragments in a vector, and of those per scale.
    ///
    /// # Safety
    ///
    /// All lanes of a warp call it together; no other warp stores these fragments.
    pub(super) unsafe fn store<const J: usize>(
        &self,
        i: u32,
        j: u32,
        fragments: impl Fn(usize) -> Elements,
    ) {
        let (row, column) = (self.strip.row + ROWS * i, self.strip.column + WIDTH * j);
        if row >= self.m || column >= self.n {
            return;
        }
        let columns = (self.n - column) as usize;
        let lane = warp::lane_id();
        if self.local_only {
            let (row, first) = (row + lane / 4, lane % 4 * 2);
            // SAFETY: the caller's warp alone stores these fragments, which lie in C.
            unsafe {
                self.store_local::<J>(
                    row,
                    column + first,
                    columns.saturating_sub(first as usize),
                    fragments,
                )
            };
            return;
        }
        // The number of fragments that share scales, or of those in a vector.
        let block = if W::HAS_SCALES { SCALED_FRAGMENTS as usize } else { W::FRAGMENTS };
        let mut first = 0;
        while first < J {
            if first * (WIDTH as usize) < columns {
                let fragments = |x| fragments(first + x);
                // SAFETY: the caller's warp, with all lanes here, alone stores these fragments.
                unsafe { self.store_block(i, j + first as u32, block, fragments) };
            }
            first += block;
        }
    }

    /// Stores the lane's elements of `block` fragments that share scales, if there are any.
    ///
    /// # Safety
    ///
    /// As for [`store`](Self::store).
    unsafe fn store_block(
        &self,
        i: u32,
        j: u32,
        block: usize,
        fragments: impl Fn(usize) -> Elements,
    ) {
        let (lane, mut scales) = (warp::lane_id(), [Scale::ONE; 2]);
        // SAFETY: the caller's warp, with all lanes here, alone stores to its part of the slot.
        unsafe {
            if W::HAS_SCALES {
                scales = Self::scales_of(&fragments);
                if lane.is_multiple_of(4) {
                    let to = Exchange::<W>::scales(i, j, lane / 4);
                    mem::store(self.partial.add(to), Scale::pack(scales));
                }
            }
            let [top, bottom] = scales.map(Scale::inverse);
            let mut x = 0;
            while x < block {
                let vector = W::pack(|f| {
                    let [a, b, c, d] = fragments(x + f);
                    [a * top, b * top, c * bottom, d * bottom]
                });
                let to = Exchange::<W>::vector(i, j + x as u32, lane);
                mem::store_vec(self.partial.add(to).cast(), vector);
                x += W::FRAGMENTS;
            }
        }
    }

    /// Returns the scales of the lane's two rows, of fragments that share them.
    ///
    /// # Safety
    ///
    /// All lanes of a warp call it together.
    unsafe fn scales_of(fragments: impl Fn(usize) -> Elements) -> [Scale; 2] {
        let (mut top, mut bottom) = (0_f32, 0_f32);
        let mut x = 0;
        while x < SCALED_FRAGMENTS as usize {
            let [a, b, c, d] = fragments(x).map(f32::abs);
            top = top.max(a).max(b);
            bottom = bottom.max(c).max(d);
            x += 1;
        }
        // SAFETY: the caller has all lanes of the warp here.
        [top, bottom].map(|mine| unsafe {
            let pair = mine.max(warp::shuffle_xor(mine, 1));
            Scale::of(pair.max(warp::shuffle_xor(pair, 2)))
        })
    }

    /// Rounds the elements and stores them to C: `J` pairs of columns, eight columns apart, in
    /// `row` and `row + 8`. C has `columns` columns from `column` on.
    ///
    /// # Safety
    ///
    /// Only this thread stores these elements.
    unsafe fn store_local<const J: usize>(
        &self,
        row: u32,
        column: u32,
        columns: usize,
        fragments: impl Fn(usize) -> Elements,
    ) {
        let mut half = 0;
        while half < 2 {
            let row = row + 8 * half as u32;
            if row < self.m {
                // SAFETY: the row is in C.
                let to = unsafe {
                    self.c.as_ptr().add(row as usize * self.n as usize + column as usize)
                };
                let pair = |x: usize| {
                    let sums = fragments(x);
                    f32_to_bf16x2([sums[2 * half], sums[2 * half + 1]])
                };
                // SAFETY: only this thread stores the elements, as the caller guarantees; if `n` is
                // even, every pair is whole and 4-byte aligned.
                unsafe {
                    if self.n.is_multiple_of(2) {
                        let mut x = 0;
                        while x < J {
                            if 8 * x < columns {
                                mem::store(to.add(8 * x).cast::<u32>(), pair(x));
                            }
                            x += 1;
                        }
                    } else {
                        let mut x = 0;
                        while x < J {
                            let word = pair(x);
                            if 8 * x < columns {
                                mem::store(to.add(8 * x), bf16::from_bits(word as u16));
                            }
                            if 8 * x + 1 < columns {
                                let high = (word >> 16) as u16;
                                mem::store(to.add(8 * x + 1), bf16::from_bits(high));
                            }
                            x += 1;
                        }
                    }
                }
            }
            half += 1;
        }
    }
}
