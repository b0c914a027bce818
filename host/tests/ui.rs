//! A launch with wrong arguments does not compile, and the message says which.

use std::process::Command;

/// The compiler whose messages are in `tests/ui/*.stderr`; others word some lines differently.
const COMPILER: &str = "rustc 1.95.";

#[test]
fn wrong_launches_do_not_compile() {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = Command::new(rustc).arg("--version").output().unwrap().stdout;
    let version = String::from_utf8_lossy(&version);
    if !version.starts_with(COMPILER) {
        return println!("SKIPPED: the messages are those of {COMPILER}x, this is {version}");
    }
    let cases = trybuild::TestCases::new();
    cases.pass("tests/ui/right_launch.rs");
    cases.compile_fail("tests/ui/wrong_*.rs");
}
