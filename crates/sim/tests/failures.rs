//! What is wrong with a kernel is reported, with who and where, and never a hang.

use std::time::Duration;

use cuda_std::atomic::{Atomic, Order, Scope};
use cuda_std::prelude::*;
use devcomm_sim::{DevCommConfig, Error, LaunchConfig, Limit, Simulator, Stall, ThreadId, Waiting};
use nccl_device::{BarrierIndex, Coop, DevComm, LsaBarrier, MemoryOrder, Window};

/// The error of a launch that must fail.
macro_rules! error_of {
    ($sim:expr, $kernel:expr, $grid:expr, $block:expr, $args:expr) => {
        // SAFETY: the kernel is wrong in a way that the simulator reports before harm is done.
        unsafe { $sim.launch($kernel, LaunchConfig::new($grid, $block), $args) }.unwrap_err()
    };
}

fn comm(sim: &Simulator, lsa_barriers: u32) -> devcomm_sim::DevComm {
    sim.dev_comm(DevCommConfig { lsa_barriers, ..Default::default() }).unwrap()
}

fn deadlock(error: Error) -> Box<Stall> {
    match error {
        Error::Deadlock(stall) => stall,
        other => panic!("not a deadlock: {other}"),
    }
}

#[kernel]
unsafe fn rank_1_skips(comm: DevComm) {
    LsaBarrier::with(Coop::cta(), &comm, BarrierIndex::this_block(), |barrier| {
        barrier.sync(MemoryOrder::Acquire);
        if comm.rank() == 1 && thread::block_idx_x() == 1 {
            return;
        }
        barrier.sync(MemoryOrder::Release);
    });
}

#[test]
fn a_deadlock_names_who_waits_for_which_peer_and_where() {
    let sim = Simulator::new(3).unwrap();
    let comm = comm(&sim, 2);
    let error = error_of!(sim, rank_1_skips, 2, 64, |rank| (comm.rank(rank),));
    let text = error.to_string();
    let stall = deadlock(error);
    assert_eq!(stall.kernel, "rank_1_skips");
    assert_eq!(stall.threads(), 2 * 64);
    let waiting = |rank: usize| {
        let mut of_rank = stall.waiters.iter().filter(|w| w.rank == rank);
        of_rank.find(|w| matches!(w.what, Waiting::Peers { .. })).unwrap()
    };
    for rank in [0, 2] {
        let waiter = waiting(rank);
        assert_eq!(waiter.block, 1);
        assert_eq!(waiter.what, Waiting::Peers { index: 1, missing: vec![1] });
        assert!(waiter.at.unwrap().file().ends_with("failures.rs"));
    }
    assert_eq!(stall.ended, [1, 2, 1]);
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines[0], "deadlock in rank_1_skips: 128 threads wait, and none can go on");
    let first =
        "  rank 0 block 1: 1 thread waits for LSA barrier 1, where rank 1 has not arrived, at ";
    assert!(lines[1].starts_with(first), "{text}");
    assert!(lines[2].contains("63 threads wait for sync_threads, at"));
    assert_eq!(lines[6], "  rank 1: 2 blocks have ended");
}

#[test]
fn a_device_communicator_of_a_failed_kernel_is_refused_and_all_else_goes_on() {
    let sim = Simulator::new(2).unwrap();
    let first = comm(&sim, 2);
    deadlock(error_of!(sim, rank_1_skips, 2, 32, |rank| (first.rank(rank),)));
    let again = error_of!(sim, rank_1_skips, 1, 32, |rank| (first.rank(rank),));
    assert!(again.to_string().contains("make a new one"), "{again}");
    let second = comm(&sim, 1);
    let launch = LaunchConfig::new(1, 32);
    // SAFETY: block 1, which does wrong, is not launched.
    unsafe { sim.launch(rank_1_skips, launch, |rank| (second.rank(rank),)) }.unwrap();
}

#[kernel]
unsafe fn half_a_block_syncs() {
    if thread::thread_idx_x() < 32 {
        let seen = shared_array![u32; 1];
        // SAFETY: the mask names the lanes that take part; only they touch the word.
        unsafe {
            *seen = 1;
            warp::sync();
            // Lane 31 never comes to the shuffle.
            if thread::thread_idx_x() != 31 {
                warp::shuffle_xor(1_u32, 1);
            } else {
                thread::sync_threads();
            }
        }
    }
}

