//! Runs devcomm-bench.

use std::process::Command;

/// Runs the program: exit code, stdout and stderr.
pub fn run(args: &[&str]) -> (Option<i32>, String, String) {
    output(program(args))
}

/// Returns the program as a command, without its environment variables.
pub fn program(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_devcomm-bench"));
    command.args(args).env_remove("DEVCOMM_TWINS").env_remove("DEVCOMM_SIMULATE");
    command
}

/// Runs a command: exit code, stdout and stderr.
pub fn output(mut command: Command) -> (Option<i32>, String, String) {
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// Checks that the run prints only an error with each of `words`, and exits with 1.
pub fn refuses(args: &[&str], words: &[&str]) {
    let (code, stdout, stderr) = run(args);
    assert_eq!((code, stdout.as_str()), (Some(1), ""), "{args:?}: {stderr}");
    assert!(stderr.starts_with("error: "), "{args:?}: {stderr}");
    for word in words {
        assert!(stderr.contains(word), "{args:?}: {stderr}");
    }
}
