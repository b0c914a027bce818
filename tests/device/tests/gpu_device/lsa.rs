//! Runs the test cases of load and store, coops and LSA barriers.

use std::convert::identity as plain;

use devcomm::GinConnectionType;
use devcomm_device_tests::cases::{barriers, memory};
use devcomm_device_tests::{TestWorld, gpus, in_worlds};
use devcomm_testing::machines::Gpus;

/// Simulated worlds: number of GPUs, and size of an LSA team. In `PAIRS` every rank has a peer in
/// its team.
const ANY: &[(usize, usize)] = &[(2, 2), (3, 3), (4, 2), (5, 5), (6, 3), (1, 1)];
const PAIRS: &[(usize, usize)] = &[(2, 2), (3, 3), (4, 2), (5, 5)];

macro_rules! tests {
    ($($name:ident: $kind:path, $worlds:ident, $seeds:literal, $case:path;)*) => { $(
        #[test]
        fn $name() {
            let make_gpus = |simulation| $kind(gpus(simulation, GinConnectionType::None));
            let case = |world: &TestWorld| $case(world);
            in_worlds(stringify!($name), $worlds, $seeds, make_gpus, case);
        }
    )* };
}

tests! {
    kernels_see_the_teams: plain, ANY, 12, memory::teams;
    every_way_to_a_window_reaches_the_part_that_it_names: plain, ANY, 60, memory::windows;
    vectors_move_as_they_are: plain, ANY, 24, memory::vectors;
    a_seen_flag_brings_its_data: plain, ANY, 60, memory::flags;
    a_poll_ends_with_what_it_sees_or_with_its_time: plain, ANY, 20, memory::polls;
    resource_buffers_are_zeroed_and_found: plain, ANY, 60, memory::resources;
    multicast_reaches_every_rank_of_the_team: Gpus::with_multimem, ANY, 24, memory::multicast;
    coops_know_their_threads_meet_and_vote: plain, ANY, 24, memory::coops;
    lsa_barriers_order_what_they_promise: plain, ANY, 120, barriers::lsa_orders;
    weaker_orders_leave_the_barrier_in_order: plain, ANY, 60, barriers::lsa_weaker_orders;
    arrivals_are_waited_for_however_they_end: plain, ANY, 120, barriers::lsa_split;
    warps_have_barriers_of_their_own: plain, ANY, 100, barriers::lsa_warps;
    coops_of_every_kind_meet: plain, ANY, 100, barriers::lsa_coops;
    multicast_barriers_meet: Gpus::with_multimem, ANY, 100, barriers::lsa_multicast;
    sessions_of_nccl_and_ours_share_a_barrier: plain, ANY, 100, barriers::lsa_with_raw;
    epochs_wrap_around: plain, ANY, 60, barriers::lsa_wraps;
    epochs_of_multicast_wrap_around: Gpus::with_multimem, ANY, 60, barriers::lsa_multicast_wraps;
    a_late_rank_is_timed_out_and_met_later: plain, PAIRS, 100, barriers::lsa_late;
    every_thread_learns_that_a_rank_never_came: plain, PAIRS, 60, barriers::lsa_never;
}