#[test]
fn a_deadlock_names_warps_and_block_barriers() {
    let sim = Simulator::new(1).unwrap();
    let stall = deadlock(error_of!(sim, half_a_block_syncs, 1, 64, |_| ()));
    let what: Vec<_> = stall.waiters.iter().map(|w| (w.threads, &w.what)).collect();
    assert!(what.contains(&(31, &Waiting::Warp { mask: !0 })), "{what:?}");
    assert!(what.contains(&(1, &Waiting::Block { barrier: 0 })), "{what:?}");
}

#[kernel]
unsafe fn diverges() {
    if thread::thread_idx_x() < 32 {
        thread::sync_threads();
    } else {
        thread::block_fence();
        thread::sync_threads();
    }
}

#[test]
#[cfg(debug_assertions)]
fn threads_at_different_barriers_are_reported() {
    let sim = Simulator::new(1).unwrap();
    let error = error_of!(sim, diverges, 1, 64, |_| ());
    let Error::Divergent { thread, at, other, .. } = error else { panic!("{error}") };
    assert_eq!(thread, ThreadId { rank: 0, block: 0, thread: 32 });
    assert_eq!(at.line(), other.line() + 3);
}

#[kernel]
unsafe fn panics(x: u32) {
    assert!(thread::thread_idx_x() != 5, "x is {x}");
    thread::sync_threads();
}

#[test]
fn a_panic_is_an_error_with_place_and_thread() {
    let sim = Simulator::new(2).unwrap();
    let error = error_of!(sim, panics, 1, 32, |rank| (rank as u32 + 3,));
    let Error::Panic { thread, at, message, .. } = error else { panic!("{error}") };
    assert_eq!(thread, ThreadId { rank: 0, block: 0, thread: 5 });
    assert_eq!(message, "x is 3");
    assert!(at.contains("failures.rs:"), "{at}");
}

struct SyncOnDrop;

impl Drop for SyncOnDrop {
    fn drop(&mut self) {
        thread::sync_threads();
    }
}

#[kernel]
unsafe fn panics_with_a_guard() {
    let _guard = SyncOnDrop;
    assert!(thread::thread_idx_x() != 1, "out");
}

#[test]
fn a_panic_does_not_wait_in_destructors() {
    let sim = Simulator::new(1).unwrap();
    let error = error_of!(sim, panics_with_a_guard, 1, 2, |_| ());
    assert!(matches!(error, Error::Panic { .. }), "{error}");
    assert!(!std::thread::panicking());
}

#[kernel]
unsafe fn stores_behind(out: Window<u32>, peer: i32, at: usize) {
    if thread::thread_idx_x() == 3 {
        // SAFETY: none; the index may be wrong on purpose.
        unsafe { out.lsa(peer).store(at, 1) };
    }
}

#[test]
fn an_access_outside_a_window_is_reported_before_it_happens() {
    let sim = Simulator::new(2).unwrap();
    let out = sim.window::<u32>(100).unwrap();
    let error = error_of!(sim, stores_behind, 1, 4, |rank| (out.rank(rank), 1, 104_usize));
    let Error::OutOfBounds { thread, bytes, ref where_to, at, .. } = error else {
        panic!("{error}")
    };
    assert_eq!((thread.rank, thread.block, thread.thread, bytes), (0, 0, 3, 4));
    assert_eq!(where_to, "16 bytes behind the end of window 0, rank 1's part, 400 bytes");
    assert!(at.file().ends_with("failures.rs"));
    let error = error_of!(sim, stores_behind, 1, 4, |rank| (out.rank(rank), 2, 0_usize));
    assert!(error.to_string().contains("rank 2, which is not in the LSA team"), "{error}");
}

#[kernel]
unsafe fn stores_to(out: *mut u32) {
    // SAFETY: none; the buffer may be another rank's.
    unsafe { mem::store(out, 1) };
}

