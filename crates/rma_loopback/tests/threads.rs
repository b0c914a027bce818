//! Ranks as threads of one process: order, completion, bounds, and errors.

mod fake;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use devcomm_rma_loopback::abi::{
    INVALID_ARGUMENT, INVALID_USAGE, PTR_CUDA, PTR_HOST, REMOTE_ERROR, SIGNAL_ADD, SUCCESS,
    TIMEOUT, UNHANDLED_CUDA_ERROR,
};
use devcomm_rma_loopback::config::{Config, CopyMethod, SignalMethod};

use fake::memory::{Kind, mappings_of};
use fake::{
    Bootstrap, IMPATIENCE, Memory, NO_DATA, Options, Rank, device, listen, run_ranks, setup, work,
};

fn config() -> Config {
    Options::default().config
}

fn wait(bootstrap: &Bootstrap) {
    bootstrap.barrier.wait();
}

fn traffic(options: &Options) {
    run_ranks(options, |rank, bootstrap| {
        work::traffic(rank, options.contexts, &|| wait(bootstrap));
    });
}

fn ranges(options: &Options) {
    run_ranks(options, |rank, bootstrap| work::ranges(rank, &|| wait(bootstrap)));
}

#[test]
fn signals_come_after_all_earlier_data() {
    traffic(&Options { ranks: 4, contexts: 2, ..Options::default() });
}

#[test]
fn signals_come_after_data_in_every_version_of_the_interface() {
    for version in [14, 15] {
        traffic(&Options { ranks: 2, contexts: 3, version, ..Options::default() });
    }
}

#[test]
fn signals_come_after_data_when_devices_add_atomically() {
    traffic(&Options { ranks: 3, reductions: true, ..Options::default() });
    let config = Config { signal: SignalMethod::Write, ..config() };
    traffic(&Options { ranks: 2, reductions: true, config, ..Options::default() });
}

#[test]
fn signals_come_after_data_through_host_memory() {
    let config = Config { copy: CopyMethod::Staged, slots: 3, slot_bytes: 512, ..config() };
    traffic(&Options { ranks: 3, contexts: 2, config, ..Options::default() });
}

#[test]
fn full_queues_delay_operations_and_lose_none() {
    let config = Config { depth: 1, slots: 2, slot_bytes: 256, ..config() };
    traffic(&Options { ranks: 3, config, ..Options::default() });
    let config = Config { copy: CopyMethod::Staged, ..config };
    traffic(&Options { ranks: 2, contexts: 2, config, ..Options::default() });
}

#[test]
fn signals_come_after_data_in_memory_of_every_kind() {
    for memory in [Kind::AllDevices, Kind::Owner, Kind::Malloc] {
        let options = Options { ranks: 3, memory, ..Options::default() };
        run_ranks(&options, |rank, bootstrap| {
            work::traffic(rank, 1, &|| wait(bootstrap));
            let peer_copies = rank.device.peer_copies.load(Ordering::Relaxed);
            assert_eq!(peer_copies > 0, memory == Kind::Malloc, "peer copies are a last resort");
        });
        ranges(&options);
    }
    let config = Config { copy: CopyMethod::Peer, ..config() };
    traffic(&Options { ranks: 2, memory: Kind::Malloc, config, ..Options::default() });
    let config = Config { copy: CopyMethod::Mapped, ..config };
    traffic(&Options { ranks: 2, memory: Kind::Owner, config, ..Options::default() });
}

#[test]
fn a_mapping_for_other_devices_ends_with_its_region_and_no_copy_sees_it() {
    let options = Options { memory: Kind::Owner, delay: 2000, ..Options::default() };
    run_ranks(&options, |rank, bootstrap| {
        let memory = [(); 3].map(|()| Memory::new(64));
        let mapped = |index: usize| mappings_of(memory[index].base() as usize);
        let first = rank.window(&memory[0]);
        let second = rank.window(&memory[1]);
        let signals = rank.signals(&memory[2]);
        assert_eq!([mapped(0), mapped(1), mapped(2)], [1, 1, 0]);
        bootstrap.barrier.wait();
        rank.put(0, (first, 0), 64, (second, 0), 1 - rank.rank);
        rank.signal(0, 1 - rank.rank, (signals, 0), 1);
        rank.drain();
        bootstrap.barrier.wait();
        let others: Vec<_> =
            (0..8).map(|_| rank.try_put(0, (first, 0), 64, (second, 0), 1 - rank.rank)).collect();
        assert_eq!(rank.deregister(first), SUCCESS);
        for (status, request) in others {
            assert_eq!(status, SUCCESS);
            assert_eq!(rank.try_test(request), (SUCCESS, true), "a copy was still in flight");
        }
        bootstrap.barrier.wait();
        assert_eq!([mapped(0), mapped(1)], [0, 1]);
        rank.close();
        assert_eq!(mapped(1), 0);
        bootstrap.barrier.wait();
    });
}

