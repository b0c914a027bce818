//! Tests of the choice among plans by their times.

use super::*;

#[test]
fn the_expected_plan_is_kept_unless_another_is_faster_by_more_than_noise() {
    let of = |times: [f32; 3], expected| choose(&['a', 'b', 'c'], &times, expected);
    assert_eq!(of([3.0, 1.0, 2.0], 'a'), 'b');
    assert_eq!(of([1.01, 1.0, 2.0], 'a'), 'a');
    assert_eq!(of([1.01, 1.0, 2.0], 'c'), 'b');
    assert_eq!(of([2.0, 1.0, 3.0], 'x'), 'b');
    assert_eq!(choose(&[], &[], 'a'), 'a');
}
