//! Everything the host does, against a driver and an NCCL that record what is done with them and
//! move real data. They are small C libraries, built here; a child process finds them by its
//! environment.
//!
//! A test is a promise that a job in such a process keeps. The job's own asserts look at results,
//! and at the fakes' log.

mod aborts;
mod children;
mod collectives;
mod failures;
mod gin;
mod gin_loopback;
mod graphs;
mod groups;
mod kernel_files;
mod life;
mod lifecycle;
mod one_sided;
mod requirements;
mod streams;
mod support;

use libtest_mimic::{Arguments, Trial};
use support::{Environment, Test, end_after_20_seconds, remove_fakes, run};

const MODULES: &[(&str, &[Test])] = &[
    ("life", life::TESTS),
    ("collectives", collectives::TESTS),
    ("groups", groups::TESTS),
    ("lifecycle", lifecycle::TESTS),
    ("children", children::TESTS),
    ("failures", failures::TESTS),
    ("requirements", requirements::TESTS),
    ("gin", gin::TESTS),
    ("gin_loopback", gin_loopback::TESTS),
    ("graphs", graphs::TESTS),
    ("streams", streams::TESTS),
    ("one_sided", one_sided::TESTS),
    ("aborts", aborts::TESTS),
    ("kernel_files", kernel_files::TESTS),
];

/// One trial for each environment of a test.
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

/// The tests start this program again, as the process of a job.
fn main() {
    let tests = MODULES.iter().flat_map(|(module, tests)| tests.iter().map(|test| (*module, test)));
    if let Ok(name) = std::env::var("FAKE_JOB") {
        let Some((_, test)) = tests.into_iter().find(|(_, test)| test.name == name) else {
            panic!("no job {name}")
        };
        end_after_20_seconds();
        return (test.job)();
    }
    let mut all: Vec<Trial> = tests.flat_map(trials).collect();
    all.push(life::trial_of_processes());
    let conclusion = libtest_mimic::run(&Arguments::from_args(), all);
    remove_fakes();
    conclusion.exit();
}
