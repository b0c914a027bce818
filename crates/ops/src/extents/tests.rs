//! Tests of the shapes of products.

use super::*;
use crate::check::tests::message;

#[test]
fn a_shape_that_the_kernel_cannot_do_is_refused_with_the_reason() {
    let new = Extents::with_aligned_rows;
    assert_eq!(new([1, 7, 8]).unwrap().array(), [1, 7, 8]);
    assert!(message(new([0, 7, 8])).contains("nothing to do"));
    assert!(message(new([1, 7, 0])).contains("nothing to do"));
    assert!(message(new([1, 7, 12])).contains("k is 12"));
    assert!(message(new([1, 1 << 32, 8])).contains("is the maximum"));
}
