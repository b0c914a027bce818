use super::*;

#[test]
fn rusts_format_becomes_printfs() {
    struct Text;
    impl Pieces for Text {
        const PIECES: &'static [&'static str] = &["100% of ", ": ", " at ", "\n"];
    }
    const FORMAT: [u8; super::FORMAT] = printf_format::<Text, (u32, f32, *const u8)>();
    let text = std::ffi::CStr::from_bytes_until_nul(&FORMAT).unwrap();
    assert_eq!(text, c"100%% of %llu: %g at %p\n");
}

#[test]
fn a_value_fills_eight_bytes_as_its_specifier_reads_them() {
    (-1i8, 1.5f32, 7u16, f16::ONE).with_slots(|slots| {
        let one = 1f64.to_bits();
        assert_eq!(slots, [u64::MAX, 1.5f64.to_bits(), 7, one]);
    });
}
