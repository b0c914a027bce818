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
