//! Tests of `devcomm::check` and its variants: what each kind of schedule finds, and that a failure
//! can be replayed.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use crate::common::{SignalMode, flush, full, gin, handle, put, wait};
use cuda_std::mem;
use cuda_std::prelude::*;
use devcomm::{
    Check, Collectives, DevCommRequirements, Error, Lag, Rank, ReduceOp, Result, Simulation,
    WITHOUT_PTX, World, check, check_exhaustive, check_pct, check_random, replay,
};
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};

/// Returns the message with which `f` panics.
#[track_caller]
fn panic_of(f: impl FnOnce()) -> String {
    let payload = catch_unwind(AssertUnwindSafe(f)).expect_err("it does not fail");
    payload.downcast_ref::<String>().expect("a message").clone()
}

/// Returns the settings that a message says to replay.
fn settings_in(message: &str) -> &str {
    let (_, rest) = message.split_once("devcomm::replay(\"").expect("a line to replay");
    rest.split_once('"').expect("the end of the settings").0
}

/// Returns a simulation of two ranks in which only schedules find errors, not the race detector.
fn two() -> Simulation {
    Simulation::new(2).races(false)
}

/// Each rank passes `round` to the next one. A barrier separates the stores from the loads, but
/// nothing separates the loads from the next launch's stores.
#[kernel]
unsafe fn pass_on(comm: DevComm, slot: Window<u32>, seen: Window<u32>, round: u32) {
    let team = comm.lsa_team();
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    let tid = thread::thread_idx_x() as usize;
    // SAFETY: the windows have an element per thread; the race is what the tests are for.
    unsafe {
        slot.lsa((team.rank + 1) % team.n_ranks).store(tid, round);
        barrier.sync(MemoryOrder::AcqRel);
        seen.lsa(team.rank).store(tid, slot.lsa(team.rank).load(tid));
    }
}

/// Does the same as [`pass_on`], with a barrier at the end.
#[kernel]
unsafe fn pass_on_and_wait(comm: DevComm, slot: Window<u32>, seen: Window<u32>, round: u32) {
    let team = comm.lsa_team();
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    let tid = thread::thread_idx_x() as usize;
    // SAFETY: the windows have an element per thread; the barriers order the accesses.
    unsafe {
        slot.lsa((team.rank + 1) % team.n_ranks).store(tid, round);
        barrier.sync(MemoryOrder::AcqRel);
        seen.lsa(team.rank).store(tid, slot.lsa(team.rank).load(tid));
        barrier.sync(MemoryOrder::AcqRel);
    }
}

const THREADS: u32 = 40;

/// Passes values on in three launches, and checks each.
fn three_launches(rank: &Rank, waits: bool) -> Result<()> {
    rank.load(&WITHOUT_PTX)?;
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let slot = comm.window::<u32>(THREADS as usize)?;
    let seen = comm.window::<u32>(THREADS as usize)?;
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
    rank.barrier()?;
    for round in 1..=3 {
        // SAFETY: all ranks launch the same grids; `waits` selects the kernel that is right.
        unsafe {
            if waits {
                let launch = pass_on_and_wait::args(&dev, &slot, &seen, round);
                launch.grid(1).block(THREADS).launch(&stream)?;
            } else {
                pass_on::args(&dev, &slot, &seen, round).grid(1).block(THREADS).launch(&stream)?;
            }
        }
        stream.synchronize()?;
        let mut values = [0; THREADS as usize];
        seen.copy_to_host(&mut values)?;
        assert_eq!(values, [round; THREADS as usize], "rank {}", rank.rank());
    }
    rank.barrier()
}

#[test]
fn a_missing_barrier_between_launches_shows_when_a_rank_lags() {
    // The fixed orders do not show it.
    check(two(), |rank| three_launches(rank, false));
    let message = panic_of(|| {
        Check::new(two()).lagging(8).run(|rank| three_launches(rank, false));
    });
    assert!(message.contains("panicked: assertion `left == right` failed: rank "), "{message}");
    assert!(settings_in(&message).contains(",lag="), "{message}");
    // A lagging rank alone shows it too.
    let lagging = two().lag(Lag::Rank);
    assert!(
        settings_in(&panic_of(|| check(lagging, |rank| three_launches(rank, false))))
            .contains("lag=rank")
    );
    // The right kernel passes all of them.
    let schedules = Check::new(3).in_order().random(4).pct(4, 3).lagging(8);
    // Two fixed orders, and those of the three series.
    assert_eq!(schedules.run(|rank| three_launches(rank, true)), 2 + 4 + 4 + 8);
}

