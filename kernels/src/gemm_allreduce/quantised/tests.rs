use super::*;

#[test]
fn slots_are_counted_for_whole_parts() {
    // 256 vectors, and four of scales.
    assert_eq!(QuantisedParts::slots(1, 8), Some(260));
    assert_eq!(QuantisedParts::slots(17, 257), Some(4 * 260));
    assert_eq!(quantised_part(16, 256, 257), 3 * 260);
    assert_eq!(QuantisedParts::slots(usize::MAX, 1 << 20), None);
}
