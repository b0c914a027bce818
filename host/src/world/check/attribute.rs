//! The functions that `#[devcomm::test]` calls.

use std::fmt::Display;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use devcomm_sim::Simulation;

use super::{Check, Rank, World, replay};
use crate::device::WITHOUT_PTX;
use crate::error::{Error, NcclError};
use crate::machine::VARIABLE;

/// Environment variable that says where tests run: `0` for on simulated GPUs, anything else for on
/// GPUs only. Without it a test runs on GPUs if there are enough, the program has PTX, and NCCL is
/// installed.
const TEST_GPUS: &str = "DEVCOMM_TEST_GPUS";

const WITHOUT_NCCL: &str = "no NCCL, which GPUs need, was found: `devcomm setup` fetches it";

/// The number of random schedules of a test on simulated GPUs.
const RANDOM: u64 = 3;
/// The number of schedules with late threads, one for each [`Lag`](devcomm_sim::Lag).
const LAGGING: u64 = devcomm_sim::Lag::ALL.len() as u64;

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
        // `DEVCOMM_SIMULATE` repeats the one schedule that a failed test has printed. With another
        // number of GPUs it is of another test, or for a program: all schedules run.
        let others = value.parse().is_ok_and(|machine: Simulation| machine.gpus() != n);
        return if others { simulated(simulation, f) } else { replay(&value, f) };
    }
    let gpus = std::env::var_os(TEST_GPUS).filter(|value| !value.is_empty());
    if gpus.as_ref().is_some_and(|value| value == "0") {
        return simulated(simulation, f);
    }
    // One at a time: the tests of a program are threads, and each uses all GPUs.
    static GPUS: Mutex<()> = Mutex::new(());
    let one = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let launched = World::is_launched();
    let gpus_only = gpus.is_some() || launched;
    let world = if launched { World::from_env() } else { World::threads(n) };
    // What was done on GPUs, or why the test is simulated although there may be GPUs: `None` if
    // there are not enough.
    let outcome = match world {
        Ok(world) if world.n_ranks() == n => match on_gpus(&world, &f) {
            Ok(()) => Ok("ran".to_owned()),
            Err(failed) if failed.without_ptx && !gpus_only => Err(WITHOUT_PTX.unavailable),
            Err(failed) => panic!("{name}, on GPUs: {}", failed.error),
        },
        Ok(world) => Ok(format!("skipped (the job has {} ranks, not {n})", world.n_ranks())),
        Err(Error::Nccl(NcclError::NotFound(_))) if !gpus_only => Err(Some(WITHOUT_NCCL)),
        Err(error) if !error.is_hardware() => panic!("{error}"),
        Err(error) if gpus_only => Ok(format!("skipped ({error})")),
        Err(_) => Err(None),
    };
    drop(one);
    match outcome {
        Ok(done) => say(name, &done),
        Err(reason) => {
            if let Some(reason) = reason {
                say(name, &format!("simulated ({reason})"));
            }
            simulated(simulation, f);
        }
    }
}

/// Prints directly to standard output, past the test harness's capture.
fn say(name: &str, outcome: &str) {
    let _ = writeln!(std::io::stdout(), "GPU-TEST {name}: {outcome}");
}

/// A test that has failed on GPUs.
struct Failed<E> {
    error: E,
    /// Whether a rank was to load kernels of a program that was built without PTX.
    without_ptx: bool,
}

fn on_gpus<T, E, F>(world: &World, f: F) -> Result<(), Failed<E>>
where
    F: Fn(&Rank) -> Result<T, E> + Sync,
    T: Send,
    E: From<Error> + Display + Send,
{
    /// Guard that records, also when the test panics, whether the rank misses PTX.
    struct Note<'a>(&'a Rank, &'a AtomicBool);

    impl Drop for Note<'_> {
        fn drop(&mut self) {
            // `World::run` joins the ranks' threads before this is read.
            self.1.fetch_or(self.0.context().misses_ptx(), Ordering::Relaxed);
        }
    }

    let without_ptx = AtomicBool::new(false);
    let ran = world.run(|rank| {
        let _note = Note(rank, &without_ptx);
        f(rank)
    });
    ran.map(drop).map_err(|error| Failed { error, without_ptx: without_ptx.into_inner() })
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
