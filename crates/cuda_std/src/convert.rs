//! Half precision to and from `f32`, by the hardware's `cvt`.
//!
//! `half`'s own conversions are right everywhere but slow on a GPU, where they are integer code; these are one instruction.
//! Narrowing rounds to the nearest, ties to even. A NaN stays a NaN, its payload may not.
//!
//! The packed forms hold two halves in a word, the first in the low 16 bits, as in memory.
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

use half::{bf16, f16};

use crate::arch;

/// Exact. PTX: `cvt.f32.f16`.
#[inline(always)]
pub fn f16_to_f32(value: f16) -> f32 {
    arch::f16_to_f32(value)
}

/// Rounds to the nearest; beyond 65,504 infinity. PTX: `cvt.rn.f16.f32`.
#[inline(always)]
pub fn f32_to_f16(value: f32) -> f16 {
    arch::f32_to_f16(value)
}

/// Exact: a shift.
#[inline(always)]
pub fn bf16_to_f32(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// Rounds to the nearest. PTX: `cvt.rn.bf16.f32`.
#[inline(always)]
pub fn f32_to_bf16(value: f32) -> bf16 {
    arch::f32_to_bf16(value)
}

/// Exact.
#[inline(always)]
pub fn f16x2_to_f32(packed: u32) -> [f32; 2] {
    [packed as u16, (packed >> 16) as u16].map(|bits| f16_to_f32(f16::from_bits(bits)))
}

/// Rounds each to the nearest. PTX: `cvt.rn.f16x2.f32`.
#[inline(always)]
pub fn f32_to_f16x2(values: [f32; 2]) -> u32 {
    arch::f32_to_f16x2(values)
}

/// Exact: a shift and a mask.
#[inline(always)]
pub fn bf16x2_to_f32(packed: u32) -> [f32; 2] {
    [f32::from_bits(packed << 16), f32::from_bits(packed & 0xffff_0000)]
}

/// Rounds each to the nearest. PTX: `cvt.rn.bf16x2.f32`.
#[inline(always)]
pub fn f32_to_bf16x2(values: [f32; 2]) -> u32 {
    arch::f32_to_bf16x2(values)
}
