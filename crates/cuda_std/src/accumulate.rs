//! Elements in a type with enough room to reduce them in, one by one and by vectors.

use core::convert::identity;

use devcomm_types::{Element, F8E4M3, F8E5M2};
use half::{bf16, f16};

use crate::convert;
use crate::reduce::Number;
use crate::vector::Vec16;

/// An element that can be reduced: in `f32` where it is a float of 16 or 8 bits, in its own type
/// otherwise.
///
/// NCCL reduces floats of 8 bits in `f16`. `f32` is never less accurate, does not overflow, and is
/// a type that operators can be written in; a result that needs no rounding is the same.
pub trait Accumulate: Element {
    /// One element while it is reduced.
    type Acc: Number;
    /// A vector while it is reduced: an array of [`Vec16::LANES`] times [`Self::Acc`].
    type Wide: Copy;

    /// The element in the wider type; exact.
    fn to_acc(self) -> Self::Acc;
    /// The result as an element, rounded to the nearest. Beyond the range: infinity, for floats of
    /// 8 bits the largest number.
    fn from_acc(acc: Self::Acc) -> Self;

    /// Every lane in the wider type; exact.
    fn widen(vector: Vec16<Self>) -> Self::Wide;
    /// The lanes as elements, each as by [`Self::from_acc`].
    fn narrow(wide: Self::Wide) -> Vec16<Self>;

    /// Puts `f` of each lane in its place.
    fn map(wide: &mut Self::Wide, f: impl Fn(Self::Acc) -> Self::Acc);
    /// Puts `f` of each lane and the other's in its place.
    fn zip(wide: &mut Self::Wide, other: Self::Wide, f: impl Fn(Self::Acc, Self::Acc) -> Self::Acc);

    /// Adds a vector, lane by lane; integers wrap around.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn add(wide: &mut Self::Wide, vector: Vec16<Self>) {
        Self::zip(wide, Self::widen(vector), Number::wrapping_add);
    }
}

/// The methods that all arrays share, and an element's conversions. Counted loops, which unroll
/// before anything else can go wrong with them.
macro_rules! lanes {
    ($acc:ty, $lanes:literal, $to_acc:path, $from_acc:path) => {
        type Acc = $acc;
        type Wide = [$acc; $lanes];

        #[cfg_attr(target_arch = "nvptx64", inline(always))]
        fn to_acc(self) -> $acc {
            $to_acc(self)
        }

        #[cfg_attr(target_arch = "nvptx64", inline(always))]
        fn from_acc(acc: $acc) -> Self {
            $from_acc(acc)
        }

        #[cfg_attr(target_arch = "nvptx64", inline(always))]
        fn map(wide: &mut Self::Wide, f: impl Fn($acc) -> $acc) {
            let mut i = 0;
            while i < $lanes {
                wide[i] = f(wide[i]);
                i += 1;
            }
        }

        #[cfg_attr(target_arch = "nvptx64", inline(always))]
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

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn widen(vector: Vec16<Self>) -> [f32; 4] {
        vector.to_bits().map(f32::from_bits)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn narrow(wide: [f32; 4]) -> Vec16<Self> {
        Vec16::from_bits(wide.map(f32::to_bits))
    }
}

macro_rules! halves {
    ($($type:ty: $to:ident $from:ident $unpack:ident $pack:ident;)*) => { $(
        impl Accumulate for $type {
            lanes!(f32, 8, convert::$to, convert::$from);

            #[cfg_attr(target_arch = "nvptx64", inline(always))]
            fn widen(vector: Vec16<Self>) -> [f32; 8] {
                let [[a, b], [c, d], [e, f], [g, h]] = vector.to_bits().map(convert::$unpack);
                [a, b, c, d, e, f, g, h]
            }

            #[cfg_attr(target_arch = "nvptx64", inline(always))]
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

macro_rules! quarters {
    ($($type:ty: $to:ident $from:ident $unpack:ident $pack:ident;)*) => { $(
        impl Accumulate for $type {
            lanes!(f32, 16, convert::$to, convert::$from);

            #[cfg_attr(target_arch = "nvptx64", inline(always))]
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

            #[cfg_attr(target_arch = "nvptx64", inline(always))]
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

quarters! {
    F8E4M3: f8e4m3_to_f32 f32_to_f8e4m3 f8e4m3x2_to_f32 f32_to_f8e4m3x2;
    F8E5M2: f8e5m2_to_f32 f32_to_f8e5m2 f8e5m2x2_to_f32 f32_to_f8e5m2x2;
}

macro_rules! as_they_are {
    ($($type:ty, $lanes:literal;)*) => { $(
        impl Accumulate for $type {
            lanes!($type, $lanes, identity, identity);

            #[cfg_attr(target_arch = "nvptx64", inline(always))]
            fn widen(vector: Vec16<Self>) -> Self::Wide {
                let mut wide = [0 as $type; $lanes];
                let mut i = 0;
                while i < $lanes {
                    wide[i] = vector.lane(i);
                    i += 1;
                }
                wide
            }

            #[cfg_attr(target_arch = "nvptx64", inline(always))]
            fn narrow(wide: Self::Wide) -> Vec16<Self> {
                Vec16::from_fn(|i| wide[i])
            }
        }
    )* };
}

as_they_are! {
    f64, 2;
    i64, 2;
    u64, 2;
    i32, 4;
    u32, 4;
    i8, 16;
    u8, 16;
}