#[test]
fn another_ranks_buffer_is_out_of_reach() {
    let sim = Simulator::new(2).unwrap();
    let of_rank_1 = sim.buffer::<u32>(1, 1).unwrap();
    let error = error_of!(sim, stores_to, 1, 1, |_| (&of_rank_1,));
    let Error::OutOfBounds { thread, .. } = error else { panic!("{error}") };
    assert_eq!(thread.rank, 0);
    assert!(error.to_string().contains("buffer 0 of rank 1"), "{error}");
}

#[kernel]
unsafe fn wants_much_shared() {
    shared_array![u8; 40_000];
    shared_array![u8; 10_000];
}

#[test]
fn more_static_shared_memory_than_a_block_has_is_reported() {
    let sim = Simulator::new(1).unwrap();
    let error = error_of!(sim, wants_much_shared, 1, 1, |_| ());
    assert!(matches!(error, Error::SharedMemory { bytes: 10_000, .. }), "{error}");
}

#[kernel]
unsafe fn writes_plainly_behind(out: *mut u32, at: usize) {
    // SAFETY: none; the index is wrong on purpose.
    unsafe { out.add(at).write_volatile(1) };
}

#[test]
fn a_plain_access_to_unmapped_memory_is_an_error_and_no_crash() {
    let sim = Simulator::new(1).unwrap();
    let out = sim.buffer::<u32>(0, 64).unwrap();
    let error = error_of!(sim, writes_plainly_behind, 1, 1, |_| (&out, 64_usize));
    let Error::Fault { address, ref where_to, .. } = error else { panic!("{error}") };
    assert_eq!(address.map(|a| a as u64), Some(out.address() + 256));
    assert!(where_to.ends_with("0 bytes behind the end of buffer 0 of rank 0, 256 bytes"));
    let error = error_of!(sim, writes_plainly_behind, 1, 1, |_| (&out, 1_usize << 52));
    assert!(matches!(error, Error::Fault { .. }), "{error}");
    // The simulator goes on.
    let args = |_| (&out, 63_usize);
    // SAFETY: the index is right.
    unsafe { sim.launch(writes_plainly_behind, LaunchConfig::new(1, 1), args) }.unwrap();
    assert_eq!(out.read()[63], 1);
}

fn deep(n: u32) -> u32 {
    let mut frame = [n; 64];
    std::hint::black_box(&mut frame);
    if n == 0 { frame[0] } else { deep(n - 1) + std::hint::black_box(frame[63]) }
}

#[kernel]
unsafe fn recurses(depth: u32) {
    std::hint::black_box(deep(depth));
}

#[test]
fn a_stack_that_is_full_is_an_error_and_no_crash() {
    let sim = Simulator::new(1).unwrap();
    let error = error_of!(sim, recurses, 2, 64, |_| (100_000_u32,));
    assert!(matches!(error, Error::StackOverflow { stack: 0x10000, .. }), "{error}");
    // SAFETY: the kernel touches nothing.
    unsafe { sim.launch(recurses, LaunchConfig::new(2, 64), |_| (10_u32,)) }.unwrap();
}

#[kernel]
unsafe fn overruns_shared() {
    let array = shared_array![u32; 3];
    // SAFETY: none; the fourth element is not there.
    unsafe { array.add(3).write_volatile(1) };
}

#[test]
fn a_shared_array_that_was_overrun_is_reported() {
    let sim = Simulator::new(1).unwrap();
    let error = error_of!(sim, overruns_shared, 1, 1, |_| ());
    assert!(matches!(error, Error::SharedOverrun { what: "static", bytes: 12, .. }), "{error}");
}

#[kernel]
unsafe fn takes_barrier(comm: DevComm, index: u32) {
    LsaBarrier::with(Coop::cta(), &comm, BarrierIndex::new(index), |b| b.sync(MemoryOrder::AcqRel));
}

#[test]
fn a_barrier_index_that_is_not_there_is_reported() {
    let sim = Simulator::new(2).unwrap();
    let comm = comm(&sim, 1);
    let error = error_of!(sim, takes_barrier, 1, 1, |rank| (comm.rank(rank), 1_u32));
    // The typed layer checks in debug builds, the simulator always.
    assert!(matches!(error, Error::Panic { .. } | Error::Misuse { .. }), "{error}");
    assert!(error.to_string().contains("barrier"), "{error}");
}

