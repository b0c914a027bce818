//! The errors of `erf` and GELU against references in `f64`.

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI, PI};

use cuda_std::math;

/// Returns the error function to 1e-10: its Taylor series at 0 for `|x|` up to 4.5, the sign of `x`
/// beyond.
fn erf(x: f64) -> f64 {
    if x.abs() > 4.5 {
        return x.signum();
    }
    let (mut sum, mut term, mut n) = (0.0, x, 0.0);
    while term.abs() > 1e-18 {
        sum += term / (2.0 * n + 1.0);
        n += 1.0;
        term *= -x * x / n;
    }
    FRAC_2_SQRT_PI * sum
}

fn numbers() -> impl Iterator<Item = f32> {
    (-120_000..=120_000).map(|i| i as f32 / 10_000.0)
}

/// Returns the largest `error` over the numbers, and the number.
fn worst(error: impl Fn(f32) -> f64) -> (f64, f32) {
    numbers().map(|x| (error(x), x)).max_by(|a, b| a.0.total_cmp(&b.0)).unwrap()
}

#[test]
fn erf_is_right_to_22_bits() {
    let error = |x: f32| match f64::from(math::erf(x)) - erf(x.into()) {
        0.0 => 0.0,
        error => (error / erf(x.into())).abs(),
    };
    let (error, x) = worst(error);
    assert!(error <= 2.0_f64.powi(-22), "2^{} at {x}", error.log2());
    assert!(numbers().all(|x| math::erf(-x) == -math::erf(x)));
    assert_eq!((math::erf(f32::INFINITY), math::erf(f32::NEG_INFINITY)), (1.0, -1.0));
    assert!(math::erf(f32::NAN).is_nan());
    let tiny = f64::from(math::erf(1e-30)) / (FRAC_2_SQRT_PI * 1e-30) - 1.0;
    assert!(tiny.abs() <= 2.0_f64.powi(-22), "{tiny}");
}

#[test]
fn the_logistic_function_has_the_documented_error() {
    let right = |x: f64| 1.0 / (1.0 + (-x).exp());
    let (error, x) = worst(|x| (f64::from(math::sigmoid(x)) - right(x.into())).abs());
    assert!(error < 1.0 / f64::from(1 << 21), "{error:e} at {x}");
    assert_eq!((math::sigmoid(f32::INFINITY), math::sigmoid(f32::NEG_INFINITY)), (1.0, 0.0));
}

#[test]
fn gelu_is_right_to_22_bits_of_one() {
    let right = |x: f64| x * (1.0 + erf(x * FRAC_1_SQRT_2)) / 2.0;
    let (error, x) =
        worst(|x| (f64::from(math::gelu(x)) - right(x.into())).abs() / f64::from(x.abs().max(1.0)));
    assert!(error <= 2.0_f64.powi(-22), "2^{} at {x}", error.log2());
}

#[test]
fn gelu_by_tanh_is_right_to_20_bits_of_one() {
    let right = |x: f64| x * (1.0 + ((2.0 / PI).sqrt() * (x + 0.044715 * x * x * x)).tanh()) / 2.0;
    let (error, x) = worst(|x| {
        (f64::from(math::gelu_tanh(x)) - right(x.into())).abs() / f64::from(x.abs().max(1.0))
    });
    assert!(error <= 2.0_f64.powi(-20), "2^{} at {x}", error.log2());
    assert_eq!((math::gelu_tanh(-40.0), math::gelu_tanh(40.0)), (0.0, 40.0));
}
