//! Arithmetic: by LLVM operations where they exist, since LLVM can optimise those, otherwise by
//! inline assembly.

use core::arch::asm;

use half::bf16;

/// The crate `half`'s `f16`. In this file `f16` is Rust's primitive type, which LLVM converts.
type Half = half::f16;

pub(crate) fn f16_to_f32(value: Half) -> f32 {
    f16::from_bits(value.to_bits()) as f32
}

pub(crate) fn f32_to_f16(value: f32) -> Half {
    Half::from_bits((value as f16).to_bits())
}

pub(crate) fn f32_to_bf16(value: f32) -> bf16 {
    bf16::from_bits(f32_to_bf16x2([value, 0.0]) as u16)
}

instructions! { [pure nomem nostack]
    fn f32_to_f16x2([low, high]: [f32; 2]) -> u32:
        "cvt.rn.f16x2.f32 {packed}, {high}, {low};",
        in(reg32: high low), out(reg32: packed) => packed;
    fn f32_to_bf16x2([low, high]: [f32; 2]) -> u32:
        "cvt.rn.bf16x2.f32 {packed}, {high}, {low};",
        in(reg32: high low), out(reg32: packed) => packed;
    fn f32_to_f8e4m3x2([low, high]: [f32; 2]) -> u16:
        "cvt.rn.satfinite.e4m3x2.f32 {packed}, {high}, {low};",
        in(reg32: high low), out(reg16: packed) => packed;
    fn f32_to_f8e5m2x2([low, high]: [f32; 2]) -> u16:
        "cvt.rn.satfinite.e5m2x2.f32 {packed}, {high}, {low};",
        in(reg32: high low), out(reg16: packed) => packed;
    fn f8e4m3x2_to_f32(packed: u16) -> [f32; 2]:
        "cvt.rn.f16x2.e4m3x2 {halves}, {packed};",
        in(reg16: packed), out(reg32: halves) => f16x2_to_f32(halves);
    fn f8e5m2x2_to_f32(packed: u16) -> [f32; 2]:
        "cvt.rn.f16x2.e5m2x2 {halves}, {packed};",
        in(reg16: packed), out(reg32: halves) => f16x2_to_f32(halves);

    fn recip(x: f32) -> f32: "rcp.approx.f32 {y}, {x};", in(reg32: x), out(reg32: y) => y;
    fn rcp_ftz(x: f32) -> f32: "rcp.approx.ftz.f32 {y}, {x};", in(reg32: x), out(reg32: y) => y;
    fn exp2_ftz(x: f32) -> f32: "ex2.approx.ftz.f32 {y}, {x};", in(reg32: x), out(reg32: y) => y;
    fn rsqrt(x: f32) -> f32: "rsqrt.approx.f32 {y}, {x};", in(reg32: x), out(reg32: y) => y;
    fn exp2(x: f32) -> f32: "ex2.approx.f32 {y}, {x};", in(reg32: x), out(reg32: y) => y;
    fn log2(x: f32) -> f32: "lg2.approx.f32 {y}, {x};", in(reg32: x), out(reg32: y) => y;
    fn sin(x: f32) -> f32: "sin.approx.f32 {y}, {x};", in(reg32: x), out(reg32: y) => y;
    fn cos(x: f32) -> f32: "cos.approx.f32 {y}, {x};", in(reg32: x), out(reg32: y) => y;
    fn tanh(x: f32) -> f32: "tanh.approx.f32 {y}, {x};", in(reg32: x), out(reg32: y) => y;
}

fn f16x2_to_f32(halves: u32) -> [f32; 2] {
    [halves as u16, (halves >> 16) as u16].map(|bits| f16::from_bits(bits) as f32)
}

pub(crate) mod f32 {
    pub(crate) use core::f32::math::{ceil, floor, mul_add, round, round_ties_even, sqrt, trunc};
}

pub(crate) mod f64 {
    pub(crate) use core::f64::math::{ceil, floor, mul_add, round, round_ties_even, sqrt, trunc};
}
