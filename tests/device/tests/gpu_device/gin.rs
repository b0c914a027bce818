//! GIN, its barriers and hybrid ones on GPUs that have it.

use devcomm::GinConnectionType::{self, Full, Rail};
use devcomm_device_tests::cases::gin;
use devcomm_device_tests::{Gpus, on_gpus_with_gin};

/// Runs a case on 2 and on 4 GPUs, in whatever LSA teams NCCL divides them.
fn on_each(name: &str, gin: GinConnectionType, case: impl Fn(&Gpus)) {
    for ranks in [2, 4] {
        on_gpus_with_gin(&format!("{name} on {ranks}"), ranks, gin, &case);
    }
}

macro_rules! tests {
    ($($name:ident: $connection:ident, $case:path $(, $arg:expr)*;)*) => { $(
        #[test]
        fn $name() {
            on_each(stringify!($name), $connection, |gpus| $case(gpus $(, $arg)*));
        }
    )* };
}

tests! {
    puts_arrive_before_their_signals: Full, gin::put;
    puts_along_the_rail_arrive: Rail, gin::put_along_the_rail;
    values_need_no_source: Full, gin::put_value;
    gets_are_there_after_a_flush: Full, gin::get;
    strong_signals_follow_earlier_puts: Full, gin::strong_signals;
    weak_signals_and_signals_in_windows_count: Full, gin::weak_and_va_signals;
    counters_say_when_a_source_was_read: Full, gin::counters;
    flushes_to_one_peer_say_when_a_source_was_read: Full, gin::requests;
    contexts_have_signals_of_their_own: Full, gin::contexts;
    bytes_move_from_and_to_any_byte: Full, gin::bytes, Full;
    bytes_move_along_the_rail: Rail, gin::bytes, Rail;
    signals_wrap_around: Full, gin::wraps;
    a_signal_that_was_reset_counts_from_0: Full, gin::resets;
    shadows_hold_and_follow: Full, gin::shadows;
    waits_for_what_never_comes_end_in_every_thread: Full, gin::timeouts;
    barriers_of_the_world_fence: Full, gin::barriers, 0, Full;
    barriers_of_the_rail_fence: Full, gin::barriers, 4, Full;
    barriers_of_the_rail_alone_fence: Rail, gin::barriers, 4, Rail;
    barriers_made_in_addition_fence: Full, gin::barriers, 8, Full;
    hybrid_barriers_fence_where_all_are_connected: Full, gin::hybrid, Full;
    hybrid_barriers_fence_where_rails_are_connected: Rail, gin::hybrid, Rail;
    parts_of_hybrid_barriers_on_rails_work_alone: Rail, gin::hybrid_parts, Rail;
    parts_of_hybrid_barriers_work_alone: Full, gin::hybrid_parts, Full;
    every_thread_learns_that_a_rank_never_came_to_a_network_barrier: Full, gin::barrier_timeouts;
}