#[test]
fn puts_and_gets_reach_device_and_host_memory() {
    ranges(&Options { ranks: 3, ..Options::default() });
    let config = Config { slots: 2, slot_bytes: 4096, ..config() };
    ranges(&Options { ranks: 2, config, ..Options::default() });
    let config = Config { copy: CopyMethod::Staged, ..config };
    ranges(&Options { ranks: 2, config, ..Options::default() });
}

#[test]
fn complete_operations_have_moved_their_data() {
    let options = Options { delay: 500, ..Options::default() };
    run_ranks(&options, |rank, bootstrap| work::one_by_one(rank, &|| wait(bootstrap)));
}

#[test]
fn short_values_of_every_width_and_place_arrive() {
    run_ranks(&Options::default(), |rank, bootstrap| {
        let source = Memory::filled(64, |at| at as u8 + 1);
        let target = Memory::new(256);
        let (source_at, target_at) = (rank.host(&source), rank.window(&target));
        bootstrap.barrier.wait();
        for (index, bytes) in (1..=8).chain([4, 8]).enumerate() {
            let to = 16 * index + usize::from(index >= 8); // the last two are not aligned
            rank.put(0, (source_at, index), bytes, (target_at, to), 1 - rank.rank);
        }
        rank.drain();
        bootstrap.barrier.wait();
        for (index, bytes) in (1..=8).chain([4, 8]).enumerate() {
            let to = 16 * index + usize::from(index >= 8);
            assert_eq!(target.read(to, bytes), source.read(index, bytes));
            assert_eq!(target.read(to + bytes, 4), [0; 4]);
        }
    });
}

#[test]
fn signals_that_come_together_or_while_a_stream_is_busy_are_written_together() {
    const SIGNALS: u64 = 200;
    for reductions in [false, true] {
        let options = Options { delay: 3000, reductions, ..Options::default() };
        run_ranks(&options, |rank, bootstrap| {
            let words = Memory::new(16);
            let words_at = rank.signals(&words);
            bootstrap.barrier.wait();
            for signal in 0..SIGNALS {
                let to = (words_at, 8 * (signal % 2) as usize);
                rank.put_signal(0, NO_DATA, 0, NO_DATA, 1 - rank.rank, to, 3, SIGNAL_ADD);
            }
            rank.drain();
            bootstrap.barrier.wait();
            assert_eq!([0, 1].map(|word| words.load(word)), [SIGNALS / 2 * 3; 2]);
            let batches = rank.device.batches.load(Ordering::Relaxed);
            assert!((1..SIGNALS / 4).contains(&batches), "{batches} calls");
            bootstrap.barrier.wait();
        });
    }
}

#[test]
fn one_copy_writes_many_signals_and_changes_no_other_word() {
    const ROUNDS: u64 = 20;
    // The second case's range is too long for one copy, and the third has too few signals.
    for (signals, apart) in [(16, 2), (16, 6), (5, 1)] {
        run_ranks(&Options::default(), |rank, bootstrap| {
            let words = Memory::new(8 * signals * apart);
            let words_at = rank.signals(&words);
            bootstrap.barrier.wait();
            for round in 0..ROUNDS {
                for signal in 0..signals {
                    let (to, add) = ((words_at, 8 * signal * apart), signal as u64 + round);
                    rank.put_signal(0, NO_DATA, 0, NO_DATA, 1 - rank.rank, to, add, SIGNAL_ADD);
                }
                rank.drain();
            }
            bootstrap.barrier.wait();
            for word in 0..signals * apart {
                let signal = (word / apart) as u64;
                let sum = ROUNDS * signal + ROUNDS * (ROUNDS - 1) / 2;
                assert_eq!(words.load(word), if word % apart == 0 { sum } else { 0 });
            }
            bootstrap.barrier.wait();
        });
    }
}

#[test]
fn a_va_signal_adds_to_the_value_that_a_kernel_wrote() {
    run_ranks(&Options::default(), |rank, bootstrap| {
        let words = Memory::new(8);
        let words_at = rank.window(&words);
        bootstrap.barrier.wait();
        for start in [0, 1000, 0] {
            words.word(0).store(start, Ordering::Release);
            bootstrap.barrier.wait();
            rank.signal(0, 1 - rank.rank, (words_at, 0), 7);
            rank.drain();
            bootstrap.barrier.wait();
            assert_eq!(words.load(0), start + 7);
        }
    });
}

