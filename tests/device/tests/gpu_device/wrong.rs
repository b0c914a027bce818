//! Tests that simulated GPUs detect incorrect kernels.

use devcomm::Simulation;
use devcomm::sim::Error;
use devcomm_device_tests::{Job, Setup, TestKernel, TestWorld, kernels};
use devcomm_testing::simulated;

/// Runs a kernel that reads too early, in a fixed and in random orders; each must end with the
/// report of the race, which names the line of this kernel.
fn assert_race_in_any_order<K: TestKernel>(setup: &Setup, n: u32) {
    let orders = [Simulation::new(3)].into_iter();
    for simulation in orders.chain((0..5).map(|seed| Simulation::new(3).seed(seed))) {
        let failure = simulated::failure(simulation.clone(), |gpu| {
            let job = Job::new(gpu, setup)?;
            gpu.barrier()?;
            job.launch::<K>(setup, n)?;
            job.stream().synchronize()
        });
        let Error::Race(race) = &*failure else { panic!("{simulation:?}: {failure}") };
        for access in [&race.access, &race.other] {
            let at = access.at.expect("the line is known");
            assert!(at.file().ends_with("wrong.rs"), "{simulation:?}: {race}");
        }
    }
}

#[test]
fn a_kernel_that_reads_before_the_wait_is_a_race_in_any_order() {
    assert_race_in_any_order::<kernels::reads_before_the_wait>(&Setup::new(1, 32), 0);
}

#[test]
fn a_kernel_that_reads_before_the_signal_is_a_race_in_any_order() {
    let setup = Setup::with_gin(1, 32);
    assert_race_in_any_order::<kernels::reads_before_the_signal>(&setup, 1);
    let simulation = Simulation::new(3);
    let world = simulated::world(simulation.clone());
    let waits = TestWorld::new(&world, &simulation);
    let words = waits.run::<kernels::reads_before_the_signal>(&setup, &[0]);
    assert!(words.iter().flatten().all(|wrong| *wrong == 0));
}

#[test]
fn broken_rules_are_reported_where_they_are_broken() {
    let setup = Setup {
        ll: (1, 2, 8),
        world_barriers: 1,
        strong: false,
        multimem: true,
        ..Setup::with_gin(1, 32)
    };
    let broken = |n: u32| {
        let failure = simulated::failure(Simulation::new(2), |gpu| {
            let job = Job::new(gpu, &setup)?;
            gpu.barrier()?;
            job.launch::<kernels::breaks_a_rule>(&setup, n)?;
            job.stream().synchronize()
        });
        failure.to_string()
    };
    // Messages of the device API's checks, and of the simulator's.
    for (n, message) in [
        (0, "barrier"),
        (1, "the device communicator has no such GIN context"),
        (2, "the signal is not reserved"),
        (3, "signal 1048576: the host requested "),
        (4, "counter 1048576: the host requested "),
        (5, "GIN barrier 1024: the device communicator was made with 1"),
        (6, "the peer is not in the session's team"),
        (7, "the peer is not in the session's team"),
        (8, "the session has no such element"),
        (9, "the session has no such element"),
        (10, "the session has no such element"),
        (11, "the elements do not fit the session's slots"),
        (12, "the elements do not fit the session's slots"),
        (13, "window"),
        (14, "barrier"),
        (15, "peer"),
        (16, "the device communicator was made without gin_strong_signals"),
        (17, "3 elements"),
        (18, "not a multiple of 4"),
        (19, "1 elements"),
        (20, "not a multiple of 4"),
        (21, "5 elements"),
        (22, "not a multiple of 4"),
        (23, "NCCL's device library traps here"),
        (24, "the counter is not reserved"),
    ] {
        let error = broken(n);
        assert!(error.contains(message) && error.contains("wrong.rs"), "rule {n}: {error}");
    }
}
