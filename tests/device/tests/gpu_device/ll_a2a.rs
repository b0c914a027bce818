//! LL all-to-all.

use devcomm::GinConnectionType;
use devcomm_device_tests::cases::ll_a2a;
use devcomm_device_tests::{TestWorld, gpus, in_worlds};

fn with_seeds(name: &str, seeds: u64, multimem: bool, case: impl Fn(&TestWorld)) {
    let worlds = [(2, 2), (3, 3), (4, 2), (5, 5), (1, 1)];
    let of = |simulation| match gpus(simulation, GinConnectionType::None) {
        gpus if multimem => gpus.with_multimem(),
        gpus => gpus,
    };
    in_worlds(name, &worlds, seeds, of, case);
}

#[test]
fn elements_of_every_size_arrive() {
    with_seeds("elements_of_every_size_arrive", 20, false, |world| ll_a2a::every_size(world, 0));
}

#[test]
fn broadcasts_arrive() {
    with_seeds("broadcasts_arrive", 10, false, |world| ll_a2a::every_size(world, 1));
}

#[test]
fn broadcasts_by_multicast_arrive() {
    with_seeds("broadcasts_by_multicast_arrive", 10, true, |world| ll_a2a::every_size(world, 2));
}

#[test]
fn several_elements_are_received_at_once() {
    let name = "several_elements_are_received_at_once";
    with_seeds(name, 10, false, |world| ll_a2a::every_size(world, 3));
}

#[test]
fn what_arrives_is_reduced() {
    with_seeds("what_arrives_is_reduced", 60, false, ll_a2a::reduces);
}

#[test]
fn epochs_start_again() {
    with_seeds("epochs_start_again", 40, false, ll_a2a::wraps);
}

#[test]
fn a_wait_for_what_nobody_sends_ends() {
    with_seeds("a_wait_for_what_nobody_sends_ends", 60, false, ll_a2a::times_out);
}
