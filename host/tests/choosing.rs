//! Which machine a program runs on: what the environment says, and what it must not say.
#![cfg(feature = "simulator")]

use std::process::Command;

use devcomm_host::{Error, Simulation, World, visible_gpus};

/// Whether this process has the variables. Otherwise the test is done in one that has them.
fn has(test: &str, variables: &[(&str, &str)]) -> bool {
    if variables.iter().all(|(name, value)| std::env::var(name).is_ok_and(|set| set == *value)) {
        return true;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test]).envs(variables.iter().copied());
    let output = child.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    false
}

#[track_caller]
fn says<T>(result: Result<T, Error>, words: &[&str]) {
    let error = result.err().expect("an error").to_string();
    for word in words {
        assert!(error.contains(word), "{word:?} is not in: {error}");
    }
}

#[test]
fn a_launcher_and_the_variable_are_an_error_that_names_both() {
    const TORCHRUN: &[(&str, &str)] = &[
        ("DEVCOMM_SIMULATE", "2"),
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "29500"),
    ];
    if has("a_launcher_and_the_variable_are_an_error_that_names_both", TORCHRUN) {
        says(
            World::from_env().map(drop),
            &["DEVCOMM_SIMULATE=\"2\"", "RANK", "process of its own"],
        );
    }
}

#[test]
fn processes_and_the_variable_are_an_error_that_names_both() {
    let variable = &[("DEVCOMM_SIMULATE", "2")];
    if has("processes_and_the_variable_are_an_error_that_names_both", variable) {
        says(World::spawn_local(2), &["DEVCOMM_SIMULATE=\"2\"", "World::spawn_local"]);
        let processes = World::builder().simulate(Simulation::new(2)).spawn_local(2);
        says(processes, &["World::spawn_local"]);
    }
}

#[test]
fn a_variable_that_makes_no_sense_is_an_error_wherever_a_machine_is_asked_for() {
    let variable = &[("DEVCOMM_SIMULATE", "some")];
    if has("a_variable_that_makes_no_sense_is_an_error_wherever_a_machine_is_asked_for", variable) {
        says(World::from_env().map(drop), &["DEVCOMM_SIMULATE=\"some\""]);
        says(visible_gpus().map(drop), &["DEVCOMM_SIMULATE=\"some\""]);
    }
}
