//! Runs every example on simulated GPUs, but for `with_cudarc`, which says that it needs real ones.

use std::path::Path;
use std::process::{Command, Output};

/// Runs each example on the simulated `machine`, and passes its name and output to `check`.
fn run_each(machine: &str, check: impl Fn(&str, &Output)) {
    let programs = Path::new(env!("CARGO_BIN_EXE_lsa_allreduce")).parent().unwrap();
    let mut examples = 0;
    for entry in std::fs::read_dir(env!("CARGO_MANIFEST_DIR")).unwrap() {
        let source = entry.unwrap().path();
        if source.extension().is_some_and(|kind| kind == "rs") {
            let name = source.file_stem().unwrap().to_str().unwrap();
            let mut command = Command::new(programs.join(name));
            let output = command.env("DEVCOMM_SIMULATE", machine).output();
            check(name, &output.unwrap_or_else(|error| panic!("{name}: {error}")));
            examples += 1;
        }
    }
    assert!(examples > 1);
}

/// Returns whether the example passed or, the one that needs the driver, said so.
fn passes(name: &str, output: &Output) -> bool {
    if name == "with_cudarc" {
        return fails_with(output, "cudarc calls CUDA's driver");
    }
    output.status.success() && output.stdout.ends_with(b"PASS, SIMULATED\n")
}

fn fails_with(output: &Output, words: &str) -> bool {
    output.status.code() == Some(1) && String::from_utf8_lossy(&output.stderr).contains(words)
}

#[test]
fn every_example_passes() {
    run_each("4", |name, output| assert!(passes(name, output), "{name}: {output:?}"));
}

#[test]
fn every_example_passes_in_two_lsa_teams_or_names_one_that_does() {
    run_each("4,team=2", |name, output| {
        let refuses = fails_with(output, "`hybrid_allreduce`");
        assert!(passes(name, output) || refuses, "{name}: {output:?}");
    });
}
