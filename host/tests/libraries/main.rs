//! Tests with stub CUDA and NCCL libraries, written in C: how libraries are found and loaded, their
//! versions, answers about groups and windows, loading of kernels, tests that run on GPUs or on
//! simulated ones, and jobs of processes. This program compiles the libraries. Each test runs its
//! body in a child process, whose environment variables name the libraries' folder.

mod attribute;
mod gin_entries;
mod gin_loopback;
mod groups;
mod kernel_files;
mod processes;
mod support;
mod threads;
mod versions;
mod windows;

use libtest_mimic::{Arguments, Trial};
use support::{Environment, Test, end_after_20_seconds, remove_libraries, run};

const MODULES: &[(&str, &[Test])] = &[
    ("attribute", attribute::TESTS),
    ("gin_entries", gin_entries::TESTS),
    ("gin_loopback", gin_loopback::TESTS),
    ("groups", groups::TESTS),
    ("kernel_files", kernel_files::TESTS),
    ("processes", processes::TESTS),
    ("threads", threads::TESTS),
    ("versions", versions::TESTS),
    ("windows", windows::TESTS),
];

/// Returns one libtest-mimic trial for each environment of a test.
fn trials((module, test): (&'static str, &'static Test)) -> impl Iterator<Item = Trial> {
    let trial = move |environment: Environment| {
        let settings = environment.iter().map(|(key, value)| format!(" {key}={value}"));
        let name = format!("{module}::{}{}", test.name, settings.collect::<String>());
        Trial::test(name, move || {
            run(test.name, environment);
            Ok(())
        })
    };
    let none: &[Environment] = &[&[]];
    let environments = if test.environments.is_empty() { none } else { test.environments };
    environments.iter().map(move |environment| trial(environment))
}

/// Runs all tests; or, as a child process, the body of the test that `STUB_TEST` names.
fn main() {
    let tests = MODULES.iter().flat_map(|(module, tests)| tests.iter().map(|test| (*module, test)));
    if let Ok(name) = std::env::var("STUB_TEST") {
        let Some((_, test)) = tests.into_iter().find(|(_, test)| test.name == name) else {
            panic!("no test {name}")
        };
        end_after_20_seconds();
        return (test.body)();
    }
    let mut all: Vec<Trial> = tests.flat_map(trials).collect();
    all.push(processes::trial_of_two_processes());
    let conclusion = libtest_mimic::run(&Arguments::from_args(), all);
    remove_libraries();
    conclusion.exit();
}
