//! Tests of waits that are interrupted.

use std::cell::Cell;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Barrier};

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

/// Interrupts rank `interrupted` of 3 while it joins those that are left after the loss of rank 2.
/// The other one, which calls later, goes on alone if `alone`, or not at all.
fn assert_interrupted_shrink(world: &Rendezvous, interrupted: usize, met: &Barrier, alone: bool) {
    let rank = world.rank();
    if rank == 2 {
        return world.fail("it fails");
    }
    while world.health().check().is_ok() {
        thread::sleep(Duration::from_millis(5));
    }
    if rank == interrupted {
        let asked = Cell::new(0);
        let third = move || asked.replace(asked.get() + 1) == 2;
        let start = Instant::now();
        let error = interruptible(third, || world.survivors()).err().unwrap();
        assert!(matches!(error, Error::State(StateError::Interrupted)), "{error}");
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
        met.wait();
        // The other rank waits for this one meanwhile, which says what has become of it.
        thread::sleep(Duration::from_millis(100));
        world.fail("it was interrupted");
    } else {
        met.wait();
        if alone {
            assert_eq!(world.survivors().unwrap().n_ranks(), 1);
        }
    }
}

#[test]
fn a_rank_that_is_interrupted_while_it_joins_the_survivors_is_not_one() {
    for interrupted in [0, 1] {
        let met = Barrier::new(2);
        together(&configs(3, AMPLE), |_, world| {
            assert_interrupted_shrink(&world.unwrap(), interrupted, &met, false);
        });
        let done = run_threads(&Machine::Gpus, 3, None, |world| -> Result<()> {
            assert_interrupted_shrink(world, interrupted, &met, true);
            Ok(())
        });
        done.unwrap();
    }
}

#[test]
fn a_rank_that_waits_for_the_others_to_join_is_interrupted() {
    for rank in [0, 1] {
        let config = configs(2, AMPLE).swap_remove(rank);
        let asked = Cell::new(0);
        let third = move || asked.replace(asked.get() + 1) == 2;
        let error = interruptible(third, || config.join()).err().unwrap();
        assert!(matches!(error, Error::State(StateError::Interrupted)), "{error}");
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
