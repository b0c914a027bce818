//! The types in which partial sums are sent to the rank that adds them.

use crate::prelude::*;

/// Columns that share a scale, of each row.
pub(super) const SCALED: u32 = 64;
/// The most fragments of which a lane has the elements in a vector.
pub(super) const MOST_FRAGMENTS: usize = 4;

/// A type in which partial sums are sent: `f32`, `bf16`, or `F8E4M3`, of which 64 elements of a row
/// share a scale, a power of two. Of a fragment a lane has four elements: two of a row, and two of
/// the eighth row after it.
pub trait Partial: Accumulate<Acc = f32> {
    /// Whether there are scales.
    const HAS_SCALES: bool = false;

    /// The number of fragments of which a lane has the elements in a vector.
    const FRAGMENTS: usize = Vec16::<Self>::LANES / 4;

    /// Returns a vector of a lane's elements of fragments, each rounded to the nearest.
    fn pack(fragment: impl Fn(usize) -> [f32; 4]) -> Vec16<Self> {
        let mut wide = Self::widen(Vec16::from_bits([0; 4]));
        for i in 0..Self::FRAGMENTS {
            wide.as_mut()[4 * i..4 * i + 4].copy_from_slice(&fragment(i));
        }
        Self::narrow(wide)
    }

    /// Returns a lane's elements of the fragments of a vector, and then zeros.
    fn unpack(vector: Vec16<Self>) -> [[f32; 4]; MOST_FRAGMENTS] {
        let (wide, mut fragments) = (Self::widen(vector), [[0.0; 4]; MOST_FRAGMENTS]);
        for i in 0..Self::FRAGMENTS {
            fragments[i].copy_from_slice(&wide.as_ref()[4 * i..4 * i + 4]);
        }
        fragments
    }
}

impl Partial for f32 {}

impl Partial for bf16 {}

impl Partial for F8E4M3 {
    const HAS_SCALES: bool = true;
}

/// Adds a lane's elements, times the scales of their two rows, to the `lane`-th two sums of each
/// row.
pub(super) fn add_scaled(
    [upper, lower]: [&mut [f32; 8]; 2],
    lane: usize,
    [a, b, c, d]: [f32; 4],
    [top, bottom]: [f32; 2],
) {
    upper[2 * lane] += a * top;
    upper[2 * lane + 1] += b * top;
    lower[2 * lane] += c * bottom;
    lower[2 * lane + 1] += d * bottom;
}
