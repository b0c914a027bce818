//! The scale that several 8-bit floats share: a power of two.

use cuda_std::convert;

/// The exponent of the greatest finite `F8E4M3`, which is 448 = `1.75 * 2^8`.
const LARGEST_EXPONENT: u32 = 8;
/// The addend to the bits of an `f32` by which its exponent becomes greater if the number is more
/// than 1.75 times a power of two.
const ROUND_UP: u32 = 0x1f_ffff;
/// Bits of the fraction of an `f32`.
const FRACTION: u32 = 23;
/// The bits of the greatest finite `f32`.
const LARGEST_FINITE: u32 = f32::MAX.to_bits();

/// The scale of `F8E4M3`s: the least power of two, at least `2^-126`, such that no number is more
/// than 448 times the scale.
///
/// A number divided by the scale is exact, and all rounding is that to `F8E4M3`: to nearest, ties
/// to even. Infinities become 448 times the scale, which is infinite; NaN stays. For finite numbers
/// the scale is at most `2^119`, so that they stay finite: more than `1.75 * 2^127` becomes that.
#[derive(Clone, Copy)]
pub(crate) struct Scale {
    /// The exponent of the scale as an `f32`, with its bias of 127: a byte.
    pub(crate) exponent: u32,
}

impl Scale {
    pub(crate) const ONE: Self = Self { exponent: 127 };

    /// Returns the scale of numbers whose largest magnitude, NaN left out, is `largest`.
    pub(crate) fn of(largest: f32) -> Self {
        let bits = largest.to_bits();
        let exponent = (bits + ROUND_UP).min(LARGEST_FINITE).max(bits) >> FRACTION;
        Self { exponent: exponent.saturating_sub(LARGEST_EXPONENT).max(1) }
    }

    /// Returns the bits of the scale as an `f32`.
    pub(crate) fn to_bits(self) -> u32 {
        self.exponent << FRACTION
    }

    /// Returns 1 over the scale: the biased exponents of both add up to twice the bias.
    pub(crate) fn inverse(self) -> f32 {
        f32::from_bits((2 * 127 - self.exponent) << FRACTION)
    }

    pub(crate) fn value(self) -> f32 {
        f32::from_bits(self.to_bits())
    }

    /// Packs two scales as a pair of `bf16`, which represents every scale exactly.
    pub(crate) fn pack([low, high]: [Self; 2]) -> u32 {
        low.to_bits() >> 16 | high.to_bits()
    }

    /// Returns the two scales of a pair from [`pack`](Self::pack).
    pub(crate) fn unpack(pair: u32) -> [f32; 2] {
        convert::bf16x2_to_f32(pair)
    }
}

#[cfg(test)]
mod tests;
