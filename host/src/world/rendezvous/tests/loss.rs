//! Tests of ranks that die, fail, panic or finish too early, and of the errors of the others.

use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::error::{Error, WorldError};
use crate::machine::Machine;
use crate::world::run::{run_rank, run_threads};

/// Checks the error that all ranks get when one closes its connection after the first exchange, and
/// how soon they get it.
fn leave_in_the_middle(leaver: usize) {
    let (sender, receiver) = channel();
    let sender = std::sync::Mutex::new(sender);
    let results = together(&configs(4, AMPLE), |config, rendezvous| {
        let rendezvous = rendezvous.unwrap();
        let first = rendezvous.barrier();
        if config.rank == leaver {
            first.unwrap();
            sender.lock().unwrap().send(Instant::now()).unwrap();
            return None;
        }
        // One of the others polls the health, as a rank that waits for its GPU does.
        if config.rank == (leaver + 1) % 4 {
            while rendezvous.health().check().is_ok() {
                thread::sleep(Duration::from_millis(1));
            }
        }
        // The first barrier may fail already; a second one must fail.
        Some((first.and_then(|()| rendezvous.barrier()).unwrap_err(), Instant::now()))
    });
    let left_at = receiver.recv().unwrap();
    for (error, known) in results.into_iter().flatten() {
        let Error::World(WorldError::RankLost { rank, why }) = &error else { panic!("{error}") };
        assert_eq!(*rank, leaver);
        assert!(why.contains("its connection closed"), "{why}");
        assert!(known - left_at < Duration::from_secs(2), "{:?}", known - left_at);
    }
}

#[test]
fn a_rank_that_dies_is_named_to_the_others_within_two_seconds() {
    leave_in_the_middle(2);
}

#[test]
fn if_rank_0_dies_everyone_sees_it() {
    leave_in_the_middle(0);
}

#[test]
fn a_rank_that_fails_says_why() {
    for failing in [0, 1] {
        let errors = together(&configs(3, AMPLE), |config, rendezvous| {
            let rendezvous = rendezvous.unwrap();
            if config.rank == failing {
                rendezvous.fail("out of memory");
            }
            rendezvous.finish().unwrap_err().to_string()
        });
        for error in errors {
            assert_eq!(error, format!("rank {failing} is lost: out of memory"));
        }
    }
}

#[test]
fn a_rank_that_ends_early_does_not_leave_the_others_waiting() {
    for early in [0, 2] {
        let results = together(&configs(3, AMPLE), |config, rendezvous| {
            let rendezvous = rendezvous.unwrap();
            if config.rank == early { rendezvous.finish() } else { rendezvous.barrier() }
        });
        for error in results.into_iter().map(Result::unwrap_err) {
            let Error::World(WorldError::RankLost { rank, why }) = &error else {
                panic!("{error}")
            };
            assert!(*rank == early && why.contains("already finished"), "{error}");
        }
    }
}

/// Runs a rank's function as a world does, without a GPU.
fn rank_of(
    rendezvous: &Rendezvous,
    f: impl Fn(&Rendezvous) -> Result<(), Box<dyn std::error::Error + Send + Sync>>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    run_rank(rendezvous, || Ok(rendezvous.clone()), f)
}

#[test]
fn a_panic_in_one_thread_names_the_rank_and_releases_the_others() {
    let error = run_threads(&Machine::Gpus, 3, None, |rendezvous| {
        rank_of(rendezvous, |rank| {
            if rank.rank() == 1 {
                panic!("index out of range");
            }
            let error = rank.barrier().unwrap_err();
            assert!(error.to_string().contains("rank 1 is lost: rank 1 panicked"), "{error}");
            Err(error.into())
        })
    });
    assert_eq!(error.unwrap_err().to_string(), "rank 1 panicked: index out of range");
}

#[test]
fn the_error_of_the_rank_that_failed_first_is_the_worlds() {
    let error = run_threads(&Machine::Gpus, 4, None, |rendezvous| {
        rank_of(rendezvous, |rank| match rank.rank() {
            3 => Err("no such file".into()),
            _ => Ok(rank.barrier()?),
        })
    });
    assert_eq!(error.unwrap_err().to_string(), "no such file");
}
