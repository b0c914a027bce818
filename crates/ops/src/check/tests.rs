//! Tests of checks of arguments.

use super::*;

pub(crate) fn message<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => "it was accepted".to_owned(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_matrix_that_is_too_short_or_not_aligned_is_refused_by_its_name() {
    assert!(check_len("A", 56, 7, 8).is_ok() && check_alignment("A", 0x100).is_ok());
    assert!(message(check_len("A", 55, 7, 8)).contains("A has 55 elements"));
    assert!(message(check_alignment("C", 0x108)).contains("C begins at 0x108"));
    assert!(message(check_len("B", usize::MAX, usize::MAX, 2)).contains("B has"));
}
