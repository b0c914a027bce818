//! Floating-point functions that `core` lacks.
//!
//! [`GpuFloat`] has correctly rounded operations, for `f32` and `f64`. The functions of this module
//! are the hardware's `f32` approximations and functions based on them; their documentation states
//! the errors. On the host they use the standard library, so results may differ in the last bits.
//!
//! # Safety model
//!
//! Arithmetic only; safe.
//!
//! # Example
//!
//! ```
//! use cuda_std::{GpuFloat, math};
//! /// Returns the logistic function of `x`.
//! fn sigmoid(x: f32) -> f32 {
//!     0.5f32.mul_add(math::tanh(0.5 * x), 0.5)
//! }
//! assert_eq!(sigmoid(0.0), 0.5);
//! ```

use crate::arch;

/// Floating-point operations that round correctly (or are exact), with the names of `std`.
///
/// On the host the inherent methods of `f32` and `f64` have the same names and take precedence.
pub trait GpuFloat: Copy {
    /// Returns `self * a + b`, rounded once. PTX: `fma.rn`.
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// Returns the square root. PTX: `sqrt.rn`.
    fn sqrt(self) -> Self;
    /// Returns the largest integer not above `self`.
    fn floor(self) -> Self;
    /// Returns the smallest integer not below `self`.
    fn ceil(self) -> Self;
    /// Returns the integer part.
    fn trunc(self) -> Self;
    /// Returns the nearest integer; ties are rounded away from zero.
    fn round(self) -> Self;
    /// Returns the nearest integer; ties are rounded to the even one. PTX: `cvt.rni`.
    fn round_ties_even(self) -> Self;
    /// Returns the fractional part.
    fn fract(self) -> Self;
}

macro_rules! gpu_float {
    ($($type:ident)*) => { $(
        impl GpuFloat for $type {
            gpu_float!($type: mul_add(a, b); sqrt(); floor(); ceil(); trunc(); round();
                round_ties_even(););

            fn fract(self) -> Self {
                self - arch::$type::trunc(self)
            }
        }
    )* };
    ($type:ident: $($name:ident($($arg:ident),*);)*) => { $(
        fn $name(self $(, $arg: Self)*) -> Self {
            arch::$type::$name(self $(, $arg)*)
        }
    )* };
}

gpu_float!(f32 f64);

/// Returns `a * b + c`, rounded once. PTX: `fma.rn.f32`.
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    GpuFloat::mul_add(a, b, c)
}

macro_rules! approximations {
    ($($name:ident: $doc:literal, $error:literal, $ptx:literal;)*) => { $(
        #[doc = concat!("Returns ", $doc, ". Error at most ", $error, ". PTX: `", $ptx, "`.")]
        pub fn $name(x: f32) -> f32 {
            arch::$name(x)
        }
    )* };
}

approximations! {
    recip: "one over `x`", "2^-23 relative", "rcp.approx.f32";
    rsqrt: "one over the square root", "2^-22.9 relative", "rsqrt.approx.f32";
    exp2: "two to the power of `x`", "2^-22 relative", "ex2.approx.f32";
    log2: "the logarithm to base 2", "2^-22 relative (absolute between 0.5 and 2)",
        "lg2.approx.f32";
    sin: "the sine of `x` radians", "about 2^-20 absolute for |x| up to 2 pi, growing beyond",
        "sin.approx.f32";
    cos: "the cosine of `x` radians", "about 2^-20 absolute for |x| up to 2 pi, growing beyond",
        "cos.approx.f32";
    tanh: "the hyperbolic tangent", "2^-11 relative", "tanh.approx.f32";
}

/// Returns e to the power of `x`: [`exp2`] of `x * log2(e)`, whose error grows with the size of
/// `x`.
pub fn exp(x: f32) -> f32 {
    exp2(x * core::f32::consts::LOG2_E)
}

/// Returns the logistic function, `1 / (1 + exp(-x))`. Error at most 2^-21 absolute; results below
/// 2^-126 are 0. PTX: `ex2.approx.ftz.f32` and `rcp.approx.ftz.f32`.
pub fn sigmoid(x: f32) -> f32 {
    arch::rcp_ftz(1.0 + arch::exp2_ftz(x * -core::f32::consts::LOG2_E))
}

/// Returns the natural logarithm: [`log2`] times `ln(2)`.
pub fn ln(x: f32) -> f32 {
    log2(x) * core::f32::consts::LN_2
}

/// Returns the error function. Error at most 2^-22 relative; `erf(-x) == -erf(x)`.
///
/// It is a polynomial for small `x`, otherwise 1 minus [`exp`] of a polynomial (by N. Juffa).
pub fn erf(x: f32) -> f32 {
    let (t, s) = (x.abs(), x * x);
    if t > 0.927_734_4 {
        let low = fma(-1.728_534_7e-5, t, 3.831_972e-4);
        let high = fma(-3.883_964_4e-3, t, 2.425_462_2e-2);
        let r = [-1.067_778_8e-1, -6.348_467e-1, -1.287_175_1e-1];
        let r = r.into_iter().fold(fma(low, s, high), |r, c| fma(r, t, c));
        (1.0 - exp(fma(r, t, -t))).copysign(x)
    } else {
        let r = [4.991_194_2e-3, -2.676_813_5e-2, 1.128_199_2e-1, -3.761_253_4e-1, 1.283_791_7e-1];
        fma(r.into_iter().fold(-5.967_617e-4, |r, c| fma(r, s, c)), x, x)
    }
}

/// Returns GELU, by the error function: `x * (1 + erf(x / sqrt(2))) / 2`. Error at most
/// `2^-22 * max(1, |x|)` absolute.
pub fn gelu(x: f32) -> f32 {
    let half = 0.5 * x;
    fma(half, erf(x * core::f32::consts::FRAC_1_SQRT_2), half)
}

/// Returns GELU's `tanh` approximation: `x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) / 2`.
/// Error at most `2^-20 * max(1, |x|)` absolute: it uses [`exp`], since [`tanh`] is less accurate.
pub fn gelu_tanh(x: f32) -> f32 {
    // (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 * u)).
    let scale = -2.0 * 0.797_884_6;
    x / (1.0 + exp(scale * fma(0.044_715 * x * x, x, x)))
}
