//! Tests of the types of partial sums.

use super::*;

#[test]
fn types_are_read_as_they_are_written() {
    for wire in Wire::ALL {
        assert_eq!(wire.to_string().parse(), Ok(wire));
    }
    let error = "fp8".parse::<Wire>().unwrap_err().to_string();
    assert!(error.starts_with("`fp8` is no type"), "{error}");
}

#[test]
fn smaller_types_have_larger_errors() {
    let [bf16, f32, e4m3] = Wire::ALL.map(|wire| wire.error_bound(-1.0, 2.0));
    assert_eq!([f32, bf16, e4m3], [0.0, 1.0 / 256.0, 1.0 / 16.0]);
    // A small sum that shares its scale with a large one.
    assert_eq!(Wire::E4m3.error_bound(1e-6, 131_072.0), 1.0);
}

#[test]
fn errors_of_the_smallest_and_largest_sums_are_within_the_bound() {
    let largest = half::bf16::MAX.to_f32();
    for bits in [1, 3, 0x4000, 0x8000, 0x1_8000, 0x7f_8000, 0x80_8000, 0x3f80_8000, 0x7f7f_7fff] {
        let partial = f32::from_bits(bits);
        let error = (half::bf16::from_f32(partial).to_f32() - partial).abs();
        assert!(error <= Wire::Bf16.error_bound(partial, largest), "{partial:e}: {error:e}");
    }
    // The least scale is `2^-126`, and 8-bit floats have a least distance of `2^-9`.
    assert_eq!(Wire::E4m3.error_bound(0.0, 0.0), f32::MIN_POSITIVE / 1024.0);
    // These are rounded to infinity.
    let bound = |wire: Wire, bits| wire.error_bound(f32::from_bits(bits), f32::MAX);
    assert_eq!(bound(Wire::Bf16, 0x7f7f_8000), f32::INFINITY);
    // These become the largest number that is sent: 1.75 * 2^127.
    let lost = f32::MAX - 1.75 * 2_f32.powi(127);
    assert_eq!(bound(Wire::E4m3, f32::MAX.to_bits()), lost);
    assert!(lost > f32::MAX / 16.0);
}
