//! Conversions of elements and vectors to the type that they are reduced in, and back.

use core::convert::identity;

use devcomm_types::{Element, F8E4M3, F8E5M2};
use half::{bf16, f16};

use crate::convert;
use crate::reduce::Number;
use crate::vector::Vec16;

/// An element type that can be reduced: in `f32` for 16-bit and 8-bit floats, in its own type
/// otherwise.
///
/// NCCL reduces 8-bit floats in `f16`. `f32` is at least as accurate, does not overflow, and has
/// Rust's operators; a result that is exact in `f16` is the same.
pub trait Accumulate: Element {
    /// The type that an element is reduced in.
    type Acc: Number;
    /// The type that a vector is reduced in: an array of [`Vec16::LANES`] [`Self::Acc`]s.
    type Wide: Copy + AsRef<[Self::Acc]> + AsMut<[Self::Acc]>;

    /// Converts the element; exact.
    fn to_acc(self) -> Self::Acc;
    /// Converts a result, rounded to the nearest. Overflow gives infinity, or for 8-bit floats the
    /// largest finite number.
    fn from_acc(acc: Self::Acc) -> Self;

    /// Converts every lane; exact.
    fn widen(vector: Vec16<Self>) -> Self::Wide;
    /// Converts every lane back, as [`Self::from_acc`] does.
    fn narrow(wide: Self::Wide) -> Vec16<Self>;

    /// Replaces each lane by `f(lane)`.
    fn map(wide: &mut Self::Wide, f: impl Fn(Self::Acc) -> Self::Acc);
    /// Replaces each lane by `f(lane, the same lane of other)`.
    fn zip(wide: &mut Self::Wide, other: Self::Wide, f: impl Fn(Self::Acc, Self::Acc) -> Self::Acc);

    /// Adds a vector, lane by lane; integers wrap around.
    fn add(wide: &mut Self::Wide, vector: Vec16<Self>) {
        Self::zip(wide, Self::widen(vector), Number::wrapping_add);
    }
}

/// The conversions of one element, and the methods that are the same for all numbers of lanes.
/// Their loops count with `while`, which LLVM unrolls early.
macro_rules! lanes {
    ($acc:ty, $lanes:literal, $to_acc:path, $from_acc:path) => {
        type Acc = $acc;
        type Wide = [$acc; $lanes];

        fn to_acc(self) -> $acc {
            $to_acc(self)
        }

        fn from_acc(acc: $acc) -> Self {
            $from_acc(acc)
        }

        fn map(wide: &mut Self::Wide, f: impl Fn($acc) -> $acc) {
            let mut i = 0;
            while i < $lanes {
                wide[i] = f(wide[i]);
                i += 1;
            }
        }

        fn zip(wide: &mut Self::Wide, other: Self::Wide, f: impl Fn($acc, $acc) -> $acc) {
            let mut i = 0;
            while i < $lanes {
                wide[i] = f(wide[i], other[i]);
                i += 1;
            }
        }
    };
}

impl Accumulate for f32 {
    lanes!(f32, 4, identity, identity);

    fn widen(vector: Vec16<Self>) -> [f32; 4] {
        vector.to_bits().map(f32::from_bits)
    }

    fn narrow(wide: [f32; 4]) -> Vec16<Self> {
        Vec16::from_bits(wide.map(f32::to_bits))
    }
}

macro_rules! halves {
    ($($type:ty: $to:ident $from:ident $unpack:ident $pack:ident;)*) => { $(
        impl Accumulate for $type {
            lanes!(f32, 8, convert::$to, convert::$from);

            fn widen(vector: Vec16<Self>) -> [f32; 8] {
                let [[a, b], [c, d], [e, f], [g, h]] = vector.to_bits().map(convert::$unpack);
                [a, b, c, d, e, f, g, h]
            }

            fn narrow([a, b, c, d, e, f, g, h]: [f32; 8]) -> Vec16<Self> {
                Vec16::from_bits([[a, b], [c, d], [e, f], [g, h]].map(convert::$pack))
            }
        }
    )* };
}

halves! {
    f16: f16_to_f32 f32_to_f16 f16x2_to_f32 f32_to_f16x2;
    bf16: bf16_to_f32 f32_to_bf16 bf16x2_to_f32 f32_to_bf16x2;
}

macro_rules! f8_types {
    ($($type:ty: $to:ident $from:ident $unpack:ident $pack:ident;)*) => { $(
        impl Accumulate for $type {
            lanes!(f32, 16, convert::$to, convert::$from);

            fn widen(vector: Vec16<Self>) -> [f32; 16] {
                let mut wide = [0.0; 16];
                let bits = vector.to_bits();
                let mut i = 0;
                while i < 4 {
                    [wide[4 * i], wide[4 * i + 1]] = convert::$unpack(bits[i] as u16);
                    [wide[4 * i + 2], wide[4 * i + 3]] = convert::$unpack((bits[i] >> 16) as u16);
                    i += 1;
                }
                wide
            }

            fn narrow(wide: [f32; 16]) -> Vec16<Self> {
                let mut bits = [0; 4];
                let mut i = 0;
                while i < 4 {
                    let low = convert::$pack([wide[4 * i], wide[4 * i + 1]]);
                    let high = convert::$pack([wide[4 * i + 2], wide[4 * i + 3]]);
                    bits[i] = u32::from(low) | u32::from(high) << 16;
                    i += 1;
                }
                Vec16::from_bits(bits)
            }
        }
    )* };
}

f8_types! {
    F8E4M3: f8e4m3_to_f32 f32_to_f8e4m3 f8e4m3x2_to_f32 f32_to_f8e4m3x2;
    F8E5M2: f8e5m2_to_f32 f32_to_f8e5m2 f8e5m2x2_to_f32 f32_to_f8e5m2x2;
}

macro_rules! unwidened {
    ($($type:ty, $lanes:literal;)*) => { $(
        impl Accumulate for $type {
            lanes!($type, $lanes, identity, identity);

            fn widen(vector: Vec16<Self>) -> Self::Wide {
                let mut wide = [0 as $type; $lanes];
                let mut i = 0;
                while i < $lanes {
                    wide[i] = vector.lane(i);
                    i += 1;
                }
                wide
            }

            fn narrow(wide: Self::Wide) -> Vec16<Self> {
                Vec16::from_fn(|i| wide[i])
            }
        }
    )* };
}

unwidened! {
    f64, 2;
    i64, 2;
    u64, 2;
    i32, 4;
    u32, 4;
    i8, 16;
    u8, 16;
}