#[test]
fn va_signals_are_refused_if_several_connections_would_lose_some() {
    let config = Config { connections: 2, ..config() };
    for reductions in [false, true] {
        run_ranks(&Options { reductions, config, ..Options::default() }, |rank, bootstrap| {
            let (words, signals) = (Memory::new(8), Memory::new(8));
            let (words_at, signals_at) = (rank.window(&words), rank.signals(&signals));
            bootstrap.barrier.wait();
            rank.signal(0, 1 - rank.rank, (signals_at, 0), 1);
            rank.drain();
            bootstrap.barrier.wait();
            if rank.rank == 0 {
                let (status, request) =
                    rank.try_put_signal(0, NO_DATA, 0, NO_DATA, 1, (words_at, 0), 1, SIGNAL_ADD);
                assert_eq!(status, SUCCESS);
                if reductions {
                    rank.serve(|| rank.try_test(request) == (SUCCESS, true));
                } else {
                    assert!((0..IMPATIENCE).any(|_| rank.try_progress() == INVALID_USAGE));
                }
            }
            bootstrap.barrier.wait();
        });
    }
}

#[test]
fn memory_that_is_not_mapped_is_refused_if_copies_require_it() {
    let config = Config { copy: CopyMethod::Mapped, ..config() };
    let options = Options { memory: Kind::Malloc, config, ..Options::default() };
    run_ranks(&options, |rank, bootstrap| {
        let memory = Memory::new(64);
        let at = rank.window(&memory);
        bootstrap.barrier.wait();
        if rank.rank == 0 {
            assert_eq!(rank.try_put_now((at, 0), 64, (at, 0), 1), INVALID_USAGE);
        }
    });
}

#[test]
fn deregistering_a_region_does_not_access_its_memory() {
    run_ranks(&Options::default(), |rank, bootstrap| {
        // NCCL frees the inline buffers before it deregisters them.
        let gone = rank.register_raw(8 as _, 1 << 20, PTR_HOST, 0);
        let again = rank.register_raw(4096 as _, 1 << 20, PTR_CUDA, 0);
        rank.destroy_context();
        assert_eq!(rank.deregister(gone), SUCCESS);
        assert_eq!(rank.deregister(again), SUCCESS);
        assert_eq!(rank.deregister(again), INVALID_ARGUMENT);
        bootstrap.barrier.wait();
    });
}

#[test]
fn a_range_beyond_its_region_is_refused_and_ends_the_connection() {
    run_ranks(&Options::default(), |rank, bootstrap| {
        let memory = Memory::new(64);
        let at = rank.window(&memory);
        bootstrap.barrier.wait();
        if rank.rank == 0 {
            assert_eq!(rank.try_put(0, (at, 60), 8, (at, 0), 1).0, INVALID_ARGUMENT);
            assert_eq!(rank.try_put(0, (at, 0), 8, (at, 0), 1).0, INVALID_ARGUMENT);
            assert!(rank.has_error());
        }
    });
}

#[test]
fn wrong_contexts_ranks_and_handles_are_refused() {
    for case in 0..4 {
        run_ranks(&Options::default(), |rank, bootstrap| {
            let memory = Memory::new(64);
            let at = rank.window(&memory);
            bootstrap.barrier.wait();
            if rank.rank == 0 {
                let status = match case {
                    0 => rank.try_put(1, (at, 0), 8, (at, 0), 1).0,
                    1 => rank.try_put(0, (at, 0), 8, (at, 0), 2).0,
                    2 => rank.try_put(0, NO_DATA, 8, (at, 0), 1).0,
                    _ => rank.try_test(77 as _).0,
                };
                assert_eq!(status, INVALID_ARGUMENT, "case {case}");
            }
        });
    }
}

#[test]
fn a_failed_copy_is_an_error_of_every_rank_from_then_on() {
    run_ranks(&Options { ranks: 3, ..Options::default() }, |rank, bootstrap| {
        let memory = Memory::new(64);
        let at = rank.window(&memory);
        bootstrap.barrier.wait();
        if rank.rank == 1 {
            rank.device.copies_left.store(0, Ordering::Relaxed);
        }
        bootstrap.barrier.wait();
        if rank.rank == 0 {
            assert!(!rank.has_error());
            let status = rank.try_put_now((at, 0), 64, (at, 0), 1);
            assert_eq!(status, UNHANDLED_CUDA_ERROR);
            assert!(rank.has_error());
        }
        bootstrap.barrier.wait();
        assert_eq!(rank.try_progress(), UNHANDLED_CUDA_ERROR);
        assert!(rank.has_error());
    });
}

