//! Tests of the command line of the example `moe_layer`.

use std::process::{Command, Output};

/// Runs the example on two simulated GPUs.
fn run(args: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moe_layer"));
    command.args(args.split_whitespace()).env("DEVCOMM_SIMULATE", "2").output().unwrap()
}

/// Asserts that the run fails with an error that contains all `words`.
fn refuses(args: &str, words: &[&str]) {
    let Output { status, stderr, .. } = run(args);
    let stderr = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(1), "{args}: {stderr}");
    assert!(stderr.starts_with("error: ") && !stderr.contains("panicked"), "{args}: {stderr}");
    assert!(words.iter().all(|word| stderr.contains(word)), "{args}: {stderr}");
}

#[test]
fn computes_layers_of_other_sizes() {
    let few = "--tokens 1 --experts 1 --top-k 1";
    for args in [few, "--tokens 3 --hidden 24 --top-k 8", "--throughput --tokens 4"] {
        let Output { status, stdout, stderr } = run(args);
        assert_eq!(status.code(), Some(0), "{args}: {}", String::from_utf8_lossy(&stderr));
        let stdout = String::from_utf8(stdout).unwrap();
        assert!(stdout.contains(": 0 wrong\n"), "{args}: {stdout}");
        assert!(stdout.ends_with("PASS, SIMULATED\n"), "{args}: {stdout}");
    }
}

#[test]
fn refuses_sizes_that_no_layer_has() {
    refuses("--top-k 9", &["--top-k 9", "8 experts"]);
    refuses("--hidden 20", &["20 elements", "multiple of 8"]);
    refuses("--experts 0 --top-k 0", &["0 experts"]);
    refuses("--tokens 0", &["0 tokens"]);
}
