//! Load and store, coops and LSA barriers, in the simulator.

use devcomm_device_tests::cases::{barriers, places};
use devcomm_device_tests::{Machine, Setup};
use devcomm_device_tests::{Simulated, kernels};

/// Runs a case with `seeds` seeds, on one LSA team and on several, and a few times with switches at any access.
fn with_seeds(seeds: u64, case: impl Fn(&Simulated)) {
    for seed in 0..seeds {
        let (ranks, team) = [(2, 2), (3, 3), (4, 2), (5, 5), (6, 3), (1, 1)][seed as usize % 6];
        case(&Simulated::teams(ranks, team, seed));
    }
    for seed in 0..seeds.div_ceil(16) {
        case(&Simulated::preempting(4, 2, seed));
    }
}

macro_rules! tests {
    ($($name:ident: $seeds:literal, $case:path;)*) => { $(
        #[test]
        fn $name() {
            with_seeds($seeds, |machine| $case(machine));
        }
    )* };
}

tests! {
    kernels_see_the_teams: 12, places::teams;
    every_way_to_a_window_reaches_the_part_that_it_names: 60, places::windows;
    vectors_move_as_they_are: 24, places::vectors;
    a_seen_flag_brings_its_data: 60, places::flags;
    a_poll_ends_with_what_it_sees_or_with_its_time: 20, places::polls;
    resource_buffers_are_zeroed_and_found: 60, places::resources;
    multicast_reaches_every_rank_of_the_team: 24, places::multicast;
    coops_know_their_threads_meet_and_vote: 24, places::coops;
    lsa_barriers_order_what_they_promise: 120, barriers::lsa_orders;
    weaker_orders_leave_the_barrier_in_order: 60, barriers::lsa_weaker_orders;
    arrivals_are_waited_for_however_they_end: 120, barriers::lsa_split;
    warps_have_barriers_of_their_own: 100, barriers::lsa_warps;
    coops_of_every_kind_meet: 100, barriers::lsa_coops;
    multicast_barriers_meet: 100, barriers::lsa_multicast;
    sessions_of_nccl_and_ours_share_a_barrier: 100, barriers::lsa_with_raw;
    epochs_wrap_around: 60, barriers::lsa_wraps;
    epochs_of_multicast_wrap_around: 60, barriers::lsa_multicast_wraps;
}

#[test]
fn a_late_rank_is_timed_out_and_met_later() {
    for seed in 0..100 {
        let (ranks, team) = [(2, 2), (3, 3), (4, 2), (5, 5)][seed as usize % 4];
        barriers::lsa_late(&Simulated::teams(ranks, team, seed));
    }
}

#[test]
fn every_thread_learns_that_a_rank_never_came() {
    for seed in 0..60 {
        let (ranks, team) = [(2, 2), (3, 3), (4, 2), (5, 5)][seed as usize % 4];
        barriers::lsa_never(&Simulated::teams(ranks, team, seed));
    }
}

#[test]
fn a_kernel_that_forgets_to_wait_is_found_out_by_some_seed() {
    let setup = Setup { out: 32, ..Setup::new(1, 32) };
    let stale = |seed| {
        let found = Simulated::new(3, seed).run(kernels::reads_before_the_wait, &setup, &[0]);
        found.iter().flatten().any(|&wrong| wrong == 1)
    };
    let found = (0..50).filter(|seed| stale(*seed)).count();
    assert!(found > 5, "{found} of 50");
}
