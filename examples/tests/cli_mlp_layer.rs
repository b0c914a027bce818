//! Tests of the command line of the example `mlp_layer`, on simulated GPUs.

use std::process::Command;

/// Runs the example. Returns whether it succeeds, its output and its errors.
fn run(args: &str, gpus: &str) -> (bool, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mlp_layer"));
    command.args(args.split_whitespace()).env("DEVCOMM_SIMULATE", gpus);
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let (stdout, stderr) = (text(output.stdout), text(output.stderr));
    assert!(!stderr.contains("panicked"), "{args}: {stderr}");
    (output.status.success(), stdout, stderr)
}

/// Asserts that the run fails with an error that contains all `words`.
fn refuses(args: &str, gpus: &str, words: &[&str]) {
    let (succeeds, stdout, stderr) = run(args, gpus);
    assert!(!succeeds && !stdout.contains("PASS"), "{args}: {stdout}");
    for word in words {
        assert!(stderr.contains(word), "{args}: {stderr}");
    }
}

#[test]
fn two_gpus_do_the_layer_in_every_form_and_say_by_which_plans() {
    let (succeeds, stdout, stderr) = run("--tokens 2,20", "2");
    assert!(succeeds, "{stdout}{stderr}");
    assert!(stdout.ends_with("PASS, SIMULATED\n"), "{stdout}");
    for form in ["GemmAllReduce", "AllReduceRmsnorm", "Nccl"] {
        for tokens in ["2", "20"] {
            let right = |line: &str| line.split_whitespace().eq([form, tokens, "0", "-"]);
            assert!(stdout.lines().any(right), "{form}, {tokens} tokens: {stdout}");
        }
    }
    // The shape decides: few rows are exchanged in the product's kernel, but two hide nothing.
    let plans = stdout.lines().filter_map(|line| line.strip_prefix("GemmAllReduce: "));
    let names: Vec<&str> = plans.filter_map(|plan| plan.split([':', ',']).next()).collect();
    assert_eq!(names, ["unfused", "swapped"], "{stdout}");
}

#[test]
fn refuses_no_tokens() {
    refuses("--tokens 0", "2", &["--tokens 0"]);
}

#[test]
fn refuses_a_model_that_the_gpus_cannot_share() {
    refuses("--model llama-70b", "3", &["3 GPUs", "28672", "--model"]);
}

#[test]
fn refuses_an_unknown_model_and_names_the_known() {
    refuses("--model llama", "2", &["small, llama-70b, qwen-32b"]);
}
