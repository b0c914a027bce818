//! Load and store, coops, LSA barriers and LL all-to-all on GPUs.

use devcomm_device_tests::cases::{barriers, ll_a2a, places};
use devcomm_device_tests::on_gpus;

macro_rules! tests {
    ($($name:ident: $case:path $(, $arg:expr)*;)*) => { $(
        #[test]
        fn $name() {
            for ranks in [2, 4] {
                on_gpus(&format!("{} on {ranks}", stringify!($name)), ranks, |gpus| $case(gpus $(, $arg)*));
            }
        }
    )* };
}

tests! {
    kernels_see_the_teams: places::teams;
    every_way_to_a_window_reaches_the_part_that_it_names: places::windows;
    vectors_move_as_they_are: places::vectors;
    a_seen_flag_brings_its_data: places::flags;
    a_poll_ends_with_what_it_sees_or_with_its_time: places::polls;
    resource_buffers_are_zeroed_and_found: places::resources;
    coops_know_their_threads_meet_and_vote: places::coops;
    lsa_barriers_order_what_they_promise: barriers::lsa_orders;
    weaker_orders_leave_the_barrier_in_order: barriers::lsa_weaker_orders;
    arrivals_are_waited_for_however_they_end: barriers::lsa_split;
    warps_have_barriers_of_their_own: barriers::lsa_warps;
    coops_of_every_kind_meet: barriers::lsa_coops;
    sessions_of_nccl_and_ours_share_a_barrier: barriers::lsa_with_raw;
    epochs_wrap_around: barriers::lsa_wraps;
    a_late_rank_is_timed_out_and_met_later: barriers::lsa_late;
    every_thread_learns_that_a_rank_never_came: barriers::lsa_never;
    elements_of_every_size_arrive: ll_a2a::every_size, 0;
    broadcasts_arrive: ll_a2a::every_size, 1;
    several_elements_are_received_at_once: ll_a2a::every_size, 3;
    what_arrives_is_reduced: ll_a2a::reduces;
    epochs_of_ll_all_to_all_start_again: ll_a2a::wraps;
    a_wait_for_what_nobody_sends_ends: ll_a2a::times_out;
}
