//! Tests of the command line of the example `lsa_allreduce`, also without a GPU.

use std::io::Write;
use std::process::Command;

use devcomm::visible_gpus;

const EXAMPLE: &str = env!("CARGO_BIN_EXE_lsa_allreduce");
const SIMULATE: &str = "DEVCOMM_SIMULATE";

/// The exit code and output of a run.
struct Outcome {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

/// Runs the example with these arguments and variables; `DEVCOMM_SIMULATE` is not inherited.
fn run(args: &str, env: &[(&str, &str)]) -> Outcome {
    let mut command = Command::new(EXAMPLE);
    command.args(args.split_whitespace()).env_remove(SIMULATE).envs(env.iter().copied());
    let output = command.output().unwrap_or_else(|error| panic!("{EXAMPLE}: {error}"));
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let (stdout, stderr) = (text(output.stdout), text(output.stderr));
    assert!(!stderr.contains("panicked"), "{args}: {stderr}");
    Outcome { code: output.status.code(), stdout, stderr }
}

/// Asserts that the run fails with an error that contains all `words`.
fn refuses(args: &str, env: &[(&str, &str)], words: &[&str]) {
    let Outcome { code, stdout, stderr } = run(args, env);
    assert!(code.is_some_and(|code| code != 0), "{args}: {stderr}");
    assert!(!stdout.contains("PASS"), "{args}: {stdout}");
    assert!(stderr.starts_with("error: "), "{args}: {stderr}");
    for word in words {
        assert!(stderr.contains(word), "{args}: {stderr}");
    }
}

#[test]
fn refuses_no_ranks() {
    refuses("", &[(SIMULATE, "0")], &[SIMULATE, "0 GPUs"]);
}

#[test]
fn refuses_sizes_that_hold_no_element_of_a_type() {
    let two = [(SIMULATE, "2")];
    refuses("--min 1 --max 3 --dtype f32", &two, &["f32", "3 bytes"]);
    // By default all types run, f32 among them.
    refuses("--min 1 --max 3", &two, &["f32"]);
}

#[test]
fn refuses_a_largest_size_below_the_smallest() {
    refuses("--min 1K --max 512", &[(SIMULATE, "2")], &["--min 1024", "--max 512"]);
}

#[test]
fn refuses_a_block_that_no_gpu_has() {
    refuses("--threads 5000", &[], &["5000", "1024"]);
    refuses("--threads 0", &[], &["1..=1024"]);
}

#[test]
fn refuses_a_size_with_an_unknown_suffix() {
    refuses("--max 12Q", &[], &["12Q", "64K"]);
}

#[test]
fn refuses_an_unknown_type_and_names_the_known() {
    refuses("--dtype f64", &[], &["f64", "f32, f16, bf16, all"]);
}

#[test]
fn refuses_to_simulate_under_a_launcher() {
    let launcher = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")];
    let rendezvous = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500"), (SIMULATE, "2")];
    refuses("", &[&launcher[..], &rendezvous].concat(), &[SIMULATE, "with RANK"]);
}

#[test]
fn ranks_in_several_lsa_teams_are_told_of_the_hybrid_program() {
    refuses("", &[(SIMULATE, "4,team=2")], &["ranks 0, 1", "ranks 2, 3", "hybrid_allreduce"]);
}

#[test]
fn help_is_no_error() {
    let Outcome { code, stdout, stderr } = run("--help", &[]);
    assert_eq!((code, &*stderr), (Some(0), ""));
    assert!(stdout.contains("--dtype"), "{stdout}");
}

#[test]
fn without_a_gpu_says_what_is_missing_and_what_to_do() {
    match visible_gpus() {
        Err(reason) => refuses("", &[], &[&reason.to_string(), "DEVCOMM_SIMULATE=4"]),
        Ok(_) => {
            let name = "without_a_gpu_says_what_is_missing_and_what_to_do";
            // Bypasses the harness's capture; `cargo xtask test` counts these lines.
            let _ = writeln!(std::io::stdout(), "SKIPPED {name}: this machine has a GPU");
        }
    }
}

#[test]
fn simulates_when_asked() {
    let Outcome { code, stdout, stderr } = run("--max 4K --dtype bf16", &[(SIMULATE, "2")]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stdout.starts_with("2 x ") && stdout.ends_with("PASS, SIMULATED\n"), "{stdout}");
}

#[test]
fn simulates_as_many_threads_as_asked() {
    let args = "--max 4 --dtype f32 --threads 512";
    let Outcome { code, stdout, stderr } = run(args, &[(SIMULATE, "2")]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stdout.contains(", 512 threads per block\n"), "{stdout}");
    assert!(stdout.ends_with("PASS, SIMULATED\n"), "{stdout}");
}
