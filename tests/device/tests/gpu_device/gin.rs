//! GIN, its barriers and hybrid ones on GPUs that have it.

use devcomm::GinConnectionType::Full;
use devcomm_device_tests::cases::gin;
use devcomm_device_tests::on_gpus_with_gin;

macro_rules! tests {
    ($($name:ident: $case:path $(, $arg:expr)*;)*) => { $(
        #[test]
        fn $name() {
            for ranks in [2, 4] {
                let name = format!("{} on {ranks}", stringify!($name));
                on_gpus_with_gin(&name, ranks, |gpus| $case(gpus $(, $arg)*));
            }
        }
    )* };
}

tests! {
    puts_arrive_before_their_signals: gin::put;
    values_need_no_source: gin::put_value;
    gets_are_there_after_a_flush: gin::get;
    strong_signals_follow_earlier_puts: gin::strong_signals;
    weak_signals_and_signals_in_windows_count: gin::weak_and_va_signals;
    counters_say_when_a_source_was_read: gin::counters;
    flushes_to_one_peer_say_when_a_source_was_read: gin::requests;
    contexts_have_signals_of_their_own: gin::contexts;
    bytes_move_from_and_to_any_byte: gin::bytes, Full;
    signals_wrap_around: gin::wraps;
    a_signal_that_was_reset_counts_from_0: gin::resets;
    shadows_hold_and_follow: gin::shadows;
    waits_for_what_never_comes_end_in_every_thread: gin::timeouts;
    barriers_of_the_world_fence: gin::barriers, 0, Full;
    barriers_of_the_rail_fence: gin::barriers, 4, Full;
    barriers_made_in_addition_fence: gin::barriers, 8, Full;
    hybrid_barriers_fence_where_all_are_connected: gin::hybrid, Full;
    parts_of_hybrid_barriers_work_alone: gin::hybrid_parts, Full;
    every_thread_learns_that_a_rank_never_came_to_a_network_barrier: gin::barrier_timeouts;
}
