use super::*;

#[test]
fn the_workspace_has_a_place_for_each_strip_of_each_rank() {
    // One tile: two strips, one for each of two ranks, each from two ranks.
    let one = workspace::<f32>(1, 1, 2).unwrap();
    assert_eq!(one, GemmWorkspace { partials: 2 * 64 * 128, flags: 2 + FIRST_FLAG });
    // 32 x 32 tiles: the size of C in f32, per rank.
    let square = workspace::<f32>(4096, 4096, 4).unwrap();
    assert_eq!(square.partials, 4096 * 4096);
    assert_eq!(square.flags, 2048 + FIRST_FLAG);
}

/// bf16 takes half of the bytes, and e4m3 a quarter and two bytes for each 64 elements.
#[test]
fn smaller_types_take_less_workspace() {
    let words = workspace::<bf16>(4096, 4096, 4).unwrap().partials;
    assert_eq!(words, 4096 * 4096 / 2);
    let words = workspace::<F8E4M3>(4096, 4096, 4).unwrap().partials;
    assert_eq!(words, 4096 * 4096 / 4 + 4096 * 4096 / 128);
}

#[test]
fn what_cannot_be_counted_has_no_workspace() {
    assert_eq!(workspace::<bf16>(usize::MAX, usize::MAX, 2), None);
    assert_eq!(workspace::<bf16>(1 << 31, 1 << 31, 2), None);
}