#[test]
fn a_put_to_a_rank_that_has_closed_is_an_error() {
    let options = Options { delay: 20, ..Options::default() };
    let bootstrap = Bootstrap::new(2);
    let left = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for number in 0..2 {
            let (bootstrap, options, left) = (&bootstrap, &options, &left);
            scope.spawn(move || {
                let rank = Rank::start(options, number, device(number, options), bootstrap);
                let memory = Memory::new(64);
                let at = rank.window(&memory);
                bootstrap.barrier.wait();
                if number == 0 {
                    // Operations in flight when the other rank closes still complete.
                    rank.put(0, (at, 0), 64, (at, 0), 1);
                    bootstrap.barrier.wait();
                    rank.drain();
                    rank.serve(|| left.load(Ordering::Acquire));
                    assert_eq!(rank.try_put(0, (at, 0), 64, (at, 0), 1).0, REMOTE_ERROR);
                    assert!(rank.has_error());
                    rank.close();
                } else {
                    bootstrap.barrier.wait();
                    rank.close();
                    left.store(true, Ordering::Release);
                    std::thread::sleep(Duration::from_millis(50)); // `memory` outlives the copy
                }
            });
        }
    });
}

#[test]
fn connecting_ends_at_the_timeout() {
    let config = Config { timeout: Duration::from_millis(50), ..config() };
    device(0, &Options { config, ..Options::default() });
    let (one, other) = (listen(), listen());
    let (status, _) = one.connect(&mut [one.handle, other.handle], 0);
    assert_eq!(status, TIMEOUT);
    one.close();
    other.close();
}

#[test]
fn ranks_of_another_host_or_plugin_are_refused() {
    device(0, &Options::default());
    let one = listen();
    let mut other = one.handle;
    other[8] ^= 1; // the host's identifier
    assert_eq!(one.connect(&mut [one.handle, other], 0).0, INVALID_USAGE);
    other = one.handle;
    other[0] ^= 1; // the plugin's magic number
    assert_eq!(one.connect(&mut [one.handle, other], 0).0, INVALID_USAGE);
    one.close();
}

#[test]
fn connecting_without_a_current_device_is_an_error() {
    setup(config()).use_on_this_thread();
    let one = listen();
    assert_eq!(one.connect(&mut [one.handle], 0).0, INVALID_USAGE);
    one.close();
}

#[test]
fn a_rank_that_connects_after_another_has_failed_gets_its_error() {
    setup(config()).use_on_this_thread();
    let (one, other) = (listen(), listen());
    let mut handles = [one.handle, other.handle];
    // It has no device yet.
    assert_eq!(one.connect(&mut handles, 0).0, INVALID_USAGE);
    device(1, &Options::default());
    assert_eq!(other.connect(&mut handles, 1).0, INVALID_USAGE);
    one.close();
    other.close();
}

#[test]
fn ranks_that_disagree_on_their_number_do_not_wait_for_each_other() {
    let options = Options::default();
    device(1, &options);
    let [one, other, third] = [listen(), listen(), listen()];
    let mut handles = [one.handle, other.handle, third.handle];
    let mut fewer = [one.handle, other.handle];
    std::thread::scope(|scope| {
        let first = scope.spawn(move || {
            device(0, &options);
            let status = one.connect(&mut fewer, 0).0;
            one.close();
            status
        });
        assert_eq!(other.connect(&mut handles, 1).0, INVALID_ARGUMENT);
        assert_eq!(first.join().unwrap(), INVALID_ARGUMENT);
    });
    other.close();
    third.close();
}

/// Two rails of two ranks each, and a connection of all four: each connection numbers its own ranks
/// from 0.
#[test]
fn connections_of_some_ranks_number_them_anew() {
    let options = Options { ranks: 4, ..Options::default() };
    let rails = [Bootstrap::new(2), Bootstrap::new(2)];
    run_ranks(&options, |rank, bootstrap| {
        let all = Memory::new(64);
        let all_at = rank.window(&all);
        rank.device.make_current();
        setup(options.config).use_on_this_thread();
        let (rail, number) = (rank.rank % 2, rank.rank / 2);
        let on_rail = Rank::start(&options, number, rank.device, &rails[rail]);
        let some = Memory::filled(64, |_| rank.rank as u8);
        let some_at = on_rail.window(&some);
        bootstrap.barrier.wait();
        on_rail.put(0, (some_at, 0), 8, (some_at, 8), 1 - number);
        rank.signal(0, (rank.rank + 1) % 4, (all_at, 0), 3);
        on_rail.drain();
        rank.drain();
        bootstrap.barrier.wait();
        assert_eq!(some.read(8, 8), [(rank.rank as u8 + 2) % 4; 8]);
        assert_eq!(all.load(0), 3);
        on_rail.close();
        pop_context();
    });
}

/// Pops the context that `make_current` pushed on this thread.
fn pop_context() {
    // SAFETY: the argument is a valid out pointer.
    unsafe { (fake::driver::functions().cuCtxPopCurrent_v2)(&mut std::ptr::null_mut()) };
}
