//! What is used wrongly does not compile, and the message says why.

use std::io::Write;
use std::process::Command;

/// The compiler whose messages are in `tests/ui/*.stderr`; others word some lines differently.
const COMPILER: &str = "rustc 1.95.";

#[test]
fn wrong_uses_do_not_compile() {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = Command::new(rustc).arg("--version").output().unwrap().stdout;
    let version = String::from_utf8_lossy(&version);
    if !version.starts_with(COMPILER) {
        let (name, version) = ("wrong_uses_do_not_compile", version.trim());
        let reason = format!("the messages are those of {COMPILER}x, this is {version}");
        // Past the test harness, to whoever counts.
        let _ = writeln!(std::io::stdout(), "SKIPPED {name}: {reason}");
        return;
    }
    let cases = trybuild::TestCases::new();
    cases.pass("tests/ui/right_*.rs");
    cases.compile_fail("tests/ui/wrong_*.rs");
}
