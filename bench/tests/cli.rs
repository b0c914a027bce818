//! The benchmark's command line: what it refuses, and in what words.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

/// A folder that looks as if `cargo xtask twins` had made it, but holds nothing.
fn empty_twins(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("devcomm-bench-{name}-{}", std::process::id()));
    for side in ["rust", "cpp"] {
        fs::create_dir_all(folder.join(side)).unwrap();
    }
    folder
}

fn run(args: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_devcomm-bench"));
    let output = command.args(args).env_remove("DEVCOMM_TWINS").output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// The run does nothing but say each of `words`, and ends with 1.
fn refuses(args: &[&str], words: &[&str]) {
    let (code, stdout, stderr) = run(args);
    assert_eq!((code, stdout.as_str()), (Some(1), ""), "{args:?}: {stderr}");
    assert!(stderr.starts_with("error: "), "{args:?}: {stderr}");
    for word in words {
        assert!(stderr.contains(word), "{args:?}: {stderr}");
    }
}

#[test]
fn flags_that_cannot_be_meant_are_refused() {
    refuses(&["twins", "-b", "1M", "-e", "8K"], &["-b 1048576 is above -e 8192"]);
    refuses(&["twins", "-f", "1"], &["-f 1"]);
    refuses(&["twins", "-n", "0"], &["-n 0"]);
    refuses(&["twins", "--rounds", "0"], &["--rounds 0"]);
    refuses(&["twins", "--threads", "2000"], &["1 to 1024"]);
    refuses(&["twins", "--blocks", "0"], &["at least one block"]);
    refuses(&["twins", "-b", "8KB"], &["not a size"]);
    refuses(&["twins", "-d", "int8"], &["invalid value", "bf16"]);
    refuses(&["twins", "no_such_kernel"], &["no pair `no_such_kernel`", "lsa_allreduce"]);
    refuses(&["lotteries"], &["unrecognized subcommand"]);
}

#[test]
fn without_compiled_twins_it_says_how_to_get_them() {
    refuses(&["twins", "--twins", "/no/such/folder"], &["/no/such/folder", "cargo xtask twins"]);
}

#[test]
fn a_job_has_a_rank() {
    let folder = empty_twins("no-rank");
    refuses(&["twins", "--twins", folder.to_str().unwrap(), "-g", "0"], &["at least one rank"]);
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_machine_without_a_gpu_is_told_so() {
    let Err(reason) = devcomm::visible_gpus() else {
        // Past the test harness, to whoever counts.
        let name = "a_machine_without_a_gpu_is_told_so";
        let _ = writeln!(std::io::stdout(), "SKIPPED {name}: this machine has a GPU");
        return;
    };
    let folder = empty_twins("no-gpu");
    let twins = ["twins", "--twins", folder.to_str().unwrap()];
    refuses(&twins, &[&reason.to_string()]);
    refuses(&[&twins[..], &["-g", "2", "--one-process"]].concat(), &[&reason.to_string()]);
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn the_help_names_every_flag_of_nccl_tests_that_is_kept() {
    let (code, stdout, _) = run(&["twins", "--help"]);
    assert_eq!(code, Some(0));
    for flag in ["-b, --minbytes", "-e, --maxbytes", "-f, --stepfactor", "-n, --iters"] {
        assert!(stdout.contains(flag), "{flag}: {stdout}");
    }
    for flag in ["-w, --warmup_iters", "-c, --check", "-d, --datatype", "-G, --cudagraph"] {
        assert!(stdout.contains(flag), "{flag}: {stdout}");
    }
}
