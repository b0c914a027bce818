//! LL all-to-all, in the simulator.

use devcomm_device_tests::Simulated;
use devcomm_device_tests::cases::ll_a2a;

fn with_seeds(seeds: u64, case: impl Fn(&Simulated)) {
    for seed in 0..seeds {
        let (ranks, team) = [(2, 2), (3, 3), (4, 2), (5, 5), (1, 1)][seed as usize % 5];
        case(&Simulated::teams(ranks, team, seed));
    }
    case(&Simulated::preempting(3, 3, 7));
}

#[test]
fn elements_of_every_size_arrive() {
    with_seeds(20, |machine| ll_a2a::every_size(machine, 0));
}

#[test]
fn broadcasts_arrive() {
    with_seeds(10, |machine| ll_a2a::every_size(machine, 1));
}

#[test]
fn broadcasts_by_multicast_arrive() {
    with_seeds(10, |machine| ll_a2a::every_size(machine, 2));
}

#[test]
fn several_elements_are_received_at_once() {
    with_seeds(10, |machine| ll_a2a::every_size(machine, 3));
}

#[test]
fn what_arrives_is_reduced() {
    with_seeds(60, ll_a2a::reduces);
}

#[test]
fn epochs_start_again() {
    with_seeds(40, ll_a2a::wraps);
}

#[test]
fn a_wait_for_what_nobody_sends_ends() {
    with_seeds(60, ll_a2a::times_out);
}
