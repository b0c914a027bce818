//! The scale of 8-bit floats that share one.

use cuda_std::convert;

/// The greatest finite `F8E4M3` is 448, `1.75 * 2^8`.
const LARGEST_EXPONENT: u32 = 8;
/// What is added to the bits of an `f32` so that its exponent becomes greater if the number is more
/// than 1.75 times a power of two.
const ROUND_UP: u32 = 0x1f_ffff;
/// Bits of the fraction of an `f32`.
const FRACTION: u32 = 23;

/// The factor of `F8E4M3`s: the least power of two, at least `2^-126`, times which 448 is no less
/// than each number.
///
/// A number divided by the scale is exact, and all rounding is that to `F8E4M3`: to nearest, ties
/// to even. Infinities become 448 times the scale, which is infinite; NaN stays.
#[derive(Clone, Copy)]
pub(crate) struct Scale {
    exponent: u32,
}

impl Scale {
    /// 1.
    pub(crate) const ONE: Self = Self { exponent: 127 };

    /// Returns the scale of numbers whose largest magnitude, NaN left out, is `largest`.
    pub(crate) fn of(largest: f32) -> Self {
        let exponent = (largest.to_bits() + ROUND_UP) >> FRACTION;
        Self { exponent: exponent.saturating_sub(LARGEST_EXPONENT).max(1) }
    }

    /// The bits of the scale, an `f32`.
    pub(crate) fn to_bits(self) -> u32 {
        self.exponent << FRACTION
    }

    /// 1 over the scale: the exponents of both have the sum of two that are 0.
    pub(crate) fn inverse(self) -> f32 {
        f32::from_bits((2 * 127 - self.exponent) << FRACTION)
    }

    /// The scale, from its [`byte`](Self::byte).
    pub(crate) fn from_byte(byte: u32) -> Self {
        Self { exponent: byte }
    }

    /// The scale in a byte.
    pub(crate) fn byte(self) -> u32 {
        self.exponent
    }

    pub(crate) fn value(self) -> f32 {
        f32::from_bits(self.to_bits())
    }

    /// Two scales as a pair of `bf16`, which has every power of two of a scale.
    pub(crate) fn pack([low, high]: [Self; 2]) -> u32 {
        low.to_bits() >> 16 | high.to_bits()
    }

    /// What two scales were packed to.
    pub(crate) fn unpack(pair: u32) -> [f32; 2] {
        convert::bf16x2_to_f32(pair)
    }
}

#[cfg(test)]
mod tests {
    use cuda_std::vector::{Accumulate, Vec16};
    use devcomm_types::F8E4M3;

    use super::*;

    /// A number as it arrives, next to another one, the largest.
    fn arrived(number: f32, largest: f32) -> f32 {
        let scale = Scale::of(largest);
        let sent: Vec16<F8E4M3> = F8E4M3::narrow([number * scale.inverse(); 16]);
        let [_, of_sent] = Scale::unpack(Scale::pack([Scale::ONE, scale]));
        F8E4M3::widen(sent)[0] * of_sent
    }

    #[test]
    fn a_number_is_off_by_a_sixteenth_or_little_of_the_largest() {
        for largest in [3.0e38, 1.0e30, 1792.0, 1793.0, 1.0, 1.0e-30, f32::MIN_POSITIVE] {
            let mut number = largest;
            while number > 1e-9 * largest && number > f32::MIN_POSITIVE {
                let off = (arrived(number, largest) - number).abs();
                let bound = (number / 16.0).max(largest / 131_072.0);
                assert!(off <= bound, "{number} beside {largest} is off by {off}");
                number *= 0.83;
            }
        }
        assert_eq!(arrived(448.0, 448.0), 448.0);
        assert_eq!(arrived(0.0, 0.0), 0.0);
    }

    #[test]
    fn what_is_no_number_stays_so() {
        assert_eq!(arrived(f32::NEG_INFINITY, f32::INFINITY), f32::NEG_INFINITY);
        assert!(arrived(f32::NAN, 1.0).is_nan());
    }
}
