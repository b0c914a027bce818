//! Tests that the simulator finds kernels that poll, or run, without end.

use std::sync::Arc;
use std::time::Duration;

use cuda_std::atomic::{Atomic, Order, Scope};
use cuda_std::prelude::*;
use devcomm::sim::{Change, Error, Limit, Mutation, Waiting};
use devcomm::{Kernel, Simulation, SymmetricBuffer};
use devcomm_testing::simulated::{failure, simulate};
use devcomm_types::LaunchArgs;

/// Returns the failure, on one GPU, of a kernel whose argument is a buffer of one word, 0 at first,
/// in one block.
fn failure_with_word<K: Kernel>(simulation: Simulation, block: u32) -> Arc<Error>
where
    for<'a> (&'a SymmetricBuffer<u32>,): LaunchArgs<K::Args>,
{
    failure(simulation, |gpu| {
        gpu.launch(K::with_args((&gpu.buffer(&[0_u32])?,)).grid(1).block(block))
    })
}

#[kernel]
unsafe fn polls(flag: *mut u32) {
    // SAFETY: the buffer has one element.
    let flag = unsafe { Atomic::from_ptr(flag) };
    if thread::thread_idx_x() == 0 {
        while flag.load(Order::Acquire, Scope::Gpu) == 0 {}
    } else {
        thread::sync_threads();
    }
}

#[test]
fn threads_that_all_poll_or_wait_are_a_livelock() {
    let error = failure_with_word::<polls>(Simulation::new(1), 4);
    let Error::Livelock(stall) = &*error else { panic!("{error}") };
    let polling = stall.waiters.iter().find(|w| w.what == Waiting::Spin).unwrap();
    assert_eq!(polling.threads, 1);
    assert!(polling.at.unwrap().file().ends_with("endless.rs"));
    let polled = polling.polled.as_deref().unwrap();
    assert!(polled.starts_with("element 0 of `flag` (buffer ") && polled.ends_with(" is 0"));
}

/// Thread 0 polls by plain loads, after 200 loads that are no poll.
#[kernel]
unsafe fn polls_by_plain_loads(flag: *mut u32) {
    if thread::thread_idx_x() == 0 {
        // SAFETY: the buffer has one element.
        unsafe {
            (0..200).for_each(|_| _ = mem::load(flag));
            while mem::load(flag) == 0 {} // for ever
        }
    } else {
        thread::sync_threads();
    }
}

#[test]
fn a_thread_that_polls_by_plain_loads_is_found_at_once() {
    let preempted = Simulation::new(1).preempt(true);
    let pct = Simulation::new(1).pct(3);
    for simulation in [Simulation::new(1), Simulation::new(1).seed(1), preempted, pct] {
        let error = failure_with_word::<polls_by_plain_loads>(simulation, 4);
        let Error::Livelock(stall) = &*error else { panic!("{error}") };
        let polling = stall.waiters.iter().find(|w| w.what == Waiting::PlainSpin).unwrap();
        assert_eq!((polling.threads, polling.at.unwrap().line()), (1, line!() - 15));
        assert!(error.to_string().contains("that it polls by plain loads"), "{error}");
        let polled = polling.polled.as_deref().unwrap();
        assert!(polled.starts_with("element 0 of `flag` (buffer ") && polled.ends_with(" is 0"));
    }
}

#[test]
fn a_poll_whose_load_is_removed_is_a_livelock_too() {
    let without = |load: &str| {
        let line =
            1 + include_str!("endless.rs").lines().position(|line| line.contains(load)).unwrap();
        let removed = Mutation::new("endless.rs", line as u32, Change::Remove);
        Simulation::new(1).step_limit(1 << 22).mutation(removed)
    };
    let error = failure_with_word::<polls>(without("while flag.load("), 4);
    assert!(matches!(*error, Error::Livelock(_)), "{error}");
    let error = failure_with_word::<polls_by_plain_loads>(without("while mem::load("), 4);
    assert!(matches!(*error, Error::Livelock(_)), "{error}");
}

#[kernel]
unsafe fn takes_a_held_lock(lock: *mut u32) {
    // SAFETY: the buffer has one element.
    let lock = unsafe { Atomic::from_ptr(lock) };
    while lock.compare_exchange(0, 1, Order::AcqRel, Scope::Gpu).is_err() {}
}

#[test]
fn a_lock_that_is_never_released_is_a_livelock() {
    let error = failure_with_word::<takes_a_held_lock>(Simulation::new(1), 2);
    assert!(matches!(*error, Error::Livelock(_)), "{error}");
}

#[kernel]
unsafe fn counts_forever(x: *mut u32) {
    loop {
        // SAFETY: the buffer has one element.
        unsafe { mem::store(x, mem::load(x).wrapping_add(1)) };
    }
}

#[test]
fn a_kernel_that_never_ends_meets_its_limit() {
    let simulation = Simulation::new(1).time_limit(Duration::from_millis(50));
    let error = failure_with_word::<counts_forever>(simulation, 1);
    assert!(matches!(*error, Error::Limit { limit: Limit::Time(_), .. }), "{error}");
    let error = failure_with_word::<counts_forever>(Simulation::new(1).step_limit(10), 1);
    assert!(error.to_string().contains("counts_forever did not end within its limit of 10 steps"));
}

/// Polls without `mem::load`, so the simulator sees no access.
#[kernel]
unsafe fn polls_plainly(flag: *const u32) {
    // SAFETY: the buffer has one element.
    while unsafe { flag.read_volatile() } == 0 {}
}

#[test]
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
fn a_loop_that_the_simulator_does_not_see_meets_the_time_limit_too() {
    let simulation = Simulation::new(1).time_limit(Duration::from_millis(100));
    let error = failure_with_word::<polls_plainly>(simulation, 2);
    let Error::Limit { limit: Limit::Time(_), stall } = &*error else { panic!("{error}") };
    assert!(stall.waiters.iter().any(|w| w.what == Waiting::Computing), "{error}");
    // By default it is found in seconds.
    let error = failure_with_word::<polls_plainly>(Simulation::new(1), 2);
    assert!(matches!(*error, Error::Limit { limit: Limit::Calls(_), .. }), "{error}");
    simulate(Simulation::new(1), |gpu| {
        gpu.launch(polls_plainly::args(&gpu.buffer(&[1_u32])?).grid(1).block(2))
    });
}

#[test]
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
fn a_loop_that_the_simulator_does_not_see_takes_the_time_that_the_report_says() {
    const IN_CHILD: &str = "DEVCOMM_TEST_LOOP";
    const NAME: &str =
        "endless::a_loop_that_the_simulator_does_not_see_takes_the_time_that_the_report_says";
    if std::env::var_os(IN_CHILD).is_none() {
        // A child process runs it, so that the processor time is that of this run alone.
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let child = child.args(["--exact", NAME]).env(IN_CHILD, "1").output().unwrap();
        assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
        return;
    }
    let error = failure_with_word::<polls_plainly>(Simulation::new(1), 2);
    let Error::Limit { limit: Limit::Calls(limit), .. } = &*error else { panic!("{error}") };
    // Fields 14 and 15 are the user and system time in ticks of 10 ms.
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields = stat.rsplit(") ").next().unwrap().split(' ').skip(11).take(2);
    let ticks: u64 = fields.map(|field| field.parse::<u64>().unwrap()).sum();
    let took = Duration::from_millis(10 * ticks);
    assert!(took < *limit * 3 / 2, "{took:?} for a loop that is reported after {limit:?}");
}
