//! Tests of vectors, their sums, and conversions of 16-bit and 8-bit floats.

use std::fmt::Debug;

use cuda_std::convert;
use cuda_std::prelude::*;
use cuda_std::reduce::Number;
use devcomm_types::{F8E4M3, F8E5M2};

/// Checks that elements in memory and in a vector are the same bytes in the same order.
fn lanes_are_memory<T: Accumulate + PartialEq + Debug, const N: usize>(elements: [T; N]) {
    assert_eq!(N, Vec16::<T>::LANES);
    assert_eq!(size_of::<[T; N]>(), size_of::<Vec16<T>>());
    let vector = Vec16::from_fn(|i| elements[i]);
    for (i, element) in elements.iter().enumerate() {
        assert_eq!(vector.lane(i), *element);
    }
    // SAFETY: 16 bytes of plain old data each.
    let bytes = |p: *const u8| unsafe { std::slice::from_raw_parts(p, 16) }.to_vec();
    assert_eq!(bytes((&raw const vector).cast()), bytes(elements.as_ptr().cast()));
    assert_eq!(T::narrow(T::widen(vector)), vector, "widening is exact");
    assert_eq!(Vec16::<T>::from_bits(vector.to_bits()), vector);
    let mut sum = T::widen(vector);
    T::add(&mut sum, vector);
    let doubled = T::narrow(sum);
    for (i, element) in elements.iter().enumerate() {
        let acc = element.to_acc().wrapping_add(element.to_acc());
        assert_eq!(doubled.lane(i), T::from_acc(acc), "a vector's sum equals its elements' sums");
    }
}

#[test]
fn a_vector_is_its_elements_in_the_order_of_memory() {
    lanes_are_memory([1.5f32, -0.0, f32::MAX, 4.0]);
    lanes_are_memory([1.5f64, f64::MIN_POSITIVE]);
    lanes_are_memory([1u64, u64::MAX]);
    lanes_are_memory([-1i64, i64::MIN]);
    lanes_are_memory([1u32, 2, u32::MAX, 0]);
    lanes_are_memory([-1i32, 2, i32::MIN, i32::MAX]);
    lanes_are_memory(std::array::from_fn::<u8, 16, _>(|i| 17 * i as u8));
    lanes_are_memory(std::array::from_fn::<i8, 16, _>(|i| (16 * i + 5) as u8 as i8));
    let floats = [0.0, -1.0, 2.5, 1e-7, 3e4, -0.125, 7.0, 1.0 / 3.0];
    lanes_are_memory(floats.map(f16::from_f32));
    lanes_are_memory(floats.map(bf16::from_f32));
    let floats: [f32; 16] = std::array::from_fn(|i| (i as f32 - 7.0) / 3.0);
    lanes_are_memory(floats.map(F8E4M3::from_f32));
    lanes_are_memory(floats.map(F8E5M2::from_f32));
}

#[test]
#[should_panic(expected = "fewer lanes")]
fn a_lane_beyond_the_vector_is_refused() {
    Vec16::splat(1.0f32).lane(4);
}

#[test]
fn integer_sums_wrap_around() {
    let mut sum = <u8 as Accumulate>::widen(Vec16::splat(200));
    u8::add(&mut sum, Vec16::splat(100));
    assert_eq!(u8::narrow(sum), Vec16::splat(44));
}

#[test]
fn half_precision_sums_round_once() {
    // 1 + 2^-12 + 2^-12 + .. is 1 if each step rounds to `f16`, and 1.5 if only the result does.
    let tiny = f16::from_f32(1.0 / 4096.0);
    let mut sum = f16::widen(Vec16::splat(f16::ONE));
    for _ in 0..2048 {
        f16::add(&mut sum, Vec16::splat(tiny));
    }
    assert_eq!(f16::narrow(sum), Vec16::splat(f16::from_f32(1.5)));
}

#[test]
fn every_half_survives_widening_and_narrowing() {
    for bits in 0..=u16::MAX {
        let half = f16::from_bits(bits);
        let back = convert::f32_to_f16(convert::f16_to_f32(half));
        assert!(half.is_nan() && back.is_nan() || back.to_bits() == bits);
        let half = bf16::from_bits(bits);
        let back = convert::f32_to_bf16(convert::bf16_to_f32(half));
        assert!(half.is_nan() && back.is_nan() || back.to_bits() == bits);
        assert_eq!(convert::bf16_to_f32(half).to_bits(), u32::from(bits) << 16);
    }
}

