//! GIN, its barriers and hybrid ones, in the simulator.

use devcomm::GinConnectionType::{Full, Rail};
use devcomm::sim::Error;
use devcomm_device_tests::cases::gin;
use devcomm_device_tests::{Machine, Setup, Simulated, kernels};

/// Runs a case with `seeds` seeds, on one LSA team and on several, and a few times with switches at any access.
fn with_seeds(seeds: u64, case: impl Fn(&Simulated)) {
    for seed in 0..seeds {
        let (ranks, team) =
            [(2, 1), (3, 3), (4, 2), (6, 3), (2, 2), (4, 4), (4, 1)][seed as usize % 7];
        case(&Simulated::teams(ranks, team, seed));
    }
    for seed in 0..seeds.div_ceil(16) {
        case(&Simulated::preempting(4, 2, seed));
    }
}

macro_rules! tests {
    ($($name:ident: $seeds:literal, $case:path $(, $arg:expr)*;)*) => { $(
        #[test]
        fn $name() {
            with_seeds($seeds, |machine| $case(machine $(, $arg)*));
        }
    )* };
}

tests! {
    puts_arrive_before_their_signals: 60, gin::put;
    puts_along_the_rail_arrive: 60, gin::put_along_the_rail;
    values_need_no_source: 60, gin::put_value;
    gets_are_there_after_a_flush: 60, gin::get;
    strong_signals_follow_earlier_puts: 60, gin::strong_signals;
    weak_signals_and_signals_in_windows_count: 60, gin::weak_and_va_signals;
    counters_say_when_a_source_was_read: 60, gin::counters;
    flushes_to_one_peer_say_when_a_source_was_read: 60, gin::requests;
    contexts_have_signals_of_their_own: 60, gin::contexts;
    bytes_move_from_and_to_any_byte: 20, gin::bytes, Full;
    bytes_move_along_the_rail: 20, gin::bytes, Rail;
    signals_wrap_around: 60, gin::wraps;
    a_signal_that_was_reset_counts_from_0: 60, gin::resets;
    shadows_hold_and_follow: 60, gin::shadows;
    waits_for_what_never_comes_end_in_every_thread: 40, gin::timeouts;
    barriers_of_the_world_fence: 10, gin::barriers, 0, Full;
    barriers_of_the_rail_fence: 10, gin::barriers, 4, Full;
    barriers_of_the_rail_alone_fence: 10, gin::barriers, 4, Rail;
    barriers_made_in_addition_fence: 5, gin::barriers, 8, Full;
    hybrid_barriers_fence_where_all_are_connected: 20, gin::hybrid, Full;
    hybrid_barriers_fence_where_rails_are_connected: 20, gin::hybrid, Rail;
    parts_of_hybrid_barriers_work_alone: 40, gin::hybrid_parts, Full;
    parts_of_hybrid_barriers_on_rails_work_alone: 40, gin::hybrid_parts, Rail;
}

#[test]
fn every_thread_learns_that_a_rank_never_came_to_a_network_barrier() {
    for seed in 0..40 {
        let (ranks, team) = [(2, 2), (2, 1), (3, 3), (4, 4)][seed as usize % 4];
        gin::barrier_timeouts(&Simulated::teams(ranks, team, seed));
    }
}

#[test]
fn a_kernel_that_forgets_its_signal_is_found_out_by_some_seed() {
    let setup = Setup::with_gin(1, 32);
    let found = |n: u32| {
        let wrong = |seed| {
            let words = Simulated::new(3, seed).run(kernels::reads_before_the_signal, &setup, &[n]);
            words.iter().flatten().any(|&wrong| wrong == 1)
        };
        (0..60).filter(|seed| wrong(*seed)).count()
    };
    assert_eq!(found(0), 0);
    assert!(found(1) > 5);
}

#[test]
fn broken_rules_are_reported_where_they_are_broken() {
    let setup = Setup { ll: (1, 2, 8), world_barriers: 1, ..Setup::with_gin(1, 32) };
    let messages = [
        "the device communicator has no such GIN context",
        "the signal is not reserved",
        "the signal is not reserved",
        "the counter is not reserved",
        "the barrier's signals are not reserved",
        "the peer is not in the session's team",
        "the peer is not in the session's team",
        "the session has no such element",
        "the session has no such element",
        "the session has no such element",
        "the elements do not fit the session's slots",
        "the elements do not fit the session's slots",
    ];
    for (i, message) in messages.iter().enumerate() {
        let n = i + 1;
        let error =
            Simulated::new(2, 1).try_run(kernels::breaks_a_rule, &setup, n as u32).unwrap_err();
        match error {
            Error::Panic { message: got, at, .. } => {
                assert_eq!(got, *message);
                assert!(at.contains("wrong.rs"), "rule {n} is reported at {at}");
            }
            other => panic!("rule {n}: {other}"),
        }
    }
    for n in [0, 13, 14] {
        let error = Simulated::new(2, 1).try_run(kernels::breaks_a_rule, &setup, n).unwrap_err();
        assert!(
            matches!(error, Error::Misuse { .. } | Error::OutOfBounds { .. }),
            "rule {n}: {error}"
        );
        assert!(error.to_string().contains("wrong.rs"), "rule {n}: {error}");
    }
}
