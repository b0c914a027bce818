//! Tests that wrong uses of the crates do not compile, and that the message says why.
//!
//! One program tests all crates, so that cargo checks their dependencies once.

use std::env;
use std::io::Write;
use std::process::Command;

/// The compiler whose messages are in `*.stderr`; the messages of other versions differ.
const COMPILER: &str = "rustc 1.95.";

/// trybuild sets flags for the cases but not for their dependencies, so cargo would check the
/// dependencies twice. This environment variable takes precedence and is the same for both.
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
        // Bypasses the harness's capture; `cargo xtask test` counts these lines.
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
    for folder in ["cuda_std", "nccl_device", "host"] {
        cases.compile_fail(format!("{folder}/*.rs"));
    }
}
