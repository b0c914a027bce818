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

macro_rules! halves {
    ($($pack:ident $instruction:literal;)*) => { $(
        pub(crate) fn $pack([low, high]: [f32; 2]) -> u32 {
            let packed;
            // SAFETY: the instruction accesses registers alone.
            unsafe {
                asm!(
                    concat!($instruction, " {}, {}, {};"),
                    out(reg32) packed,
                    in(reg32) high,
                    in(reg32) low,
                    options(pure, nomem, nostack),
                );
            }
            packed
        }
    )* };
}

halves! {
    f32_to_f16x2 "cvt.rn.f16x2.f32";
    f32_to_bf16x2 "cvt.rn.bf16x2.f32";
}

macro_rules! f8_types {
    ($($ptx:literal $unpack:ident $pack:ident;)*) => { $(
        pub(crate) fn $unpack(packed: u16) -> [f32; 2] {
            let halves: u32;
            // SAFETY: the instruction accesses registers alone.
            unsafe {
                asm!(
                    concat!("cvt.rn.f16x2.", $ptx, " {}, {};"),
                    out(reg32) halves,
                    in(reg16) packed,
                    options(pure, nomem, nostack),
                );
            }
            [halves as u16, (halves >> 16) as u16].map(|bits| f16::from_bits(bits) as f32)
        }

        pub(crate) fn $pack([low, high]: [f32; 2]) -> u16 {
            let packed;
            // SAFETY: the instruction accesses registers alone.
            unsafe {
                asm!(
                    concat!("cvt.rn.satfinite.", $ptx, ".f32 {}, {}, {};"),
                    out(reg16) packed,
                    in(reg32) high,
                    in(reg32) low,
                    options(pure, nomem, nostack),
                );
            }
            packed
        }
    )* };
}

f8_types! {
    "e4m3x2" f8e4m3x2_to_f32 f32_to_f8e4m3x2;
    "e5m2x2" f8e5m2x2_to_f32 f32_to_f8e5m2x2;
}

pub(crate) mod f32 {
    pub(crate) use core::f32::math::{ceil, floor, mul_add, round, round_ties_even, sqrt, trunc};
}

pub(crate) mod f64 {
    pub(crate) use core::f64::math::{ceil, floor, mul_add, round, round_ties_even, sqrt, trunc};
}

macro_rules! approximations {
    ($($name:ident $instruction:literal;)*) => { $(
        pub(crate) fn $name(x: f32) -> f32 {
            let y;
            // SAFETY: the instruction accesses registers alone.
            unsafe {
                asm!(
                    concat!($instruction, " {}, {};"),
                    out(reg32) y,
                    in(reg32) x,
                    options(pure, nomem, nostack),
                );
            }
            y
        }
    )* };
}

approximations! {
    recip "rcp.approx.f32";
    rcp_ftz "rcp.approx.ftz.f32";
    exp2_ftz "ex2.approx.ftz.f32";
    rsqrt "rsqrt.approx.f32";
    exp2 "ex2.approx.f32";
    log2 "lg2.approx.f32";
    sin "sin.approx.f32";
    cos "cos.approx.f32";
    tanh "tanh.approx.f32";
}