#[test]
fn one_barrier_with_two_users_is_reported() {
    let sim = Simulator::new(1).unwrap();
    let comm = comm(&sim, 2);
    // One rank passes the barrier at once: random order makes the sessions overlap.
    let error = (0..64).find_map(|seed| {
        let sim = Simulator::builder().ranks(2).seed(seed).build().unwrap();
        let comm = sim.dev_comm(DevCommConfig { lsa_barriers: 2, ..Default::default() }).unwrap();
        let args = |rank: usize| (comm.rank(rank), 0_u32);
        // SAFETY: the kernel is wrong in a way that the simulator reports.
        unsafe { sim.launch(takes_barrier, LaunchConfig::new(2, 2), args) }.err()
    });
    drop(comm);
    let error = error.unwrap();
    assert!(error.to_string().contains("LSA barrier 0 is in use by block"), "{error}");
}

#[kernel]
unsafe fn polls(flag: *mut u32) {
    // SAFETY: the buffer has a word.
    let flag = unsafe { Atomic::from_ptr(flag) };
    if thread::thread_idx_x() == 0 {
        while flag.load(Order::Acquire, Scope::Gpu) == 0 {}
    } else {
        thread::sync_threads();
    }
}

#[test]
fn threads_that_all_poll_or_wait_are_a_livelock() {
    let sim = Simulator::new(1).unwrap();
    let flag = sim.buffer::<u32>(0, 1).unwrap();
    flag.write(&[0]).unwrap();
    let error = error_of!(sim, polls, 1, 4, |_| (&flag,));
    let Error::Livelock(stall) = error else { panic!("{error}") };
    let polling = stall.waiters.iter().find(|w| w.what == Waiting::Spin).unwrap();
    assert_eq!(polling.threads, 1);
    assert!(polling.at.unwrap().file().ends_with("failures.rs"));
}

#[kernel]
unsafe fn takes_a_held_lock(lock: *mut u32) {
    // SAFETY: the buffer has a word.
    let lock = unsafe { Atomic::from_ptr(lock) };
    while lock.compare_exchange(0, 1, Order::AcqRel, Scope::Gpu).is_err() {}
}

#[test]
fn a_lock_that_is_never_released_is_a_livelock() {
    let sim = Simulator::new(1).unwrap();
    let lock = sim.buffer::<u32>(0, 1).unwrap();
    lock.write(&[0]).unwrap();
    let error = error_of!(sim, takes_a_held_lock, 1, 2, |_| (&lock,));
    assert!(matches!(error, Error::Livelock(_)), "{error}");
}

#[kernel]
unsafe fn counts_forever(x: *mut u32) {
    loop {
        // SAFETY: the buffer has a word.
        unsafe { mem::store(x, mem::load(x).wrapping_add(1)) };
    }
}

#[test]
fn a_kernel_that_never_ends_meets_its_limit() {
    let sim = Simulator::builder().time_limit(Duration::from_millis(50)).build().unwrap();
    let x = sim.buffer::<u32>(0, 1).unwrap();
    let error = error_of!(sim, counts_forever, 1, 1, |_| (&x,));
    assert!(matches!(error, Error::Limit { limit: Limit::Time(_), .. }), "{error}");
    let sim = Simulator::builder().step_limit(10).build().unwrap();
    let x = sim.buffer::<u32>(0, 1).unwrap();
    let error = error_of!(sim, counts_forever, 1, 1, |_| (&x,));
    assert!(error.to_string().contains("counts_forever did not end within its limit of 10 steps"));
}

#[kernel]
unsafe fn polls_plainly(flag: *const u32) {
    // SAFETY: the buffer has a word.
    while unsafe { flag.read_volatile() } == 0 {}
}

