use cuda_std::convert::f32_to_f8e4m3x2;

use super::to_f8e4m3;

#[test]
fn floats_are_rounded_to_8_bits_as_by_the_instruction() {
    // Numbers all over the range, and those around each number with 4 bits of mantissa: the
    // results and the ties between them.
    let all = (0..=u32::MAX).step_by(65_521);
    let ties = (0..=u32::MAX).step_by(1 << 19);
    let around = ties.flat_map(|tie| [tie.wrapping_sub(1), tie, tie.wrapping_add(1)]);
    for value in all.chain(around).map(f32::from_bits).filter(|value| !value.is_nan()) {
        let [want, _] = f32_to_f8e4m3x2([value, 0.0]).to_le_bytes();
        assert_eq!(to_f8e4m3(value), want, "{value:e}");
    }
    assert_eq!(to_f8e4m3(f32::NAN), 0x7f);
}
