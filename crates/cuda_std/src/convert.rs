//! Conversions of 16-bit and 8-bit floats to and from `f32`, by the hardware's `cvt`.
//!
//! On a GPU the conversions of the crates `half` and `float8` compile to slow integer code; these
//! functions are one instruction, or two for a single 8-bit float. Narrowing rounds to the nearest,
//! ties to even. NaNs stay NaNs, but may lose sign and payload; zeros keep their sign. A value that
//! is too large becomes an infinity in 16 bits; in 8 bits it, or an infinity, becomes the largest
//! number.
//!
//! The functions named `x2` take or return two 16-bit floats in a `u32`, or two 8-bit floats in a
//! `u16`, the first in the low bits, as in memory.
//!
//! # Safety model
//!
//! Arithmetic only; safe.
//!
//! # Example
//!
//! ```
//! use cuda_std::convert;
//! assert_eq!(convert::bf16x2_to_f32(convert::f32_to_bf16x2([1.5, -2.0])), [1.5, -2.0]);
//! ```

use core::convert::identity;

use devcomm_types::{F8E4M3, F8E5M2};
use half::{bf16, f16};

use crate::arch;

/// Converts exactly. PTX: `cvt.f32.f16`.
pub fn f16_to_f32(value: f16) -> f32 {
    arch::f16_to_f32(value)
}

/// Rounds to the nearest; overflow gives infinity. PTX: `cvt.rn.f16.f32`.
pub fn f32_to_f16(value: f32) -> f16 {
    arch::f32_to_f16(value)
}

/// Converts exactly: a shift.
pub fn bf16_to_f32(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// Rounds to the nearest. PTX: `cvt.rn.bf16.f32`.
pub fn f32_to_bf16(value: f32) -> bf16 {
    arch::f32_to_bf16(value)
}

/// Converts exactly.
pub fn f16x2_to_f32(packed: u32) -> [f32; 2] {
    [packed as u16, (packed >> 16) as u16].map(|bits| f16_to_f32(f16::from_bits(bits)))
}

/// Rounds each to the nearest. PTX: `cvt.rn.f16x2.f32`.
pub fn f32_to_f16x2(values: [f32; 2]) -> u32 {
    arch::f32_to_f16x2(values)
}

/// Converts exactly: a shift and a mask.
pub fn bf16x2_to_f32(packed: u32) -> [f32; 2] {
    [f32::from_bits(packed << 16), f32::from_bits(packed & 0xffff_0000)]
}

/// Rounds each to the nearest. PTX: `cvt.rn.bf16x2.f32`.
pub fn f32_to_bf16x2(values: [f32; 2]) -> u32 {
    arch::f32_to_bf16x2(values)
}

/// The types to which `f32` is rounded where it is stored: `bf16`, `f16`, `F8E4M3`, and `f32`
/// itself.
pub trait Float: Copy + 'static {
    /// Two values as in memory: `u16`, `u32` or `u64`.
    type Pair: Copy;

    /// Converts exactly.
    fn to_f32(self) -> f32;
    /// Rounds to the nearest.
    fn from_f32(value: f32) -> Self;
    /// Rounds two values, each to the nearest.
    fn pack(values: [f32; 2]) -> Self::Pair;
    /// Converts exactly.
    fn unpack(pair: Self::Pair) -> [f32; 2];
    /// Returns the `index`-th 32 bits of an array whose element `i` is `value(i)`, rounded to the
    /// nearest.
    fn word(index: usize, value: impl Fn(usize) -> f32) -> u32;
}

/// The 16-bit floats.
pub trait Half: Float<Pair = u32> {}

impl Half for bf16 {}
impl Half for f16 {}

/// Implements [`Float`] by four functions, and an expression of [`Float::word`]'s parameters.
macro_rules! floats {
    ($(
        $type:ident, $pair:ident: $to_f32:ident $from_f32:ident $pack:ident $unpack:ident,
        |$index:ident, $value:ident| $word:expr;
    )*) => { $(
        impl Float for $type {
            type Pair = $pair;

            fn to_f32(self) -> f32 {
                $to_f32(self)
            }

            fn from_f32(value: f32) -> Self {
                $from_f32(value)
            }

            fn pack(values: [f32; 2]) -> $pair {
                $pack(values)
            }

            fn unpack(pair: $pair) -> [f32; 2] {
                $unpack(pair)
            }

            fn word($index: usize, $value: impl Fn(usize) -> f32) -> u32 {
                $word
            }
        }
    )* };
}

floats! {
    bf16, u32: bf16_to_f32 f32_to_bf16 f32_to_bf16x2 bf16x2_to_f32,
        |index, value| f32_to_bf16x2([value(2 * index), value(2 * index + 1)]);
    f16, u32: f16_to_f32 f32_to_f16 f32_to_f16x2 f16x2_to_f32,
        |index, value| f32_to_f16x2([value(2 * index), value(2 * index + 1)]);
    F8E4M3, u16: f8e4m3_to_f32 f32_to_f8e4m3 f32_to_f8e4m3x2 f8e4m3x2_to_f32, |index, value| {
        let [low, high] = [4 * index, 4 * index + 2].map(|i| [value(i), value(i + 1)]);
        u32::from(Self::pack(low)) | u32::from(Self::pack(high)) << 16
    };
    f32, u64: identity identity f32_to_bits_x2 bits_x2_to_f32,
        |index, value| value(index).to_bits();
}

fn f32_to_bits_x2([low, high]: [f32; 2]) -> u64 {
    u64::from(low.to_bits()) | u64::from(high.to_bits()) << 32
}

fn bits_x2_to_f32(pair: u64) -> [f32; 2] {
    [pair as u32, (pair >> 32) as u32].map(f32::from_bits)
}

macro_rules! f8_types {
    ($(
        $type:ident $ptx:literal $largest:literal:
        $to:ident $from:ident $unpack:ident $pack:ident;
    )*) => { $(
        /// Converts exactly.
        pub fn $to(value: $type) -> f32 {
            $unpack(u16::from(value.to_bits()))[0]
        }

        #[doc = concat!("Rounds to the nearest; saturates at ", $largest, " of either sign.")]
        pub fn $from(value: f32) -> $type {
            $type::from_bits($pack([value, 0.0]) as u8)
        }

        #[doc = concat!("Converts exactly. PTX: `cvt.rn.f16x2.", $ptx, "`.")]
        pub fn $unpack(packed: u16) -> [f32; 2] {
            arch::$unpack(packed)
        }

        #[doc = concat!("Rounds each to the nearest; saturates at ", $largest, " of either sign.")]
        #[doc = concat!("PTX: `cvt.rn.satfinite.", $ptx, ".f32`.")]
        pub fn $pack(values: [f32; 2]) -> u16 {
            arch::$pack(values)
        }
    )* };
}

f8_types! {
    F8E4M3 "e4m3x2" "448": f8e4m3_to_f32 f32_to_f8e4m3 f8e4m3x2_to_f32 f32_to_f8e4m3x2;
    F8E5M2 "e5m2x2" "57,344": f8e5m2_to_f32 f32_to_f8e5m2 f8e5m2x2_to_f32 f32_to_f8e5m2x2;
}
