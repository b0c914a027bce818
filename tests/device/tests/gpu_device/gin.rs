//! Runs the test cases of GIN, GIN barriers and hybrid barriers.

use devcomm::GinConnectionType::{Full, Rail};
use devcomm_device_tests::cases::gin;
use devcomm_device_tests::{TestWorld, gpus, in_worlds};

/// Simulated worlds: number of GPUs, and size of an LSA team.
const ANY: &[(usize, usize)] = &[(2, 1), (3, 3), (4, 2), (6, 3), (2, 2), (4, 4), (4, 1)];
const SMALL: &[(usize, usize)] = &[(2, 2), (2, 1), (3, 3), (4, 4)];

/// Tests: GIN connections, simulated worlds, number of seeds, and the case with its arguments.
macro_rules! tests {
    ($(
        $name:ident: $connection:ident, $worlds:ident, $seeds:literal, $case:path $(, $arg:expr)*;
    )*) => { $(
        #[test]
        fn $name() {
            let case = |world: &TestWorld| $case(world $(, $arg)*);
            in_worlds(stringify!($name), $worlds, $seeds, |s| gpus(s, $connection), case);
        }
    )* };
}

tests! {
    puts_arrive_before_their_signals: Full, ANY, 60, gin::put;
    puts_along_the_rail_arrive: Rail, ANY, 60, gin::put_along_the_rail;
    values_need_no_source: Full, ANY, 60, gin::put_value;
    gets_are_there_after_a_flush: Full, ANY, 60, gin::get;
    strong_signals_follow_earlier_puts: Full, ANY, 60, gin::strong_signals;
    weak_signals_and_signals_in_windows_count: Full, ANY, 60, gin::weak_and_va_signals;
    counters_say_when_a_source_was_read: Full, ANY, 60, gin::counters;
    flushes_to_one_peer_say_when_a_source_was_read: Full, ANY, 60, gin::requests;
    contexts_have_signals_of_their_own: Full, ANY, 60, gin::contexts;
    bytes_move_from_and_to_any_byte: Full, ANY, 20, gin::bytes, Full;
    bytes_move_along_the_rail: Rail, ANY, 20, gin::bytes, Rail;
    signals_wrap_around: Full, ANY, 60, gin::wraps;
    a_signal_that_was_reset_counts_from_0: Full, ANY, 60, gin::resets;
    shadows_hold_and_follow: Full, ANY, 60, gin::shadows;
    waits_for_what_never_comes_end_in_every_thread: Full, ANY, 40, gin::timeouts;
    barriers_of_the_world_fence: Full, ANY, 10, gin::barriers, 0, Full;
    barriers_of_the_rail_fence: Full, ANY, 10, gin::barriers, 4, Full;
    barriers_of_the_rail_alone_fence: Rail, ANY, 10, gin::barriers, 4, Rail;
    barriers_made_in_addition_fence: Full, ANY, 5, gin::barriers, 8, Full;
    hybrid_barriers_fence_where_all_are_connected: Full, ANY, 20, gin::hybrid, Full;
    hybrid_barriers_fence_where_rails_are_connected: Rail, ANY, 20, gin::hybrid, Rail;
    parts_of_hybrid_barriers_work_alone: Full, ANY, 40, gin::hybrid_parts, Full;
    parts_of_hybrid_barriers_on_rails_work_alone: Rail, ANY, 40, gin::hybrid_parts, Rail;
    every_thread_learns_that_a_rank_never_came_to_a_network_barrier:
        Full, SMALL, 40, gin::barrier_timeouts;
}
