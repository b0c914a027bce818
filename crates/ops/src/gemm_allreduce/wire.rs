//! The types in which partial sums are sent.

use crate::plan::names;

/// The type in which the ranks of a [`GemmAllReduce`](super::GemmAllReduce) send partial sums: each
/// rank's product, a sum of its `k` terms in f32. They are added in f32, and the sum is rounded to
/// bf16. As text: `bf16`, `f32` or `e4m3`.
///
/// The rank that adds partial sums rounds its own as it would be sent, so that no element depends
/// on which rank adds it. A single rank sends nothing, and rounds once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Wire {
    /// Each partial sum is rounded to bf16, as a product in bf16 before an all-reduce is.
    #[default]
    Bf16,
    /// Partial sums are sent in f32: twice the bytes of bf16, and one rounding.
    F32,
    /// 8-bit floats with scales, about half the bytes of bf16. Columns `64 * i` to `64 * i + 63` of
    /// a row share a scale: the least power of two, at least `2^-126`, such that 448 times it is no
    /// less than the magnitude of each partial sum. A partial sum is off by up to a sixteenth, or
    /// by more if it is above `1.75 * 2^127`: then it becomes that number
    /// ([`error_bound`](Self::error_bound)). Infinite sums stay infinite, and the others that share
    /// their scale become 0.
    E4m3,
}

impl Wire {
    /// All types.
    pub const ALL: [Self; 3] = [Self::Bf16, Self::F32, Self::E4m3];

    /// Returns the largest error of a finite partial sum when it is added: half a unit in its last
    /// place, or more if it may be rounded to infinity or to the largest number sent. `largest` is
    /// the largest magnitude of the sums that share its scale. An element of C is off by at most
    /// the sum of these errors, what f32 loses, and its own rounding to bf16, `2^-8` of it.
    #[must_use]
    pub fn error_bound(self, partial: f32, largest: f32) -> f32 {
        let half_unit = |bits: i32| partial.abs() * 2_f32.powi(-bits);
        match self {
            Self::F32 => 0.0,
            // Beyond the last finite number by half a unit of it, rounding gives infinity.
            Self::Bf16 if partial.abs() >= (2.0 - 2_f32.powi(-8)) * 2_f32.powi(127) => {
                f32::INFINITY
            }
            // Half of the least distance of bf16's numbers, `2^-133`.
            Self::Bf16 => half_unit(8).max(f32::MIN_POSITIVE * 2_f32.powi(-8)),
            // The least distance of 8-bit floats is `2^-9`, and the scale less than `largest / 224`
            // or `2^-126`.
            Self::E4m3 => {
                let of_scale = (largest * 2_f32.powi(-17)).max(f32::MIN_POSITIVE * 2_f32.powi(-10));
                // Finite numbers are at most `1.75 * 2^127` then.
                half_unit(4).max(of_scale).max(partial.abs() - 1.75 * 2_f32.powi(127))
            }
        }
    }

    /// Returns why a plan was chosen, of the few that there are for this type.
    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::Bf16 => "as no other plan was set that can do it",
            Self::F32 => "as partial sums travel in f32",
            Self::E4m3 => "as partial sums travel in e4m3, each off by up to a sixteenth",
        }
    }
}

names! { Wire "type of partial sums" "bf16, f32 or e4m3": Bf16 "bf16" F32 "f32" E4m3 "e4m3" }

/// Evaluates an expression in which `$type` is the type of partial sums.
macro_rules! by_wire {
    ($wire:expr, $type:ident => $then:expr) => {
        with_type!($wire, $type => $then; {
            Wire::Bf16 => half::bf16, Wire::F32 => f32, Wire::E4m3 => devcomm_types::F8E4M3
        })
    };
}

pub(super) use by_wire;

#[cfg(test)]
mod tests;