/// Adds 1 to rank 0's element, by a load and a store.
#[kernel]
unsafe fn adds_1_somehow(sum: Window<u32>) {
    let word = sum.lsa(0);
    // SAFETY: the window has an element; the race is what the tests are for.
    unsafe { word.store(0, word.load(0) + 1) };
}

/// Runs [`adds_1_somehow`] in both ranks, in rank 1 after some calls to the driver. Returns the sum
/// on rank 0, whose memory has it, and the right sum on rank 1.
fn lost_update(rank: &Rank, calls_before: usize) -> Result<u32> {
    rank.load(&WITHOUT_PTX)?;
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let sum = comm.window::<u32>(1)?;
    rank.barrier()?;
    for _ in 0..calls_before * rank.rank() {
        stream.synchronize()?;
    }
    // SAFETY: the race is what the tests are for.
    unsafe { adds_1_somehow::args(&sum).grid(1).block(1).launch(&stream)? };
    stream.synchronize()?;
    rank.barrier()?;
    let mut result = [0];
    sum.copy_to_host(&mut result)?;
    Ok(if rank.is_root() { result[0] } else { 2 })
}

#[test]
fn an_exhaustive_check_runs_each_order_once_and_finds_the_lost_update() {
    let sums = Mutex::new(Vec::new());
    let orders = check_exhaustive(two(), 100, |rank| {
        // A launch that comes late is one of the orders, and adds none.
        let sum = lost_update(rank, 10)?;
        if rank.is_root() {
            sums.lock().unwrap().push(sum);
        }
        Ok::<_, Error>(())
    });
    let sums = sums.into_inner().unwrap();
    // Each rank has two steps, so there are 4 choose 2 orders, two of which lose no update.
    assert_eq!((orders, sums.len()), (6, 6));
    assert_eq!(sums.iter().filter(|sum| **sum == 2).count(), 2);
    let message = panic_of(|| {
        check_exhaustive(two(), 100, no_update_is_lost);
    });
    assert_eq!(settings_in(&message), "2,choices=1:1,races=0");
    assert_eq!(panic_of(|| replay(settings_in(&message), no_update_is_lost)), message);
    let too_few = panic_of(|| {
        check_exhaustive(two(), 3, |rank| lost_update(rank, 0));
    });
    assert!(too_few.contains("more than 3 schedules"), "{too_few}");
}

/// Fails if an update is lost.
fn no_update_is_lost(rank: &Rank) -> Result<()> {
    lost_update(rank, 0).map(|sum| assert_eq!(sum, 2, "rank {}", rank.rank()))
}

/// Runs `run` with these settings; returns the trace and the error.
fn traced(settings: &str, run: impl Fn(&Rank) -> Result<()> + Sync) -> (u64, Option<String>) {
    let simulation: Simulation = settings.parse().unwrap();
    let world = World::builder().simulate(simulation).threads(2).unwrap();
    let ran = world.run(run);
    let activity = world.simulated_machine().unwrap().activity();
    (activity.trace, ran.err().map(|error| error.to_string()))
}

#[test]
fn a_replay_is_the_same_run_with_the_same_message() {
    type Run = fn(&Rank) -> Result<()>;
    let (run, late): (Run, Run) = (no_update_is_lost, |rank| three_launches(rank, false));
    let messages = [
        (run, panic_of(|| check_random(Simulation::new(2).preempt(true), 100, run))),
        (run, panic_of(|| check_pct(2, 100, 2, run))),
        (run, panic_of(|| _ = check_exhaustive(2, 100, run))),
        (late, panic_of(|| _ = Check::new(2).lagging(8).run(late))),
    ];
    let mut traces = Vec::new();
    for (run, message) in &messages {
        let settings = settings_in(message);
        assert_eq!(&panic_of(|| replay(settings, run)), message);
        let (trace, error) = traced(settings, run);
        assert!(error.as_ref().is_some_and(|error| message.starts_with(error)), "{message}");
        assert_eq!(traced(settings, run), (trace, error));
        traces.push(trace);
    }
    // A trace is not a constant.
    assert_ne!(traces[0], traces[3]);
}

