//! Operations in flight when a context is destroyed, a region deregistered or a rank closed: each
//! completes, or is dropped and accesses no freed memory.

mod fake;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use devcomm_rma_loopback::abi::{Opaque, SUCCESS, UNHANDLED_CUDA_ERROR};
use devcomm_rma_loopback::config::{Config, CopyMethod};

use fake::memory::{Kind, mappings_of};
use fake::{Bootstrap, Memory, Options, Rank, device, ok, on_another_thread, run_ranks};

const BYTES: usize = 1000;

/// Returns a small queue depth and few slots, so that most operations wait in the plugin.
fn limited() -> Options {
    let config = Config { depth: 1, slots: 2, slot_bytes: 256, ..Options::default().config };
    Options { delay: 1000, config, ..Options::default() }
}

#[test]
fn destroying_a_context_completes_its_operations() {
    for copy in [CopyMethod::Auto, CopyMethod::Staged] {
        let mut options = limited();
        options.config.copy = copy;
        run_ranks(&options, |rank, bootstrap| {
            let (inline, window) = (Memory::filled(BYTES, |at| at as u8), Memory::new(20 * BYTES));
            let (inline_at, window_at) = (rank.host(&inline), rank.window(&window));
            bootstrap.barrier.wait();
            for index in 0..20 {
                let to = (window_at, index * BYTES);
                assert_eq!(rank.try_put(0, (inline_at, 0), BYTES, to, 1 - rank.rank).0, SUCCESS);
            }
            rank.destroy_context();
            // NCCL frees the memory, then deregisters it. The test overwrites it instead.
            inline.write(0, &[0xee; BYTES]);
            ok(rank.deregister(inline_at));
            bootstrap.barrier.wait();
            for index in 0..20 {
                let expected: Vec<u8> = (0..BYTES).map(|at| at as u8).collect();
                assert!(
                    window.read(index * BYTES, BYTES) == expected,
                    "put {index} read its source after the free"
                );
            }
            bootstrap.barrier.wait();
        });
    }
}

#[test]
fn requests_that_are_never_tested_free_their_entries_for_the_next_context() {
    run_ranks(&Options::default(), |rank, bootstrap| {
        let window = Memory::new(64);
        let window_at = rank.window(&window);
        bootstrap.barrier.wait();
        for _ in 0..3 {
            // As many as the context's capacity: `depth` for each of two ranks.
            for _ in 0..2 * rank.depth {
                let to = (window_at, 32);
                assert_eq!(rank.try_put(0, (window_at, 0), 8, to, 1 - rank.rank).0, SUCCESS);
            }
            rank.destroy_context();
            rank.create_context(1);
        }
        bootstrap.barrier.wait();
    });
}

#[test]
fn operations_that_do_not_complete_are_dropped_with_an_error() {
    run_ranks(&limited(), |rank, bootstrap| {
        let (inline, window) = (Memory::filled(BYTES, |_| 7), Memory::new(20 * BYTES));
        let (inline_at, window_at) = (rank.host(&inline), rank.window(&window));
        bootstrap.barrier.wait();
        rank.device.stalled.store(true, Ordering::Release);
        bootstrap.barrier.wait();
        if rank.rank == 0 {
            for index in 0..20 {
                let to = (window_at, index * BYTES);
                assert_eq!(rank.try_put(0, (inline_at, 0), BYTES, to, 1).0, SUCCESS);
            }
            let start = Instant::now();
            rank.destroy_context();
            assert!(start.elapsed() < Duration::from_secs(10));
            inline.write(0, &[0xee; BYTES]);
            ok(rank.deregister(inline_at));
        }
        bootstrap.barrier.wait();
        rank.device.stalled.store(false, Ordering::Release);
        if rank.rank == 1 {
            assert!(rank.has_error());
            assert_ne!(rank.try_progress(), SUCCESS);
            // Deregistration returns when no put into the region is in flight.
            ok(rank.deregister(window_at));
            let seen = window.read(0, 20 * BYTES);
            assert!(!seen.contains(&0xee), "a put read its source after the free");
        }
        bootstrap.barrier.wait();
    });
}

#[test]
fn after_a_failure_memory_is_unmapped_only_when_no_copy_uses_it() {
    for stuck in [false, true] {
        let options = Options { memory: Kind::Owner, delay: 50_000, ..Options::default() };
        run_ranks(&options, |rank, bootstrap| {
            let window = Memory::filled(64, |_| 5);
            let target = Memory::new(64);
            let (window_at, target_at) = (rank.window(&window), rank.window(&target));
            bootstrap.barrier.wait();
            let mapped = || mappings_of(window.base() as usize);
            assert_eq!(mapped(), 1);
            // The second of two puts fails.
            rank.device.copies_left.store(1, Ordering::Relaxed);
            rank.device.stalled.store(stuck, Ordering::Release);
            bootstrap.barrier.wait();
            if rank.rank == 0 {
                let put = || rank.try_put_now((window_at, 0), 64, (target_at, 0), 1);
                assert_eq!(put(), SUCCESS);
                assert_eq!(put(), UNHANDLED_CUDA_ERROR);
                assert_eq!(rank.deregister(window_at), SUCCESS);
                assert_eq!(mapped(), usize::from(stuck));
            }
            bootstrap.barrier.wait();
            if rank.rank == 1 && !stuck {
                assert_eq!(target.read(0, 64), [5; 64], "unmapped during a copy");
            }
            // Lets the copy end while the memory is still allocated.
            rank.device.stalled.store(false, Ordering::Release);
            bootstrap.barrier.wait();
            ok(rank.deregister(target_at));
            bootstrap.barrier.wait();
        });
    }
}

#[test]
fn ranks_close_in_time_after_a_failure_although_a_stream_never_becomes_idle() {
    run_ranks(&Options::default(), |rank, bootstrap| {
        let window = Memory::new(64);
        let window_at = rank.window(&window);
        bootstrap.barrier.wait();
        rank.device.stalled.store(true, Ordering::Release);
        bootstrap.barrier.wait();
        if rank.rank == 0 {
            assert_eq!(rank.try_put_now((window_at, 0), 64, (window_at, 0), 1), SUCCESS);
        }
        bootstrap.barrier.wait();
        let start = Instant::now();
        rank.close();
        assert!(start.elapsed() < Duration::from_secs(10));
    });
}

#[test]
fn a_rank_connects_and_closes_while_another_thread_captures() {
    // The driver refuses calls that would end a capture, unless the thread's mode is relaxed.
    let options = Options { ranks: 1, ..Options::default() };
    let rank = Rank::start(&options, 0, device(0, &options), &Bootstrap::new(1));
    assert_eq!(fake::driver::capture_mode_of_this_thread(), 0);
    rank.close();
    assert_eq!(fake::driver::capture_mode_of_this_thread(), 0);
}

#[test]
fn only_progress_threads_keep_a_relaxed_capture_mode() {
    run_ranks(&Options::default(), |rank, bootstrap| {
        // 0: global, 2: relaxed.
        let mode = fake::driver::capture_mode_of_this_thread;
        let window = Memory::new(64);
        let window_at = rank.window(&window);
        bootstrap.barrier.wait();
        let window_at = window_at as usize;
        on_another_thread(rank, |rank| {
            ok(rank.deregister(window_at as Opaque));
            assert_eq!(mode(), 0);
        });
        ok(rank.try_progress());
        assert_eq!(mode(), 2);
        bootstrap.barrier.wait();
        on_another_thread(rank, |rank| {
            rank.close();
            assert_eq!(mode(), 0);
        });
    });
}
