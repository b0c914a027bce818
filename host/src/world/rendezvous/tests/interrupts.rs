//! Tests of waits that are interrupted.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::SIGINT;

use super::processes::{as_rank, job};
use super::*;
use crate::error::{Error, StateError, WorldError};
use crate::machine::{Machine, interruptible};
use crate::world::run::run_threads;

/// Checks that rank `interrupted` counts as lost after an interrupt in a barrier to which rank 2
/// never comes.
fn assert_interrupted(world: &Rendezvous, interrupted: usize) {
    let rank = world.rank();
    if rank == interrupted {
        let asked = Cell::new(0);
        let third = move || asked.replace(asked.get() + 1) == 2;
        let error = interruptible(third, || world.barrier()).unwrap_err();
        assert!(matches!(error, Error::State(StateError::Interrupted)), "{error}");
    } else if rank == 2 {
        while world.health().check().is_ok() {
            thread::sleep(Duration::from_millis(5));
        }
    }
    // The other ranks may have gone on without the interrupted one.
    match world.barrier() {
        Err(Error::World(WorldError::RankLost { rank, why })) => {
            assert_eq!((rank, why.as_str()), (interrupted, "the wait was interrupted"));
        }
        other => panic!("rank {rank}: {other:?}"),
    }
}

#[test]
fn a_rank_that_is_interrupted_in_an_exchange_is_lost() {
    for interrupted in [0, 1] {
        together(&configs(3, AMPLE), |_, world| assert_interrupted(&world.unwrap(), interrupted));
        let done = run_threads(&Machine::Gpus, 3, None, |world| -> Result<()> {
            assert_interrupted(world, interrupted);
            Ok(())
        });
        done.unwrap();
    }
}

#[test]
fn the_end_of_a_world_is_interrupted() {
    let results = together(&configs(2, AMPLE), |config, world| {
        let world = world.unwrap();
        if config.rank == 1 {
            let error = interruptible(|| true, || world.finish()).unwrap_err();
            assert!(matches!(error, Error::State(StateError::Interrupted)), "{error}");
            world.fail(&error.to_string());
        }
        world.finish()
    });
    // Rank 0 may have learnt before that rank 1 had come to the end.
    assert!(results[1].is_err(), "{results:?}");
}

#[test]
fn a_signal_ends_the_wait_of_a_process_within_a_second() {
    const TEST: &str = "world::rendezvous::tests::interrupts::\
        a_signal_ends_the_wait_of_a_process_within_a_second";
    let Some(config) = as_rank(TEST) else { return job(TEST, 2).run().unwrap() };
    let world = config.join().unwrap();
    if config.rank == 1 {
        // It never comes to the barrier.
        while world.health().check().is_ok() {
            thread::sleep(Duration::from_millis(5));
        }
        return;
    }
    let is_signalled = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGINT, Arc::clone(&is_signalled)).unwrap();
    let sender = thread::spawn(|| {
        thread::sleep(Duration::from_millis(300));
        let sent = Instant::now();
        signal_hook::low_level::raise(SIGINT).unwrap();
        sent
    });
    let error = interruptible(move || is_signalled.load(Ordering::Relaxed), || world.barrier());
    let ended = Instant::now();
    assert!(matches!(error, Err(Error::State(StateError::Interrupted))), "{error:?}");
    let took = ended - sender.join().unwrap();
    assert!(took < Duration::from_secs(1), "{took:?}");
}