/// Puts a value and a flag in the other rank's window, and waits for its own; with a `swapped`
/// order of the stores, the value may come late.
#[kernel]
unsafe fn exchange_flags(comm: DevComm, words: Window<u32>, swapped: bool) {
    let team = comm.lsa_team();
    let (mine, other) = (words.lsa(team.rank), words.lsa(1 - team.rank));
    // SAFETY: the window has three elements.
    unsafe {
        if swapped {
            other.store_release(1, 1);
            other.store(0, 7);
        } else {
            other.store(0, 7);
            other.store_release(1, 1);
        }
        while mine.load_acquire(1) == 0 {}
        mine.store(2, mine.load(0));
    }
}

fn exchanged(rank: &Rank, swapped: bool) -> Result<()> {
    rank.load(&WITHOUT_PTX)?;
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let words = comm.window::<u32>(3)?;
    let dev = comm.create_dev_comm(DevCommRequirements::new())?;
    rank.barrier()?;
    // SAFETY: both ranks launch the same grid.
    unsafe { exchange_flags::args(&dev, &words, swapped).grid(1).block(1).launch(&stream)? };
    stream.synchronize()?;
    rank.barrier()?;
    let mut values = [0; 3];
    words.copy_to_host(&mut values)?;
    assert_eq!(values[2], 7);
    Ok(())
}

#[test]
fn an_exhaustive_check_of_an_exchange_ends_and_finds_the_wrong_order() {
    let two = || two().preemptions(2);
    assert!(check_exhaustive(two(), 1000, |rank| exchanged(rank, false)) > 6);
    let message = panic_of(|| {
        check_exhaustive(two(), 1000, |rank| exchanged(rank, true));
    });
    assert!(settings_in(&message).contains(",preemptions=2"), "{message}");
}

/// Rank 0 puts a value to rank 1 and uses the value's place again, with or without a flush before.
#[kernel]
unsafe fn put_and_go_on(comm: DevComm, words: Window<u64>, flushes: bool) {
    let comm = comm.as_raw();
    let (mut net, window) = (gin(comm, 0), handle(&words));
    // SAFETY: the window has two elements; the missing flush is what the test is for.
    unsafe {
        if comm.rank == 0 {
            words.local().store(0, 7);
            let (team, then) = (comm.world_team(), SignalMode::Inc(0, true));
            put(&mut net, &team, 1, (window, 8), (window, 0), 8, then, None);
            if flushes {
                flush(&mut net);
            }
            words.local().store(0, 9);
            flush(&mut net);
        } else {
            wait(&mut net, 0, 1);
        }
    }
}

#[test]
fn an_exhaustive_check_has_the_network_deliver_at_every_time() {
    let run = |flushes| {
        let values = Mutex::new(BTreeSet::new());
        let orders = check_exhaustive(two(), 1000, |rank| {
            rank.load(&WITHOUT_PTX)?;
            let (comm, stream) = (rank.communicator()?, rank.stream()?);
            let words = comm.window::<u64>(2)?;
            let dev = comm.create_dev_comm(full())?;
            rank.barrier()?;
            // SAFETY: both ranks launch the same grid.
            unsafe { put_and_go_on::args(&dev, &words, flushes).grid(1).block(1).launch(&stream)? };
            stream.synchronize()?;
            let mut got = [0; 2];
            words.copy_to_host(&mut got)?;
            if !rank.is_root() {
                values.lock().unwrap().insert(got[1]);
            }
            rank.barrier()
        });
        (orders > 1, values.into_inner().unwrap())
    };
    assert_eq!(run(true), (true, [7].into()));
    assert_eq!(run(false), (true, [7, 9].into()));
}

/// Runs all-reduces by the shipped kernels, one after the other.
fn all_reduces(rank: &Rank) -> Result<()> {
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let collectives = Collectives::new(comm)?;
    for (count, rounds) in [(5, 4), (700, 2)] {
        let (send, recv) = (comm.mem_alloc::<f32>(count)?, comm.mem_alloc::<f32>(count)?);
        for round in 0..rounds {
            let value = (rank.rank() + round) as f32;
            send.copy_from_host(&vec![value; count])?;
            collectives.all_reduce(&send, &recv, ReduceOp::Sum, &stream)?;
            stream.synchronize()?;
            let mut got = vec![0.0; count];
            recv.copy_to_host(&mut got)?;
            let sum = (0..rank.n_ranks()).map(|rank| (rank + round) as f32).sum::<f32>();
            assert_eq!(got, vec![sum; count], "round {round}");
        }
    }
    Ok(())
}

