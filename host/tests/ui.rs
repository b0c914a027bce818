//! A launch with wrong arguments does not compile, and the message says which.

#[test]
fn wrong_launches_do_not_compile() {
    let cases = trybuild::TestCases::new();
    cases.pass("tests/ui/right_launch.rs");
    cases.compile_fail("tests/ui/wrong_*.rs");
}
