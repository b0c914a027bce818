//! Tests of the choice among plans by their times.

use devcomm_host::{Rank, World};

use super::*;
use crate::check::tests::message;

#[test]
fn the_expected_plan_is_kept_unless_another_is_faster_by_more_than_noise() {
    let of = |times: [f32; 3], expected| choose(&['a', 'b', 'c'], &times, expected);
    assert_eq!(of([3.0, 1.0, 2.0], 'a'), 'b');
    assert_eq!(of([1.01, 1.0, 2.0], 'a'), 'a');
    assert_eq!(of([1.01, 1.0, 2.0], 'c'), 'b');
    assert_eq!(of([2.0, 1.0, 3.0], 'x'), 'b');
    assert_eq!(choose(&[], &[], 'a'), 'a');
}

#[test]
fn a_launch_that_fails_on_one_rank_is_an_error_of_all() {
    let run = |rank: &Rank| {
        // It is not captured, so that each run is a launch.
        let (comm, stream) = (rank.communicator()?, rank.default_stream());
        let launches = Cell::new(0);
        let fastest = |fails_at: Option<u32>| {
            launches.set(0);
            let launch = || {
                launches.set(launches.get() + 1);
                let fails = rank.is_root() && Some(launches.get()) == fails_at;
                if fails { refuse("as it must") } else { Ok(()) }
            };
            fastest(&stream, &['a', 'b'], 'a', |_| Ok(()), launch, |times| slowest(comm, times))
        };
        // Each of the two plans has three launches, and the likely ones have two more.
        for fails_at in [1, 6, 7] {
            let error = message(fastest(Some(fails_at)));
            assert!(error.contains("as it must"), "{error}");
        }
        // The ranks go on together.
        fastest(None).map(drop)
    };
    World::simulated(2).unwrap().run(run).unwrap();
}
