//! Tests that `DEVCOMM_SIMULATE` selects a simulated machine, and which settings conflict with it.
#![cfg(feature = "simulator")]

use std::process::Command;

use devcomm_host::{
    Error, GinLoopback, Library, MultiGpu, ReduceOp, Simulation, World, visible_gpus,
};

/// Returns whether this process has the environment variables. If not, runs the test in a child
/// process that has them.
fn runs_with(test: &str, variables: &[(&str, &str)]) -> bool {
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
fn assert_error_with<T>(result: Result<T, Error>, words: &[&str]) {
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
    if runs_with("a_launcher_and_the_variable_are_an_error_that_names_both", TORCHRUN) {
        assert_error_with(
            World::from_env().map(drop),
            &["DEVCOMM_SIMULATE=\"2\"", "RANK", "with RANK each is a process"],
        );
    }
}

#[test]
fn processes_and_the_variable_are_an_error_that_names_both() {
    let variable = &[("DEVCOMM_SIMULATE", "2")];
    if runs_with("processes_and_the_variable_are_an_error_that_names_both", variable) {
        assert_error_with(World::spawn_local(2), &["DEVCOMM_SIMULATE=\"2\"", "World::spawn_local"]);
        let processes = World::builder().simulate(Simulation::new(2)).spawn_local(2);
        assert_error_with(processes, &["World::spawn_local"]);
    }
}

#[test]
fn a_variable_that_makes_no_sense_is_an_error_wherever_a_machine_is_asked_for() {
    let variable = &[("DEVCOMM_SIMULATE", "some")];
    if runs_with(
        "a_variable_that_makes_no_sense_is_an_error_wherever_a_machine_is_asked_for",
        variable,
    ) {
        assert_error_with(World::from_env().map(drop), &["DEVCOMM_SIMULATE=\"some\""]);
        assert_error_with(visible_gpus().map(drop), &["DEVCOMM_SIMULATE=\"some\""]);
    }
}

#[test]
fn an_lsa_team_size_that_comes_after_the_machine_is_made_is_an_error() {
    let variable = &[("DEVCOMM_SIMULATE", "4")];
    if runs_with("an_lsa_team_size_that_comes_after_the_machine_is_made_is_an_error", variable) {
        assert_eq!(visible_gpus().unwrap(), 4);
        let world = |team| {
            let loopback = GinLoopback::new().lsa_team_size(team);
            World::builder().gin_loopback(loopback).from_env().map(drop)
        };
        let words = ["DEVCOMM_SIMULATE=\"4\"", "LSA teams of 4", "lsa_team_size(2)"];
        assert_error_with(world(2), &words);
        world(4).unwrap();
    }
}

#[test]
fn a_setting_that_makes_no_sense_is_an_error_though_simulated_gpus_do_not_use_it() {
    const TEST: &str =
        "a_setting_that_makes_no_sense_is_an_error_though_simulated_gpus_do_not_use_it";
    let settings = [
        ("DEVCOMM_OPERATION_TIMEOUT", "abc"),
        ("DEVCOMM_TIMEOUT", "0"),
        ("DEVCOMM_PORT", "any"),
        ("DEVCOMM_JIT", "yes"),
        ("DEVCOMM_LOG", "devcomm_host=loud"),
    ];
    // A child process has one of the settings, and checks its error.
    let is_set = |name, value| std::env::var(name).is_ok_and(|set| set == value);
    if let Some((name, value)) = settings.iter().find(|(name, value)| is_set(*name, *value)) {
        let words = [*name, *value];
        assert_error_with(World::simulated(2).map(drop), &words);
        assert_error_with(
            World::builder().simulate(Simulation::new(2)).from_env().map(drop),
            &words,
        );
        assert_error_with(World::threads(2).map(drop), &words);
        return;
    }
    for setting in settings {
        assert!(!runs_with(TEST, &[setting, ("DEVCOMM_SIMULATE", "2")]));
    }
}

#[test]
fn with_the_variable_a_program_finds_simulated_gpus_in_and_outside_of_worlds() {
    let variable = &[("DEVCOMM_SIMULATE", "3,seed=7")];
    if !runs_with(
        "with_the_variable_a_program_finds_simulated_gpus_in_and_outside_of_worlds",
        variable,
    ) {
        return;
    }
    assert_eq!(visible_gpus().unwrap(), 3);
    // This thread uses these GPUs itself, outside of the worlds below.
    let gpus = MultiGpu::all(&Library::open(None).unwrap()).unwrap();
    let sum = |values: [f32; 3]| {
        let buffer = |(comm, value): (&devcomm_host::Communicator, f32)| {
            let buffer = comm.mem_alloc::<f32>(8)?;
            buffer.copy_from_host(&[value; 8]).map(|()| buffer)
        };
        let buffers = gpus.communicators().iter().zip(values).map(buffer);
        let buffers = buffers.collect::<Result<Vec<_>, Error>>()?;
        gpus.all_reduce(&buffers, &buffers, ReduceOp::Sum)?;
        gpus.synchronize()?;
        let last = |buffer: &devcomm_host::SymmetricBuffer<f32>| {
            let mut all = [0.0; 8];
            buffer.copy_to_host(&mut all).map(|()| all[7])
        };
        buffers.iter().map(last).collect::<Result<Vec<_>, Error>>()
    };
    for round in 0..2 {
        assert_eq!(sum([1.0, 2.0, round as f32]).unwrap(), [3.0 + round as f32; 3]);
        let world = World::from_env().unwrap();
        assert!(world.is_simulated() && world.n_ranks() == 3);
        world.run(|rank| rank.communicator().map(drop)).unwrap();
        assert_eq!(World::threads(2).unwrap().run(|rank| rank.barrier()).unwrap().len(), 2);
    }
}
