//! Runs every example on simulated GPUs.

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

fn passes(output: &Output) -> bool {
    output.status.success() && output.stdout.ends_with(b"PASS, SIMULATED\n")
}

#[test]
fn every_example_passes() {
    run_each("4", |name, output| assert!(passes(output), "{name}: {output:?}"));
}

#[test]
fn every_example_passes_in_two_lsa_teams_or_names_one_that_does() {
    run_each("4,team=2", |name, output| {
        let advice = String::from_utf8_lossy(&output.stderr);
        let refuses = output.status.code() == Some(1) && advice.contains("`hybrid_allreduce`");
        assert!(passes(output) || refuses, "{name}: {output:?}");
    });
}
