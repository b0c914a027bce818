//! Sums of vectors in a type with enough room.

use core::num::Wrapping;
use core::ops::{Add, AddAssign};

use devcomm_types::Element;
use half::{bf16, f16};

use crate::convert;
use crate::vector::Vec16;

/// An element that can be summed up: in `f32` for half precision, with wrap-around for integers (as NCCL does).
pub trait Accumulate: Element {
    /// One element while it is summed.
    type Acc: Copy + Add<Output = Self::Acc> + AddAssign;
    /// A vector while it is summed: an array of [`Vec16::LANES`] times [`Self::Acc`].
    type Wide: Copy;

    /// The element in the wider type; exact.
    fn to_acc(self) -> Self::Acc;
    /// The sum as an element, rounded to the nearest.
    fn from_acc(acc: Self::Acc) -> Self;

    /// Every lane in the wider type; exact.
    fn widen(vector: Vec16<Self>) -> Self::Wide;
    /// Adds a vector, lane by lane.
    fn add(wide: &mut Self::Wide, vector: Vec16<Self>);
    /// The sums as elements, each rounded to the nearest.
    fn narrow(wide: Self::Wide) -> Vec16<Self>;
}

/// The lanes of two wide vectors, added.
#[inline(always)]
fn add_lanes<A: Copy + AddAssign, const LANES: usize>(wide: &mut [A; LANES], other: [A; LANES]) {
    let mut i = 0;
    while i < LANES {
        wide[i] += other[i];
        i += 1;
    }
}

impl Accumulate for f32 {
    type Acc = f32;
    type Wide = [f32; 4];

    #[inline(always)]
    fn to_acc(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_acc(acc: f32) -> Self {
        acc
    }

    #[inline(always)]
    fn widen(vector: Vec16<Self>) -> [f32; 4] {
        vector.to_bits().map(f32::from_bits)
    }

    #[inline(always)]
    fn add(wide: &mut [f32; 4], vector: Vec16<Self>) {
        add_lanes(wide, Self::widen(vector));
    }

    #[inline(always)]
    fn narrow(wide: [f32; 4]) -> Vec16<Self> {
        Vec16::from_bits(wide.map(f32::to_bits))
    }
}

macro_rules! halves {
    ($($type:ty: $to:ident $from:ident $unpack:ident $pack:ident;)*) => { $(
        impl Accumulate for $type {
            type Acc = f32;
            type Wide = [f32; 8];

            #[inline(always)]
            fn to_acc(self) -> f32 {
                convert::$to(self)
            }

            #[inline(always)]
            fn from_acc(acc: f32) -> Self {
                convert::$from(acc)
            }

            #[inline(always)]
            fn widen(vector: Vec16<Self>) -> [f32; 8] {
                let [[a, b], [c, d], [e, f], [g, h]] = vector.to_bits().map(convert::$unpack);
                [a, b, c, d, e, f, g, h]
            }

            #[inline(always)]
            fn add(wide: &mut [f32; 8], vector: Vec16<Self>) {
                add_lanes(wide, Self::widen(vector));
            }

            #[inline(always)]
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

macro_rules! lanes_by_lanes {
    ($($type:ty as $acc:ty, $lanes:literal, $to:expr, $from:expr;)*) => { $(
        impl Accumulate for $type {
            type Acc = $acc;
            type Wide = [$acc; $lanes];

            #[inline(always)]
            fn to_acc(self) -> $acc {
                $to(self)
            }

            #[inline(always)]
            fn from_acc(acc: $acc) -> Self {
                $from(acc)
            }

            #[inline(always)]
            fn widen(vector: Vec16<Self>) -> Self::Wide {
                let mut wide = [$to(0 as $type); $lanes];
                let mut i = 0;
                while i < $lanes {
                    wide[i] = $to(vector.lane(i));
                    i += 1;
                }
                wide
            }

            #[inline(always)]
            fn add(wide: &mut Self::Wide, vector: Vec16<Self>) {
                add_lanes(wide, Self::widen(vector));
            }

            #[inline(always)]
            fn narrow(wide: Self::Wide) -> Vec16<Self> {
                Vec16::from_fn(|i| $from(wide[i]))
            }
        }
    )* };
}

lanes_by_lanes! {
    f64 as f64, 2, |v| v, |v| v;
    i64 as Wrapping<i64>, 2, Wrapping, |v: Wrapping<i64>| v.0;
    u64 as Wrapping<u64>, 2, Wrapping, |v: Wrapping<u64>| v.0;
    i32 as Wrapping<i32>, 4, Wrapping, |v: Wrapping<i32>| v.0;
    u32 as Wrapping<u32>, 4, Wrapping, |v: Wrapping<u32>| v.0;
    i8 as Wrapping<i8>, 16, Wrapping, |v: Wrapping<i8>| v.0;
    u8 as Wrapping<u8>, 16, Wrapping, |v: Wrapping<u8>| v.0;
}
