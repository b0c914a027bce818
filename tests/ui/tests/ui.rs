//! What is used wrongly does not compile, and the message says why.
//!
//! One program for all crates: what they depend on is checked once.

use std::env;
use std::io::Write;
use std::process::Command;

/// The compiler whose messages are in `*.stderr`; others word some lines differently.
const COMPILER: &str = "rustc 1.95.";

/// trybuild checks the dependencies with one set of flags and the cases with another, for which
/// cargo checks the dependencies again. This variable goes before both: it names the latter.
const FLAGS: (&str, &str) = (
    "CARGO_ENCODED_RUSTFLAGS",
    "--cfg\x1ftrybuild\x1f--verbose\x1f-Adead_code\x1f--diagnostic-width=140",
);

#[test]
fn wrong_uses_do_not_compile() {
    let name = "wrong_uses_do_not_compile";
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = Command::new(rustc).arg("--version").output().unwrap().stdout;
    let version = String::from_utf8_lossy(&version);
    if !version.starts_with(COMPILER) {
        let version = version.trim();
        let reason = format!("the messages are those of {COMPILER}x, this is {version}");
        // Past the test harness, to whoever counts.
        let _ = writeln!(std::io::stdout(), "SKIPPED {name}: {reason}");
        return;
    }
    if env::var_os(FLAGS.0).is_none() {
        let mut again = Command::new(env::current_exe().unwrap());
        let output = again.args(["--exact", name]).env(FLAGS.0, FLAGS.1).output().unwrap();
        eprintln!("{}", String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    let cases = trybuild::TestCases::new();
    for of_crate in ["cuda_std", "nccl_device", "host"] {
        cases.compile_fail(format!("{of_crate}/*.rs"));
    }
}
