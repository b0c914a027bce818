//! Arithmetic that `core` does not have.
//!
//! [`GpuFloat`] brings the operations that round correctly, for `f32` and `f64`. The functions of this module are the
//! hardware's approximations in `f32`, one or two instructions each, with the error that PTX states; on the host they are
//! the standard library's, so results may differ in the last bits.
//!
//! # Safety model
//!
//! Arithmetic only; safe.
//!
//! # Example
//!
//! ```
//! use cuda_std::{GpuFloat, math};
//! /// The logistic function.
//! fn sigmoid(x: f32) -> f32 {
//!     0.5f32.mul_add(math::tanh(0.5 * x), 0.5)
//! }
//! assert_eq!(sigmoid(0.0), 0.5);
//! ```

use crate::arch;

/// Floating-point operations that round correctly (or are exact), by the names of `std`.
///
/// On the host the inherent methods of `f32` and `f64` have the same names and come first.
pub trait GpuFloat: Copy {
    /// `self * a + b`, rounded once. PTX: `fma.rn`.
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// The square root. PTX: `sqrt.rn`.
    fn sqrt(self) -> Self;
    /// The largest integer up to it.
    fn floor(self) -> Self;
    /// The smallest integer from it.
    fn ceil(self) -> Self;
    /// The integer part.
    fn trunc(self) -> Self;
    /// The nearest integer, halves away from zero.
    fn round(self) -> Self;
    /// What the integer part leaves.
    fn fract(self) -> Self;
}

macro_rules! gpu_float {
    ($($type:ident)*) => { $(
        impl GpuFloat for $type {
            gpu_float!($type: mul_add(a, b); sqrt(); floor(); ceil(); trunc(); round(););

            #[cfg_attr(target_arch = "nvptx64", inline(always))]
            fn fract(self) -> Self {
                self - arch::$type::trunc(self)
            }
        }
    )* };
    ($type:ident: $($name:ident($($arg:ident),*);)*) => { $(
        #[cfg_attr(target_arch = "nvptx64", inline(always))]
        fn $name(self $(, $arg: Self)*) -> Self {
            arch::$type::$name(self $(, $arg)*)
        }
    )* };
}

gpu_float!(f32 f64);

/// `a * b + c`, rounded once. PTX: `fma.rn.f32`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    GpuFloat::mul_add(a, b, c)
}

macro_rules! approximations {
    ($($name:ident: $doc:literal, $error:literal, $ptx:literal;)*) => { $(
        #[doc = concat!($doc, " Error at most ", $error, ". PTX: `", $ptx, "`.")]
        #[cfg_attr(target_arch = "nvptx64", inline(always))]
        pub fn $name(x: f32) -> f32 {
            arch::$name(x)
        }
    )* };
}

approximations! {
    rsqrt: "One over the square root.", "2^-22.9 relative", "rsqrt.approx.f32";
    exp2: "Two to the power of `x`.", "2^-22 relative", "ex2.approx.f32";
    log2: "The logarithm to base 2.", "2^-22 relative (absolute between 0.5 and 2)", "lg2.approx.f32";
    sin: "The sine of radians.", "about 2^-20 absolute within a turn, growing beyond", "sin.approx.f32";
    cos: "The cosine of radians.", "about 2^-20 absolute within a turn, growing beyond", "cos.approx.f32";
    tanh: "The hyperbolic tangent.", "2^-11 relative", "tanh.approx.f32";
}

/// e to the power of `x`: [`exp2`] of `x * log2(e)`, whose error grows with the size of `x`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn exp(x: f32) -> f32 {
    exp2(x * core::f32::consts::LOG2_E)
}

/// The natural logarithm: [`log2`] times `ln(2)`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn ln(x: f32) -> f32 {
    log2(x) * core::f32::consts::LN_2
}
