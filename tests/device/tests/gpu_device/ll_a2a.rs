//! Runs the test cases of the LL all-to-all.

use std::convert::identity as plain;

use devcomm::GinConnectionType;
use devcomm_device_tests::cases::ll_a2a;
use devcomm_device_tests::{TestWorld, gpus, in_worlds};
use devcomm_testing::machines::Gpus;

/// Simulated worlds: number of GPUs, and size of an LSA team.
const WORLDS: &[(usize, usize)] = &[(2, 2), (3, 3), (4, 2), (5, 5), (1, 1)];

macro_rules! tests {
    ($($name:ident: $kind:path, $seeds:literal, $case:path $(, $arg:expr)*;)*) => { $(
        #[test]
        fn $name() {
            let make_gpus = |simulation| $kind(gpus(simulation, GinConnectionType::None));
            let case = |world: &TestWorld| $case(world $(, $arg)*);
            in_worlds(stringify!($name), WORLDS, $seeds, make_gpus, case);
        }
    )* };
}

tests! {
    elements_of_every_size_arrive: plain, 20, ll_a2a::every_size, 0;
    broadcasts_arrive: plain, 10, ll_a2a::every_size, 1;
    broadcasts_by_multicast_arrive: Gpus::with_multimem, 10, ll_a2a::every_size, 2;
    several_elements_are_received_at_once: plain, 10, ll_a2a::every_size, 3;
    what_arrives_is_reduced: plain, 60, ll_a2a::reduces;
    epochs_start_again: plain, 40, ll_a2a::wraps;
    a_wait_for_a_message_that_no_rank_sends_ends: plain, 60, ll_a2a::times_out;
}
