//! The example's command line: what it refuses, and that it runs where there is no GPU.

use std::io::Write;
use std::process::Command;

use devcomm::visible_gpus;

const EXAMPLE: &str = env!("CARGO_BIN_EXE_lsa_allreduce");

/// What a run ends with.
struct Outcome {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

fn run(args: &str) -> Outcome {
    run_with(args, &[])
}

fn run_with(args: &str, env: &[(&str, &str)]) -> Outcome {
    let mut command = Command::new(EXAMPLE);
    let output = command.args(args.split_whitespace()).envs(env.iter().copied()).output();
    let output = output.unwrap_or_else(|error| panic!("{EXAMPLE}: {error}"));
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let (stdout, stderr) = (text(output.stdout), text(output.stderr));
    assert!(!stderr.contains("panicked"), "{args}: {stderr}");
    Outcome { code: output.status.code(), stdout, stderr }
}

/// The run does nothing but say each of `words`, and ends with 1.
fn refuses(args: &str, words: &[&str]) {
    is_refusal(args, run(args), words);
}

fn is_refusal(args: &str, outcome: Outcome, words: &[&str]) {
    let Outcome { code, stdout, stderr } = outcome;
    assert_eq!(code, Some(1), "{args}: {stderr}");
    assert_eq!(stdout, "", "{args}");
    assert!(stderr.starts_with("error: "), "{args}: {stderr}");
    for word in words {
        assert!(stderr.contains(word), "{args}: {stderr}");
    }
}

/// Whether there is a GPU, in which case the test of this name has nothing to show.
fn skipped(name: &str) -> bool {
    let there = visible_gpus().is_ok();
    if there {
        // Past the test harness, to whoever counts.
        let _ = writeln!(std::io::stdout(), "SKIPPED {name}: this machine has a GPU");
    }
    there
}

#[test]
fn refuses_no_ranks() {
    refuses("--sim 0", &["at least one rank"]);
    refuses("--gpus 0", &["at least one rank"]);
}

#[test]
fn refuses_a_largest_size_below_the_smallest() {
    refuses("--min 1K --max 1", &["--max 1", "--min 1024"]);
}

#[test]
fn refuses_sizes_that_hold_no_element_of_a_type() {
    refuses("--sim 2 --min 1 --max 3 --dtype f32", &["f32", "4 bytes", "--max"]);
    // f32 is one of the types that are run unless told.
    refuses("--sim 2 --min 1 --max 3", &["f32"]);
    // From 3 the next size is 12.
    refuses("--sim 2 --min 3 --max 5 --dtype f32", &["f32"]);
}

#[test]
fn refuses_a_block_that_no_gpu_has() {
    refuses("--threads 5000", &["5000", "1024"]);
    refuses("--threads 0", &["1 to 1024"]);
}

#[test]
fn refuses_a_size_with_an_unknown_suffix() {
    refuses("--max 12Q", &["12Q", "64K"]);
}

#[test]
fn refuses_an_unknown_type_and_names_the_known() {
    refuses("--dtype f64", &["f64", "f32, f16, bf16, all"]);
}

#[test]
fn refuses_to_simulate_and_use_gpus_at_once() {
    refuses("--sim 2 --gpus 2", &["--sim", "--gpus"]);
}

#[test]
fn refuses_one_process_for_a_rank_of_a_launcher() {
    let args = "--one-process";
    let outcome = run_with(args, &[("RANK", "0"), ("WORLD_SIZE", "2")]);
    is_refusal(args, outcome, &["--one-process", "WORLD_SIZE"]);
}

#[test]
fn help_is_no_error() {
    let Outcome { code, stdout, stderr } = run("--help");
    assert_eq!((code, &*stderr), (Some(0), ""));
    assert!(stdout.contains("--dtype"), "{stdout}");
}

#[test]
fn without_a_gpu_says_what_is_missing_and_what_to_do() {
    if skipped("without_a_gpu_says_what_is_missing_and_what_to_do") {
        return;
    }
    let reason = visible_gpus().unwrap_err().to_string();
    refuses("--gpus 2", &[&reason, "--sim N"]);
    refuses("--gpus 2 --one-process", &[&reason, "--sim N"]);
}

#[test]
fn without_a_gpu_simulates_and_says_so() {
    if skipped("without_a_gpu_simulates_and_says_so") {
        return;
    }
    let Outcome { code, stdout, stderr } = run("--max 1K --dtype f32");
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stdout.starts_with("no GPU: "), "{stdout}");
    assert!(stdout.ends_with("PASS, SIMULATED\n"), "{stdout}");
}

#[test]
fn simulates_when_asked() {
    let Outcome { code, stdout, stderr } = run("--sim 2 --max 4K --dtype bf16");
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stdout.starts_with("2 simulated GPUs"), "{stdout}");
    assert!(stdout.ends_with("PASS, SIMULATED\n"), "{stdout}");
}

#[test]
fn simulates_as_many_threads_as_asked() {
    let Outcome { code, stdout, stderr } = run("--sim 2 --max 4 --dtype f32 --threads 512");
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stdout.starts_with("2 simulated GPUs, 4 blocks of 512 threads\n"), "{stdout}");
    assert!(stdout.ends_with("PASS, SIMULATED\n"), "{stdout}");
}
