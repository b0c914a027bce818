//! Tests that the host can end kernels whose waits never end, by a deadline or an abort handle: all
//! threads exit, and the error says what they waited for.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use devcomm::{
    AbortCause, Error, KernelAbortHandle, LaunchError, LaunchRefusal, Rank, Simulation, StuckWait,
    WaitKind,
};
use devcomm_device_tests::{Job, Setup, TestKernel, assert_kernels_run, gpus, kernels};
use devcomm_testing::machines::{Gpus, give_time};

/// Repetitions on GPUs, in one process; and seeds of simulated GPUs.
const TIMES: u64 = 20;
const SEEDS: u64 = 24;
const THREADS: u32 = 64;
/// The deadline of a wait for a stuck kernel.
const DEADLINE: Duration = Duration::from_millis(30);
/// How long an aborted kernel may take to exit on a GPU, even on a busy machine.
const EXIT: Duration = Duration::from_secs(1);

/// Launches a kernel in which the last rank is absent, and ends the other ranks' kernels. Each
/// error must have `reported` waits per block, for which `right` holds. Then new kernels must run.
fn assert_ended<K: TestKernel>(
    name: &str,
    n: u32,
    setup: &Setup,
    reported: usize,
    right: impl Fn(&StuckWait, &Rank) -> bool + Sync,
) {
    if Gpus::are_real() {
        let gpus = gpus(Simulation::new(2), setup.gin);
        let handles = Handles::default();
        return gpus.run(name, |rank| {
            let end = |turn| end_once::<K>(rank, n, setup, turn, &handles, reported, &right);
            (0..TIMES).try_for_each(end)?;
            assert_kernels_run(rank)
        });
    }
    for seed in 0..SEEDS {
        let simulation = Simulation::new([2, 3, 4][seed as usize % 3]).preempt(seed % 8 == 7);
        let handles = Handles::default();
        // For each number of ranks, deadlines and handles take turns.
        gpus(simulation.seed(seed), setup.gin).run(name, |rank| {
            end_once::<K>(rank, n, setup, seed / 3, &handles, reported, &right)?;
            assert_kernels_run(rank)
        });
    }
}

/// The handles by which the last rank ends the others' kernels.
type Handles = Mutex<Vec<KernelAbortHandle>>;

fn end_once<K: TestKernel>(
    rank: &Rank,
    n: u32,
    setup: &Setup,
    turn: u64,
    handles: &Handles,
    reported: usize,
    right: &impl Fn(&StuckWait, &Rank) -> bool,
) -> Result<(), Error> {
    let job = Job::new(rank, setup)?;
    let (by_deadline, is_absent) = (turn.is_multiple_of(2), rank.rank() == rank.n_ranks() - 1);
    if !by_deadline && !is_absent {
        handles.lock().unwrap().push(job.dev_comm().abort_handle());
    }
    rank.barrier()?;
    job.launch::<K>(setup, n)?;
    rank.barrier()?;
    if is_absent {
        job.stream().synchronize()?;
        give_time(rank, DEADLINE);
        handles.lock().unwrap().drain(..).for_each(|handle| handle.abort());
        return rank.barrier();
    }
    let begun = Instant::now();
    let ended = match by_deadline {
        true => job.stream().synchronize_within(DEADLINE),
        false => job.stream().synchronize(),
    };
    let took = begun.elapsed();
    rank.barrier()?;
    let text = ended.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let Err(Error::Launch(LaunchError::KernelAborted { rank: named, cause, stuck, .. })) = ended
    else {
        panic!("the kernel was not ended: {ended:?}");
    };
    assert_eq!(named, rank.rank());
    match cause {
        AbortCause::Deadline { .. } => assert!(by_deadline),
        AbortCause::Request => assert!(!by_deadline),
        other => panic!("{other}"),
    }
    assert!(rank.is_simulated() || took < DEADLINE + EXIT, "it took {took:?}");
    assert!(stuck.iter().all(|wait| right(wait, rank)), "{rank:?}: {stuck:?}");
    for block in 0..setup.grid {
        let listed = stuck.iter().filter(|wait| wait.block == block).count();
        assert_eq!(listed, reported, "block {block}: {stuck:?}");
    }
    assert!(text.contains(&format!("rank {}", rank.rank())) && text.contains("block"), "{text}");
    // No thread has returned from its wait: then it would have stored 3.
    assert!(job.out()?.iter().all(|&step| step == 2));
    // The device communicator cannot be used any more.
    let refused = job.launch::<K>(setup, n);
    let aborted = matches!(
        refused,
        Err(Error::Launch(LaunchError::Refused { refusal: LaunchRefusal::Aborted { .. }, .. }))
    );
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
    assert_ended::<kernels::stuck_lsa>("at_a_barrier_of_blocks", 0, &setup(), 1, |stuck, rank| {
        let wait = &stuck.wait;
        // With more than two ranks, the error may name another rank that has exited.
        let is_named = rank.n_ranks() > 2 || wait.peer == 1;
        wait.kind == WaitKind::LsaBarrier && wait.index == stuck.block && is_named
    });
}

