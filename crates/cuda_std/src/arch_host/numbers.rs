//! Arithmetic by the standard library and the crates `half` and `float8`.

use devcomm_types::{F8E4M3, F8E5M2};
use half::{bf16, f16};

#[inline]
pub(crate) fn f16_to_f32(value: f16) -> f32 {
    value.to_f32()
}

#[inline]
pub(crate) fn f32_to_f16(value: f32) -> f16 {
    f16::from_f32(value)
}

#[inline]
pub(crate) fn f32_to_bf16(value: f32) -> bf16 {
    bf16::from_f32(value)
}

#[inline]
pub(crate) fn f32_to_f16x2([low, high]: [f32; 2]) -> u32 {
    u32::from(f16::from_f32(low).to_bits()) | u32::from(f16::from_f32(high).to_bits()) << 16
}

#[inline]
pub(crate) fn f32_to_bf16x2([low, high]: [f32; 2]) -> u32 {
    u32::from(bf16::from_f32(low).to_bits()) | u32::from(bf16::from_f32(high).to_bits()) << 16
}

macro_rules! f8_types {
    ($($type:ident $unpack:ident $pack:ident;)*) => { $(
        #[inline]
        pub(crate) fn $unpack(packed: u16) -> [f32; 2] {
            packed.to_le_bytes().map(|bits| $type::from_bits(bits).to_f32())
        }

        #[inline]
        pub(crate) fn $pack(values: [f32; 2]) -> u16 {
            u16::from_le_bytes(values.map(|value| $type::from_f32(value).to_bits()))
        }
    )* };
}

f8_types! {
    F8E4M3 f8e4m3x2_to_f32 f32_to_f8e4m3x2;
    F8E5M2 f8e5m2x2_to_f32 f32_to_f8e5m2x2;
}

macro_rules! floats {
    ($($type:ident)*) => { $(
        pub(crate) mod $type {
            floats!($type: mul_add(a, b); sqrt(); floor(); ceil(); trunc(); round();
                round_ties_even(););
        }
    )* };
    ($type:ident: $($name:ident($($arg:ident),*);)*) => { $(
        #[inline]
        pub(crate) fn $name(x: $type $(, $arg: $type)*) -> $type {
            x.$name($($arg),*)
        }
    )* };
}

floats!(f32 f64);

#[inline]
pub(crate) fn rcp_ftz(x: f32) -> f32 {
    x.recip()
}

#[inline]
pub(crate) fn exp2_ftz(x: f32) -> f32 {
    x.exp2()
}

#[inline]
pub(crate) fn rsqrt(x: f32) -> f32 {
    x.sqrt().recip()
}

macro_rules! approximations {
    ($($name:ident)*) => { $(
        #[inline]
        pub(crate) fn $name(x: f32) -> f32 {
            x.$name()
        }
    )* };
}

approximations!(recip exp2 log2 sin cos tanh);
