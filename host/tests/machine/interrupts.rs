//! Tests of waits that are interrupted, and of worlds within worlds.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use devcomm_host::{
    CommConfig, Error, Rank, ReduceOp, Result, StateError, World, WorldError, interruptible,
};

use crate::support::{assert_invalid, contents, count, filled, log_of, ranks, world};

fn assert_interrupted<T: std::fmt::Debug>(result: Result<T>) {
    assert!(matches!(result, Err(Error::State(StateError::Interrupted))), "{result:?}");
}

#[test]
fn the_others_learn_that_a_rank_was_interrupted() {
    let seen = AtomicBool::new(false);
    let run = world(2).run(|rank: &Rank| -> Result<()> {
        let done = interruptible(move || true, || rank.barrier());
        // Rank 1 comes when rank 0 waits, or the other way round.
        if let Err(Error::World(WorldError::RankLost { why, .. })) = &done {
            assert_eq!(why, "the wait was interrupted");
            seen.store(true, Ordering::Relaxed);
        }
        done
    });
    assert_interrupted(run);
    assert!(seen.into_inner());
}

#[test]
fn work_goes_on_after_a_wait_for_it_was_interrupted() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let b = filled(comm, &[1.0_f32; 1000])?;
        comm.all_reduce(&b, &b, ReduceOp::Sum, &stream)?;
        // One of the ranks has to wait for the other's part.
        match interruptible(|| true, || stream.synchronize()) {
            Ok(()) => {}
            interrupted => assert_interrupted(interrupted),
        }
        stream.synchronize()?;
        assert_eq!(contents(&b), [2.0; 1000]);
        rank.barrier()
    });
}

#[test]
fn a_world_within_a_world_is_refused() {
    let other = World::simulated(2).unwrap();
    ranks(2, |rank| {
        assert_invalid(World::simulated(2));
        assert_invalid(other.run(|rank: &Rank| rank.barrier()));
        rank.barrier()
    });
    // The thread that runs worlds is that of no rank.
    other.run(|rank: &Rank| rank.barrier()).unwrap();
}

#[test]
fn what_an_interrupted_call_may_still_use_is_not_freed_and_its_communicator_is_aborted() {
    ranks(1, |rank| {
        let comm = rank.new_communicator(&CommConfig::new().blocking(false))?;
        comm.wait(Duration::from_secs(5))?;
        assert_interrupted(interruptible(|| true, || comm.window::<f32>(8)));
        assert!(!comm.is_valid());
        comm.abort()?;
        let log = log_of(rank);
        assert_eq!(["ncclCommAbort", "ncclMemFree"].map(|call| count(&log, call)), [1, 0]);
        Ok(())
    });
}