#[test]
fn the_shipped_all_reduces_are_right_under_every_schedule() {
    let coarse = Simulation::new(3).pct(3).preempt(false);
    for settings in ["3", "3,choices=", "3,choices=,preempt=0", &coarse.to_string()] {
        replay(settings, all_reduces);
    }
    Check::new(3).in_order().random(3).pct(3, 3).lagging(4).run(all_reduces);
}

#[kernel]
unsafe fn rank_1_misses(comm: DevComm) {
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire);
    if comm.rank() == 1 {
        return;
    }
    barrier.sync(MemoryOrder::Release);
}

/// Polls a value that no thread stores.
#[kernel]
unsafe fn polls_flag(flag: Window<u32>) {
    // SAFETY: the window has an element.
    unsafe { while mem::load_volatile(flag.lsa(0).as_ptr()) == 0 {} }
}

#[test]
fn reports_name_every_wait_under_every_schedule() {
    let all = ["3", "3,seed=1,preempt=1", "3,seed=1,pct=3", "3,choices=", "3,seed=1,lag=rank"];
    for settings in all.iter().chain(&["3,seed=2,lag=rank", "3,lag=thread", "3,lag=warp"]) {
        let deadlock = panic_of(|| {
            replay(settings, |rank| {
                rank.load(&WITHOUT_PTX)?;
                let (comm, stream) = (rank.communicator()?, rank.stream()?);
                let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
                // SAFETY: all ranks launch the same grid.
                unsafe { rank_1_misses::args(&dev).grid(1).block(64).launch(&stream)? };
                stream.synchronize()
            });
        });
        for line in [
            "\n  host: rank 2 is in a wait for a stream",
            "\n  GPU 0: kernel `rank_1_misses` runs",
            "\n  rank 0 block 0: 1 thread waits for LSA barrier 0, where rank 1 has not arrived",
            "\n  rank 2 block 0: 63 threads wait for the rest of its coop in barrier.sync (LSA",
        ] {
            assert!(deadlock.contains(line), "{settings}: {deadlock}");
        }
        let livelock = panic_of(|| {
            replay(settings, |rank| {
                rank.load(&WITHOUT_PTX)?;
                let (comm, stream) = (rank.communicator()?, rank.stream()?);
                let flag = comm.window::<u32>(1)?;
                // SAFETY: the window has an element, which the kernel only loads.
                unsafe { polls_flag::args(&flag).grid(1).block(8).launch(&stream)? };
                stream.synchronize()
            });
        });
        assert!(
            livelock.contains("livelock in polls_flag: 24 threads poll"),
            "{settings}: {livelock}"
        );
        assert!(
            livelock.contains("rank 1 block 0: 8 threads wait for a value that it polls"),
            "{settings}: {livelock}"
        );
    }
}

#[test]
fn settings_that_are_not_valid_are_refused_with_the_reason() {
    let refused = |settings: &str| panic_of(|| replay(settings, |rank| rank.barrier()));
    assert!(refused("four").contains("no number of GPUs in \"four\""));
    assert!(refused("4,pct=0").contains("PCT schedule of depth 0"));
    assert!(refused("4,lag=gpu").contains("not thread, warp, block or rank"));
    let none = panic_of(|| check_random(0, 1, |rank| rank.barrier()));
    assert!(none.contains("0 GPUs"), "{none}");
    let other = panic_of(|| replay("2,choices=0:5,races=0", |rank| lost_update(rank, 0).map(drop)));
    assert!(other.contains("choice 0 is 5, but there are only 2 alternatives"), "{other}");
}

#[devcomm::test(ranks = 2)]
fn a_test_of_the_attribute_runs_on_every_rank(rank: &Rank) -> Result<()> {
    assert_eq!(rank.n_ranks(), 2);
    rank.barrier()
}

#[devcomm::test(ranks = 4, simulate = "team=2,network=rail")]
fn a_test_of_the_attribute_has_the_settings_of_the_machine(rank: &Rank) {
    if rank.is_simulated() {
        assert_eq!(rank.communicator().unwrap().properties().unwrap().n_lsa_teams, 2);
    }
}

#[devcomm::test(ranks = 2)]
#[should_panic(expected = "rank 1 panicked: it fails on purpose")]
fn a_test_of_the_attribute_fails_if_a_rank_does(rank: &Rank) {
    assert!(rank.is_root(), "it fails on purpose");
}
