//! Kernels that are stuck in a wait are ended from the host: by a deadline, or from another thread. 20 times each, in one process.

use std::thread;
use std::time::{Duration, Instant};

use devcomm::{AbortCause, Error, GinConnectionType, LaunchRefusal, Rank, StuckWait, WaitKind};
use devcomm_device_tests::{Job, Setup, TestKernel, kernels, require_works, with_world};

const TIMES: usize = 20;
const THREADS: u32 = 64;
/// What a kernel may take to leave once it has been told to, on a machine that does other things too.
const LEAVE: Duration = Duration::from_secs(1);

/// Two GPUs run `kernel`, to which the last rank does not come: the other's is ended each time, and says what it waited for in each of `blocks`.
/// Then new kernels run.
fn is_ended<K: TestKernel>(
    name: &str,
    kernel: K,
    n: u32,
    setup: &Setup,
    right: impl Fn(&StuckWait) -> bool + Sync,
) {
    with_world(name, 2, setup.gin, |world| {
        let result = world.run(|rank| {
            for time in 0..TIMES {
                end_once(rank, kernel, n, setup, time, &right)?;
            }
            require_works(rank)
        });
        result.unwrap_or_else(|error| panic!("{error}"));
    });
}

fn end_once<K: TestKernel>(
    rank: &Rank,
    kernel: K,
    n: u32,
    setup: &Setup,
    time: usize,
    right: &impl Fn(&StuckWait) -> bool,
) -> Result<(), Error> {
    let job = Job::new(rank, setup)?;
    rank.barrier()?;
    job.launch(kernel, setup, n)?;
    if rank.rank() == rank.n_ranks() - 1 {
        job.stream().synchronize()?;
        rank.barrier()?;
        return Ok(());
    }
    let begun = Instant::now();
    let patience = Duration::from_millis(30);
    let by_deadline = time.is_multiple_of(2);
    let ended = if by_deadline {
        job.stream().synchronize_within(patience)
    } else {
        let handle = job.dev_comm().abort_handle();
        thread::scope(|scope| {
            scope.spawn(move || {
                thread::sleep(patience);
                handle.abort();
            });
            job.stream().synchronize()
        })
    };
    let took = begun.elapsed();
    rank.barrier()?;
    let text = ended.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let Err(Error::KernelAborted { rank: named, cause, stuck }) = ended else {
        panic!("the kernel was not ended: {ended:?}");
    };
    assert_eq!(named, rank.rank());
    match cause {
        AbortCause::Deadline { .. } => assert!(by_deadline),
        AbortCause::Request => assert!(!by_deadline),
        other => panic!("{other}"),
    }
    assert!(took < patience + LEAVE, "it took {took:?}");
    assert!(stuck.iter().all(right), "{stuck:?}");
    for block in 0..setup.grid {
        assert!(stuck.iter().any(|wait| wait.block == block), "block {block}: {stuck:?}");
    }
    assert!(text.contains(&format!("rank {}", rank.rank())) && text.contains("block"), "{text}");
    // No thread has passed its wait.
    assert!(job.out()?.iter().all(|&step| step == 2));
    // The device communicator is of no use, and the context is.
    let refused = job.launch(kernel, setup, n);
    let aborted =
        matches!(refused, Err(Error::Launch { refusal: LaunchRefusal::Aborted { .. }, .. }));
    assert!(aborted, "{refused:?}");
    Ok(())
}

fn setup() -> Setup {
    Setup { lsa_barriers: 8, ..Setup::new(4, THREADS) }
}

fn with_gin() -> Setup {
    let setup = Setup::with_gin(2, THREADS);
    Setup { world_barriers: 2, hybrid_barriers: 2, va: true, ..setup }
}

#[test]
fn at_a_barrier_of_blocks() {
    is_ended("at_a_barrier_of_blocks", kernels::stuck_lsa, 0, &setup(), |stuck| {
        let wait = &stuck.wait;
        wait.kind == WaitKind::LsaBarrier && wait.index == stuck.block && wait.peer == 1
    });
}

#[test]
fn at_barriers_of_warps() {
    is_ended("at_barriers_of_warps", kernels::stuck_lsa, 1, &setup(), |stuck| {
        let index = stuck.block * (THREADS / 32) + stuck.thread / 32;
        stuck.wait.kind == WaitKind::LsaBarrier && stuck.wait.index == index
    });
}

#[test]
fn in_ll_all_to_all() {
    let setup = Setup { ll: (4, 1, 8), ..setup() };
    is_ended("in_ll_all_to_all", kernels::stuck_lsa, 2, &setup, |stuck| {
        stuck.wait.kind == WaitKind::LlA2a
    });
}

#[test]
fn in_a_poll_of_the_kernel() {
    is_ended("in_a_poll_of_the_kernel", kernels::stuck_lsa, 3, &setup(), |stuck| {
        stuck.wait.kind == WaitKind::Poll && stuck.thread == 0
    });
}

#[test]
fn in_the_middle_of_a_loop_over_many_blocks() {
    let setup = Setup::new(64, THREADS);
    let name = "in_the_middle_of_a_loop_over_many_blocks";
    is_ended(name, kernels::stuck_in_a_loop, 0, &setup, |stuck| {
        stuck.wait.kind == WaitKind::LsaBarrier && stuck.wait.index == stuck.block
    });
}

#[test]
fn in_waits_for_the_network() {
    let kinds = [
        WaitKind::Signal,
        WaitKind::VaSignal,
        WaitKind::Counter,
        WaitKind::Signal,
        WaitKind::GinBarrier,
        WaitKind::LsaBarrier,
        WaitKind::GinBarrier,
    ];
    assert_eq!(with_gin().gin, GinConnectionType::Full);
    for (n, kind) in kinds.into_iter().enumerate() {
        let name = format!("in_waits_for_the_network {n}");
        is_ended(&name, kernels::stuck_gin, n as u32, &with_gin(), |stuck| stuck.wait.kind == kind);
    }
}