#[test]
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
fn a_loop_that_the_simulator_does_not_see_meets_the_time_limit_too() {
    let sim = Simulator::builder().time_limit(Duration::from_millis(100)).build().unwrap();
    let flag = sim.buffer::<u32>(0, 1).unwrap();
    flag.write(&[0]).unwrap();
    let error = error_of!(sim, polls_plainly, 1, 2, |_| (&flag,));
    let Error::Limit { limit: Limit::Time(_), ref stall } = error else { panic!("{error}") };
    assert!(stall.waiters.iter().any(|w| w.what == Waiting::Computing), "{error}");
    flag.write(&[1]).unwrap();
    // SAFETY: the buffer has a word.
    unsafe { sim.launch(polls_plainly, LaunchConfig::new(1, 2), |_| (&flag,)) }.unwrap();
}

#[kernel]
unsafe fn nothing() {}

#[kernel]
unsafe fn nothing_with_comm(_comm: DevComm) {}

#[test]
fn what_a_gpu_refuses_is_refused() {
    let sim = Simulator::builder().ranks(2).multiprocessors(1).build().unwrap();
    for (grid, block) in [(0, 1), (1, 0), (1, 1025)] {
        let error = error_of!(sim, nothing, grid, block, |_| ());
        assert!(matches!(error, Error::Launch { kernel: "nothing", .. }), "{error}");
    }
    let config = LaunchConfig { grid: 1, block: 1, dynamic_shared: 1 << 20 };
    // SAFETY: the kernel touches nothing.
    assert!(unsafe { sim.launch(nothing, config, |_| ()) }.is_err());

    let comm = comm(&sim, 64);
    let error = error_of!(sim, nothing_with_comm, 33, 32, |rank| (comm.rank(rank),));
    assert!(error.to_string().contains("holds 32 of them"), "{error}");
    // Without a device communicator any grid will do.
    // SAFETY: the kernel touches nothing.
    unsafe { sim.launch(nothing, LaunchConfig::new(33, 32), |_| ()) }.unwrap();
}

#[test]
fn bad_settings_and_lengths_are_errors() {
    assert!(matches!(Simulator::new(0), Err(Error::Settings(_))));
    assert!(Simulator::builder().ranks(4).lsa_ranks(3).build().is_err());
    assert!(Simulator::builder().stack_size(1).build().is_err());
    assert!(Simulator::builder().stack_size(usize::MAX).build().is_err());
    let sim = Simulator::new(2).unwrap();
    let window = sim.window::<f32>(4).unwrap();
    assert!(matches!(window.write(0, &[0.0; 5]), Err(Error::Length { given: 5, len: 4, .. })));
    assert!(matches!(window.write(2, &[0.0; 4]), Err(Error::Rank { rank: 2, ranks: 2 })));
    assert!(matches!(sim.buffer::<f32>(2, 1), Err(Error::Rank { .. })));
    for len in [usize::MAX, usize::MAX - 10_000, 1 << 60] {
        assert!(matches!(sim.window::<u8>(len), Err(Error::Memory { .. })));
        assert!(matches!(sim.buffer::<f64>(0, len), Err(Error::Memory { .. })));
    }
    let vast = Simulator::builder().multiprocessors(1 << 20).build().unwrap();
    let error = error_of!(vast, nothing, 1 << 20, 1024, |_| ());
    assert!(matches!(error, Error::Launch { .. }), "{error}");
    let error = error_of!(sim, stores_behind, 1, 1, |rank| (window_of(&sim, rank), 0, 0_usize));
    assert!(matches!(error, Error::Arguments { rank: 0, .. }), "{error}");
}

/// Arguments that cannot be made.
fn window_of(_: &Simulator, rank: usize) -> devcomm_types::Window<u32> {
    panic!("no window for rank {rank}")
}

#[test]
fn several_simulators_run_on_several_threads() {
    let threads: Vec<_> = (0..4)
        .map(|_| {
            std::thread::spawn(|| {
                let sim = Simulator::new(2).unwrap();
                let comm = comm(&sim, 1);
                let launch = LaunchConfig::new(1, 32);
                // SAFETY: block 1, which does wrong, is not launched.
                unsafe { sim.launch(rank_1_skips, launch, |rank| (comm.rank(rank),)) }.unwrap();
                deadlock(error_of!(sim, half_a_block_syncs, 1, 64, |_| ())).threads()
            })
        })
        .collect();
    for thread in threads {
        assert_eq!(thread.join().unwrap(), 2 * 32);
    }
}
