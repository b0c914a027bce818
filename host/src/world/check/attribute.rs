//! What `#[devcomm::test]` runs.

use std::fmt::Display;
use std::io::Write;
use std::sync::{Mutex, PoisonError};

use devcomm_sim::Simulation;

use super::{Check, Rank, World, replay};
use crate::error::Error;
use crate::machine::VARIABLE;

/// Environment variable that says whether tests run on GPUs: `0` for no, anything else for GPUs
/// only. Without it they do if there are enough.
const TEST_GPUS: &str = "DEVCOMM_TEST_GPUS";

/// Schedules of a test on simulated GPUs.
const RANDOM: u64 = 3;
const LAGGING: u64 = 4;

/// Runs the test `name`, as `#[devcomm::test]` documents. `settings` is the text form of the
/// simulated machine's settings.
///
/// # Panics
///
/// If the test fails.
#[doc(hidden)]
#[track_caller]
pub fn run_test<T, E, F>(name: &str, settings: &str, f: F)
where
    F: Fn(&Rank) -> Result<T, E> + Sync,
    T: Send,
    E: From<Error> + Display + Send,
{
    let simulation: Simulation = settings.parse().unwrap_or_else(|error| panic!("{error}"));
    let n = simulation.gpus();
    if let Some(value) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        let value = value.to_string_lossy();
        // Those of another test, or of a program: all schedules, on simulated GPUs.
        let others = value.parse().is_ok_and(|machine: Simulation| machine.gpus() != n);
        return if others { simulated(simulation, f) } else { replay(&value, f) };
    }
    let gpus = std::env::var_os(TEST_GPUS).filter(|value| !value.is_empty());
    if gpus.as_ref().is_some_and(|value| value == "0") {
        return simulated(simulation, f);
    }
    // One at a time: the tests of a program are threads, and each uses all GPUs.
    static GPUS: Mutex<()> = Mutex::new(());
    let _one = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let launched = World::is_launched();
    let outcome = match if launched { World::from_env() } else { World::threads(n) } {
        Ok(world) if world.n_ranks() == n => {
            if let Err(error) = world.run(f) {
                panic!("{name}, on GPUs: {error}");
            }
            "ran".to_owned()
        }
        Ok(world) => format!("skipped (the job has {} ranks, not {n})", world.n_ranks()),
        Err(error) if !error.is_of_the_machine() => panic!("{error}"),
        Err(error) if gpus.is_some() || launched => format!("skipped ({error})"),
        Err(_) => {
            drop(_one);
            return simulated(simulation, f);
        }
    };
    // Directly to standard output, bypassing the test harness's capture.
    let _ = writeln!(std::io::stdout(), "GPU-TEST {name}: {outcome}");
}

#[track_caller]
fn simulated<T, E, F>(simulation: Simulation, f: F)
where
    F: Fn(&Rank) -> Result<T, E> + Sync,
    T: Send,
    E: From<Error> + Display + Send,
{
    Check::new(simulation).in_order().random(RANDOM).lagging(LAGGING).run(f);
}
