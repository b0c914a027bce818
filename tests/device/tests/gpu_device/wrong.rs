//! Tests that simulated GPUs detect incorrect kernels.

use devcomm::Simulation;
use devcomm_device_tests::{Job, Setup, TestKernel, TestWorld, kernels};
use devcomm_testing::simulated;

/// The number of seeds below `seeds` with which a kernel on three ranks reads wrong data.
fn count_detected<K: TestKernel>(setup: &Setup, n: u32, seeds: u64) -> usize {
    let is_found = |seed: &u64| {
        let simulation = Simulation::new(3).seed(*seed);
        let world = simulated::world(simulation.clone());
        let words = TestWorld::new(&world, &simulation).run::<K>(setup, &[n]);
        words.iter().flatten().any(|&wrong| wrong == 1)
    };
    (0..seeds).filter(is_found).count()
}

#[test]
fn a_kernel_that_forgets_to_wait_is_found_out_by_some_seed() {
    let found = count_detected::<kernels::reads_before_the_wait>(&Setup::new(1, 32), 0, 50);
    assert!(found > 5, "{found} of 50");
}

#[test]
fn a_kernel_that_forgets_its_signal_is_found_out_by_some_seed() {
    let setup = Setup::with_gin(1, 32);
    let found = |n| count_detected::<kernels::reads_before_the_signal>(&setup, n, 60);
    assert_eq!(found(0), 0);
    assert!(found(1) > 5);
}

#[test]
fn broken_rules_are_reported_where_they_are_broken() {
    let setup = Setup { ll: (1, 2, 8), world_barriers: 1, ..Setup::with_gin(1, 32) };
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
        (3, "signal 1048576, but the device communicator was made with gin_signals("),
        (4, "counter 1048576, but the device communicator was made with gin_counters("),
        (5, "GIN barrier 1024: the device communicator was made with 1"),
        (6, "the peer is not in the session's team"),
        (7, "the peer is not in the session's team"),
        (8, "the session has no such element"),
        (9, "the session has no such element"),
        (10, "the session has no such element"),
        (11, "the elements do not fit the session's slots"),
        (12, "the elements do not fit the session's slots"),
        (13, "window"),
        (14, "peer"),
    ] {
        let error = broken(n);
        assert!(error.contains(message) && error.contains("wrong.rs"), "rule {n}: {error}");
    }
}
