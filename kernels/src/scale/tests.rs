use cuda_std::vector::{Accumulate, Vec16};
use devcomm_types::F8E4M3;

use super::*;

/// Returns a number after quantisation with the scale of the largest one, and back.
fn round_trip(number: f32, largest: f32) -> f32 {
    let scale = Scale::of(largest);
    let sent: Vec16<F8E4M3> = F8E4M3::narrow([number * scale.inverse(); 16]);
    let [_, of_sent] = Scale::unpack(Scale::pack([Scale::ONE, scale]));
    F8E4M3::widen(sent)[0] * of_sent
}

#[test]
fn an_error_is_at_most_a_sixteenth_or_a_little_of_the_largest_number() {
    for largest in [3.0e38, 1.0e30, 1792.0, 1793.0, 1.0, 1.0e-30, f32::MIN_POSITIVE] {
        let mut number = largest;
        while number > 1e-9 * largest && number > f32::MIN_POSITIVE {
            let off = (round_trip(number, largest) - number).abs();
            let bound = (number / 16.0).max(largest / 131_072.0);
            assert!(off <= bound, "{number} with the scale of {largest} is off by {off}");
            number *= 0.83;
        }
    }
    assert_eq!(round_trip(448.0, 448.0), 448.0);
    assert_eq!(round_trip(0.0, 0.0), 0.0);
}

#[test]
fn infinities_and_nan_stay() {
    assert_eq!(round_trip(f32::NEG_INFINITY, f32::INFINITY), f32::NEG_INFINITY);
    assert!(round_trip(f32::NAN, 1.0).is_nan());
}

#[test]
fn the_largest_finite_numbers_stay_finite() {
    for bits in [0x7f60_0000, 0x7f60_0001, 0x7f78_0000, 0x7f7f_0000, f32::MAX.to_bits()] {
        let number = f32::from_bits(bits);
        for signed in [number, -number] {
            assert_eq!(round_trip(signed, number), 448_f32.copysign(signed) * 2_f32.powi(119));
        }
        assert_eq!(round_trip(1.0e37, number), round_trip(1.0e37, 448.0 * 2_f32.powi(119)));
    }
}
