//! Tests of the reduction operators.

use cuda_std::prelude::*;
use cuda_std::reduce::{
    And, Avg, Max, Min, Or, PreMulSum, Prod, SoftmaxSum, Sum, SumInHalf, Xor, fold,
};

#[test]
fn integers_wrap_around() {
    assert_eq!(fold(Sum, &[200u8, 100]), Some(44));
    assert_eq!(fold(Sum, &[i8::MAX, 1]), Some(i8::MIN));
    assert_eq!(fold(Sum, &[u64::MAX, 2]), Some(1));
    assert_eq!(fold(Prod, &[i32::MAX, 2]), Some(-2));
    assert_eq!(fold(Prod, &[i64::MAX, 4]), Some(-4));
    assert_eq!(fold(PreMulSum(3), &[u8::MAX, 1]), Some(0));
}

#[test]
fn minimum_and_maximum_of_a_nan_and_a_number_are_the_number() {
    for x in [f32::NAN, 1.0, f32::NAN] {
        assert_eq!(fold(Min, &[x, 2.0, f32::NAN]).map(f32::is_nan), Some(false));
        assert_eq!(fold(Max, &[f32::NAN, x, -2.0]).map(f32::is_nan), Some(false));
    }
    let of = |x: f32| f16::from_f32(x);
    assert_eq!(fold(Max, &[of(1.0), f16::NAN, of(3.0)]), Some(of(3.0)));
    assert!(fold(Min, &[f64::NAN; 2]).is_some_and(f64::is_nan));
}

#[test]
fn bits_are_combined() {
    assert_eq!(fold(And, &[0b110u8, 0b011]), Some(0b010));
    assert_eq!(fold(Or, &[0b110i64, 0b011]), Some(0b111));
    assert_eq!(fold(Xor, &[0b110u32, 0b011]), Some(0b101));
}

#[test]
fn an_average_is_divided_at_the_end() {
    let avg = Avg { of: 3 };
    assert_eq!(fold(avg, &[1i32, 2, -10]), Some(-2), "towards zero");
    assert_eq!(fold(avg, &[1u8, 2, 4]), Some(2));
    assert_eq!(fold(Avg { of: 200 }, &[i8::MAX; 1]), Some(0), "a count beyond the type's range");
    assert_eq!(fold(avg, &[1.5f64, 1.5, 3.0]), Some(2.0));
    assert_eq!(fold(Avg { of: 0 }, &[7u64]), Some(0), "no trap");
    // An `f16` sum would be infinite.
    assert_eq!(fold(Avg { of: 2 }, &[f16::MAX; 2]), Some(f16::MAX));
}

#[test]
fn narrow_floats_are_reduced_in_f32_and_rounded_once() {
    let of = f16::from_f32;
    let halves = [of(1.0), of(1.0 / 2048.0), of(1.0 / 2048.0)];
    assert_eq!(fold(Sum, &halves), Some(of(1.0 + 1.0 / 1024.0)));
    assert_eq!(fold(SumInHalf, &halves), Some(of(1.0)), "each step is rounded");
    assert_eq!(fold(PreMulSum(0.5), &halves), Some(of(0.5 + 1.0 / 2048.0)));
    // The partial sum is beyond the type's range.
    let e5m2 = [57_344.0, 57_344.0, -57_344.0].map(F8E5M2::from_f32);
    assert_eq!(fold(Sum, &e5m2).map(|x| x.to_f32()), Some(57_344.0));
    let e4m3 = [448.0, 448.0].map(F8E4M3::from_f32);
    assert_eq!(fold(Sum, &e4m3).map(|x| x.to_f32()), Some(448.0), "saturates");
}

#[test]
fn any_function_is_an_operator() {
    let larger = |a: f32, b: f32| if a.abs() > b.abs() { a } else { b };
    assert_eq!(
        fold::<bf16, _>(larger, &[1.0, -3.0, 2.0].map(bf16::from_f32)),
        Some(bf16::from_f32(-3.0))
    );
    let factor = 2;
    assert_eq!(fold::<i32, _>(|a: i32, b: i32| a.max(factor * b), &[1, 5, 3]), Some(10));
    fn gcd(a: u32, b: u32) -> u32 {
        if b == 0 { a } else { gcd(b, a % b) }
    }
    assert_eq!(fold::<u32, _>(gcd, &[12, 18, 30]), Some(6));
}

#[test]
fn nothing_reduces_to_nothing() {
    assert_eq!(fold::<f32, _>(Sum, &[]), None);
}

#[test]
fn a_masked_row_has_no_weights() {
    let masked = SoftmaxSum::of(f32::NEG_INFINITY);
    for all in [SoftmaxSum::EMPTY, masked, masked.combine(masked)] {
        assert_eq!(all.weight(f32::NEG_INFINITY), 0.0, "{all:?}");
    }
    let half = masked.combine(SoftmaxSum::of(3.0)).combine(SoftmaxSum::of(3.0));
    assert_eq!([half.weight(3.0), half.weight(f32::NEG_INFINITY)], [0.5, 0.0]);
}