#[test]
fn at_a_barrier_of_blocks_names_the_rank_that_did_not_come() {
    let name = "at_a_barrier_of_blocks_names_the_rank_that_did_not_come";
    let peers = Mutex::new(Vec::new());
    assert_ended::<kernels::stuck_lsa>(name, 0, &setup(), 1, |stuck, rank| {
        peers.lock().unwrap().push((stuck.wait.peer, rank.n_ranks() as i32));
        (0..rank.n_ranks() as i32).contains(&stuck.wait.peer)
    });
    let peers = peers.into_inner().unwrap();
    let named = peers.iter().filter(|(peer, n)| *peer == n - 1).count();
    assert!(2 * named >= peers.len(), "{named} of {}", peers.len());
}

#[test]
fn at_barriers_of_warps() {
    assert_ended::<kernels::stuck_lsa>("at_barriers_of_warps", 1, &setup(), 2, |stuck, _| {
        let index = stuck.block * (THREADS / 32) + stuck.thread / 32;
        stuck.wait.kind == WaitKind::LsaBarrier && stuck.wait.index == index
    });
}

#[test]
fn in_the_middle_of_a_loop_over_many_blocks() {
    let name = "in_the_middle_of_a_loop_over_many_blocks";
    let setup = Setup::new(if Gpus::are_real() { 64 } else { 8 }, THREADS);
    assert_ended::<kernels::stuck_in_a_loop>(name, 0, &setup, 1, |stuck, _| {
        stuck.wait.kind == WaitKind::LsaBarrier && stuck.wait.index == stuck.block
    });
}

#[test]
fn in_ll_all_to_all() {
    let setup = Setup { ll: (4, 1, 8), ..setup() };
    assert_ended::<kernels::stuck_lsa>("in_ll_all_to_all", 2, &setup, 2, |stuck, _| {
        // The first epoch is 2.
        let wait = &stuck.wait;
        wait.kind == WaitKind::LlA2a && wait.index == 0 && wait.wanted == 2
    });
}

#[test]
fn in_a_poll_of_the_kernel() {
    assert_ended::<kernels::stuck_lsa>("in_a_poll_of_the_kernel", 3, &setup(), 1, |stuck, _| {
        stuck.wait.kind == WaitKind::Poll && stuck.thread == 0
    });
}

#[test]
fn for_signals_and_counters() {
    let kinds = [(WaitKind::Signal, 3), (WaitKind::VaSignal, 4), (WaitKind::Counter, 5)];
    for (n, kind) in (0..).zip(kinds) {
        let name = format!("for_signals_and_counters {n}");
        assert_ended::<kernels::stuck_gin>(&name, n, &with_gin(), 1, |stuck, _| {
            let wait = &stuck.wait;
            (wait.kind, wait.wanted) == kind && wait.seen == 0 && stuck.thread == 0
        });
    }
}

#[test]
fn for_a_shadow() {
    assert_ended::<kernels::stuck_gin>("for_a_shadow", 3, &with_gin(), 1, |stuck, _| {
        stuck.wait.kind == WaitKind::Signal && stuck.thread == 0
    });
}

#[test]
fn at_a_barrier_over_the_network() {
    let name = "at_a_barrier_over_the_network";
    assert_ended::<kernels::stuck_gin>(name, 4, &with_gin(), 1, |stuck, rank| {
        let wait = &stuck.wait;
        wait.kind == WaitKind::GinBarrier
            && wait.index == stuck.block
            && wait.peer < rank.n_ranks() as i32
            && wait.wanted == 1
    });
}

#[test]
fn at_a_hybrid_barrier() {
    for n in [5, 6] {
        let name = format!("at_a_hybrid_barrier {n}");
        assert_ended::<kernels::stuck_gin>(&name, n, &with_gin(), 1, |stuck, _| {
            match stuck.wait.kind {
                WaitKind::GinBarrier | WaitKind::LsaBarrier => stuck.wait.index == stuck.block,
                // A rank at which all peers have arrived may wait in the flush of its fence.
                kind => n == 6 && kind == WaitKind::Request,
            }
        });
    }
}