#[test]
fn packed_halves_hold_the_first_in_the_low_bits() {
    assert_eq!(convert::f32_to_f16x2([1.0, -2.0]), 0xc000_3c00);
    assert_eq!(convert::f16x2_to_f32(0xc000_3c00), [1.0, -2.0]);
    assert_eq!(convert::f32_to_bf16x2([1.0, -2.0]), 0xc000_3f80);
    assert_eq!(convert::bf16x2_to_f32(0xc000_3f80), [1.0, -2.0]);
}

#[test]
fn every_float_of_8_bits_survives_widening_and_narrowing() {
    for bits in 0..=u8::MAX {
        let float = F8E4M3::from_bits(bits);
        let back = convert::f32_to_f8e4m3(convert::f8e4m3_to_f32(float));
        let [nan, still] = [float, back].map(|float| float.to_f32().is_nan());
        assert!(nan && still || back.to_bits() == bits, "e4m3 {bits:#x}");
        let float = F8E5M2::from_bits(bits);
        let back = convert::f32_to_f8e5m2(convert::f8e5m2_to_f32(float));
        // Narrowing to 8 bits never gives infinity.
        let wanted = if float.to_f32().is_infinite() { bits - 1 } else { bits };
        let [nan, still] = [float, back].map(|float| float.to_f32().is_nan());
        assert!(nan && still || back.to_bits() == wanted, "e5m2 {bits:#x}");
    }
}

#[test]
fn floats_of_8_bits_beyond_the_range_are_the_largest_number() {
    assert_eq!(convert::f32_to_f8e4m3(1e9).to_f32(), 448.0);
    assert_eq!(convert::f32_to_f8e4m3(f32::NEG_INFINITY).to_f32(), -448.0);
    assert_eq!(convert::f32_to_f8e5m2(1e9).to_f32(), 57_344.0);
    assert_eq!(convert::f32_to_f8e4m3x2([1.0, -2.0]), 0xc038);
    assert_eq!(convert::f8e4m3x2_to_f32(0xc038), [1.0, -2.0]);
    assert_eq!(convert::f32_to_f8e5m2x2([1.0, -2.0]), 0xc03c);
    assert_eq!(convert::f8e5m2x2_to_f32(0xc03c), [1.0, -2.0]);
}

#[test]
fn narrowing_keeps_nans_and_the_signs_of_zeros() {
    use half::{bf16, f16};

    let nan = f32::from_bits(0xffc1_2345);
    assert!(convert::f32_to_f16(nan).is_nan() && convert::f32_to_bf16(nan).is_nan());
    // All bits of the payload are lost in 16.
    let nan = f32::from_bits(0x7f80_0001);
    assert!(convert::f32_to_f16(nan).is_nan() && convert::f32_to_bf16(nan).is_nan());
    assert!(convert::f32_to_f8e4m3(nan).to_f32().is_nan());
    assert!(convert::f32_to_f8e5m2(nan).to_f32().is_nan());
    for zero in [0.0, -0.0_f32] {
        let sign = zero.is_sign_negative();
        assert_eq!(convert::f32_to_f16(zero).to_bits(), u16::from(sign) << 15);
        assert_eq!(convert::f32_to_bf16(zero).to_bits(), u16::from(sign) << 15);
        assert_eq!(convert::f32_to_f8e4m3(zero).to_bits(), u8::from(sign) << 7);
        assert_eq!(convert::f32_to_f8e5m2(zero).to_bits(), u8::from(sign) << 7);
    }
    assert_eq!(convert::f32_to_f16(1e9), f16::INFINITY);
    assert_eq!(convert::f32_to_bf16(f32::MAX), bf16::INFINITY);
    assert_eq!(convert::f32_to_f8e4m3(f32::INFINITY).to_f32(), 448.0);
    assert_eq!(convert::f32_to_f8e5m2(f32::NEG_INFINITY).to_f32(), -57_344.0);
}
