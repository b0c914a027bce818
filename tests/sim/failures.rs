//! Tests that the simulator reports errors of kernels with thread and location, and never hangs.

use std::sync::Arc;

use cuda_std::atomic::{Atomic, Order, Scope};
use cuda_std::prelude::*;
use devcomm::sim::{Error, Machine, Stall, ThreadId, Waiting};
use devcomm::{
    CommConfig, DevCommRequirements, DriverError, Error as HostError, Kernel, LaunchConfig,
    LaunchError, Simulation,
};
use devcomm_testing::simulated::{failure, run, simulate, world};
use nccl_device::{
    BarrierIndex, Coop, DevComm, Flag, Flags, LamportMemory, LamportSlots, MemoryOrder, Window,
};

use crate::bounds::stores_beyond;

fn barriers(count: u32) -> DevCommRequirements {
    DevCommRequirements::new().lsa_barriers(count)
}

fn deadlock(error: &Error) -> &Stall {
    match error {
        Error::Deadlock(stall) => stall,
        other => panic!("not a deadlock: {other}"),
    }
}

/// Returns the failure of a kernel without parameters on one GPU.
pub fn failure_of<K: Kernel<Args = ()>>(grid: u32, block: u32) -> Arc<Error> {
    failure(Simulation::new(1), |gpu| gpu.launch(K::with_args(()).grid(grid).block(block)))
}

#[kernel]
unsafe fn rank_1_skips(comm: DevComm) {
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire);
    if comm.rank() == 1 && thread::block_idx_x() == 1 {
        return;
    }
    barrier.sync(MemoryOrder::Release);
}

#[test]
fn a_deadlock_names_the_waiting_rank_its_peer_and_the_line() {
    let error = failure(Simulation::new(3), |gpu| {
        gpu.launch(rank_1_skips::args(&gpu.dev_comm(barriers(2))?).grid(2).block(64))
    });
    let (text, stall) = (error.to_string(), deadlock(&error));
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
    // Only kernels that run have numbers: both blocks of rank 1 have ended, and so has its kernel.
    assert_eq!(stall.ended, [1, 0, 1]);
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines[0], "deadlock");
    let line = |line: &str| lines.iter().any(|l| l.starts_with(line));
    assert!(line("  GPU 0: kernel `rank_1_skips` runs"), "{text}");
    assert!(
        line(
            "  rank 0 block 1: 1 thread waits for LSA barrier 1, where rank 1 has not arrived, at "
        ),
        "{text}"
    );
    let rest = "63 threads wait for the rest of its coop in barrier.sync (LSA barrier 1), at";
    assert!(line(&format!("  rank 2 block 1: {rest}")), "{text}");
    assert!(line("  rank 2: 1 block has ended"), "{text}");
}

#[test]
fn a_report_tells_ranks_of_a_smaller_communicator_from_those_of_the_world() {
    let error = failure(Simulation::new(4), |gpu| {
        let (color, world) = (gpu.rank() as i32 % 2, gpu.communicator()?);
        let pair = world.split(Some(color), 0, &CommConfig::new())?.expect("all have a color");
        let comm = pair.create_dev_comm(barriers(2))?;
        gpu.launch(rank_1_skips::args(&comm).grid(2).block(32))
    });
    let text = error.to_string();
    let waits = "block 1: 1 thread waits for LSA barrier 1, where rank";
    assert!(text.contains(&format!("\n  rank 0 {waits} 2 has not arrived")), "{text}");
    let of_pair = "rank 1 (rank 0 of its communicator)";
    assert!(text.contains(&format!("\n  {of_pair} {waits} 3 has not arrived")), "{text}");
}

#[test]
fn a_machine_of_a_failed_kernel_is_over_and_others_go_on() {
    let world = world(Simulation::new(2));
    let text_of = |error| match error {
        HostError::Driver(DriverError::Failed { text, .. }) => text,
        other => panic!("{other}"),
    };
    let texts = run(&world, |gpu| {
        let args = (&gpu.window(&[0_u32])?, 1, 1_usize);
        let launch = || {
            let launch = stores_beyond::with_args(args).grid(1).block(4);
            gpu.launch(launch).map_err(text_of).unwrap_err()
        };
        // As on a GPU, every later call fails with the same error.
        Ok((launch(), launch()))
    });
    for (first, next) in texts.unwrap() {
        assert!(first.contains("after the end of `out` (window"), "{first}");
        assert_eq!(first, next);
    }
    simulate(Simulation::new(2), |gpu| {
        gpu.launch(rank_1_skips::args(&gpu.dev_comm(barriers(1))?).grid(1).block(32))
    });
}

#[test]
fn a_launch_after_a_failed_kernel_says_what_has_failed() {
    let text = run(&world(Simulation::new(2)), |gpu| {
        let (dev, out) = (gpu.dev_comm(barriers(1))?, gpu.window(&[0_u32])?);
        let first = gpu.launch(stores_beyond::args(&out, 1, 1_usize).grid(1).block(4));
        let next = gpu.launch(rank_1_skips::args(&dev).grid(1).block(32));
        Ok([first, next].map(|launch| launch.unwrap_err().to_string()))
    });
    for text in text.unwrap().concat() {
        assert!(text.contains("after the end of `out` (window"), "{text}");
    }
}

#[kernel]
unsafe fn half_a_block_syncs() {
    if thread::thread_idx_x() < 32 {
        let seen = shared_array![u32; 1];
        // SAFETY: all stores to the word are of the same value; the divergence is intended.
        unsafe {
            *seen = 1;
            warp::sync();
            // Lane 31 never reaches the shuffle.
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
    let error = failure_of::<half_a_block_syncs>(1, 64);
    let stall = deadlock(&error);
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

// Optimised builds may merge calls from different places, so there the simulator compares none.
#[test]
#[cfg(debug_assertions)]
fn threads_at_different_barriers_are_reported() {
    let error = failure_of::<diverges>(1, 64);
    let Error::Divergent { thread, at, other, .. } = *error else { panic!("{error}") };
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
    let error = failure(Simulation::new(2), |gpu| {
        gpu.launch(panics::args(gpu.rank() as u32 + 3).grid(1).block(32))
    });
    let Error::Panic { thread, at, message, .. } = &*error else { panic!("{error}") };
    assert_eq!(*thread, ThreadId { rank: 0, block: 0, thread: 5 });
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
    let error = failure_of::<panics_with_a_guard>(1, 2);
    assert!(matches!(*error, Error::Panic { .. }), "{error}");
}

#[kernel]
unsafe fn takes_barrier(comm: DevComm, index: u32) {
    comm.lsa_barrier(Coop::cta(), BarrierIndex::new(index)).sync(MemoryOrder::AcqRel);
}

/// Each block takes the barrier with its index in a function, of which a launch knows nothing.
#[kernel]
unsafe fn takes_barriers(comm: DevComm) {
    take_own_barrier(&comm);
}

fn take_own_barrier(comm: &DevComm) {
    comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block()).sync(MemoryOrder::AcqRel);
}

#[test]
fn a_grid_larger_than_its_barriers_is_reported_where_a_launch_does_not_know() {
    let error = failure(Simulation::new(2), |gpu| {
        gpu.launch(takes_barriers::args(&gpu.dev_comm(barriers(3))?).grid(4).block(1))
    });
    let text = error.to_string();
    assert!(matches!(*error, Error::Misuse { .. }), "{text}");
    assert!(text.contains("block 3 thread 0 at tests/sim/failures.rs:"), "{text}");
    assert!(text.ends_with(": LSA barrier 3: the device communicator was made with 3"), "{text}");
}

/// Asks for something that is not there.
#[kernel]
unsafe fn asks_for(comm: DevComm, words: Window<u32>, state: *mut u32, which: u32) {
    let memory = LamportMemory { slots: words, state, capacity: 1, alone: false };
    // SAFETY: the window has two flags, or the slots of two ranks, and the state its words.
    unsafe {
        match which {
            0 => drop(Flags::new(&comm, words, 0, 2).at(2)),
            1 => Flag::new(&comm, words, 0).post(Coop::cta(), 2, 1),
            2 => Flag::new(&comm, words, 0).post(Coop::cta(), -1, 1),
            _ => drop(LamportSlots::<2>::new(&comm, &memory).begin(2)),
        }
    }
}

#[test]
fn flags_ranks_and_slots_that_are_not_there_are_reported() {
    for (which, message) in [
        (0, "there is no such flag"),
        (1, "there is no such LSA rank"),
        (2, "there is no such LSA rank"),
        (3, "a launch uses more slots than there are"),
    ] {
        let error = failure(Simulation::new(2), |gpu| {
            let words = gpu.window(&[0; LamportSlots::<2>::words(1)])?;
            let (state, comm) = (gpu.buffer(&[0; 2])?, gpu.dev_comm(barriers(0))?);
            gpu.launch(asks_for::args(&comm, &words, &state, which).grid(1).block(1))
        });
        let text = error.to_string();
        assert!(text.contains(message) && text.contains("failures.rs:"), "{which}: {text}");
    }
}

#[test]
fn one_barrier_with_two_users_is_reported() {
    // In most orders the two blocks' sessions do not overlap.
    for simulation in (0..16).map(|seed| Simulation::new(2).seed(seed)).chain([Simulation::new(2)])
    {
        let error = failure(simulation, |gpu| {
            gpu.launch(takes_barrier::args(&gpu.dev_comm(barriers(2))?, 0_u32).grid(2).block(2))
        });
        let text = error.to_string();
        let (at, what) = text.split_once(": LSA barrier 0 is in use by block ").expect(&text);
        for line in [at, what] {
            assert!(line.contains("tests/sim/failures.rs:"), "{text}");
        }
    }
}

/// The second block uses the barrier when the first has told it that its session is closed.
#[kernel]
unsafe fn takes_barrier_in_turn(comm: DevComm, turn: *mut u32) {
    // SAFETY: the buffer has one element.
    let turn = unsafe { Atomic::from_ptr(turn) };
    while turn.load(Order::Acquire, Scope::Gpu) != thread::block_idx_x() {}
    comm.lsa_barrier(Coop::cta(), BarrierIndex::new(0)).sync(MemoryOrder::AcqRel);
    turn.store(thread::block_idx_x() + 1, Order::Release, Scope::Gpu);
}

#[test]
fn one_barrier_may_have_two_users_in_turn() {
    for simulation in (0..8).map(|seed| Simulation::new(2).seed(seed)).chain([Simulation::new(2)]) {
        simulate(simulation, |gpu| {
            let (comm, turn) = (gpu.dev_comm(barriers(2))?, gpu.buffer(&[0_u32])?);
            gpu.launch(takes_barrier_in_turn::args(&comm, &turn).grid(2).block(1))
        });
    }
}

#[kernel]
unsafe fn nothing() {}

#[kernel]
unsafe fn nothing_with_comm(_comm: DevComm) {}

#[test]
fn what_a_gpu_refuses_is_refused() {
    simulate(Simulation::new(2).multiprocessors(1), |gpu| {
        let shared = LaunchConfig::new(1, 1).with_dynamic_shared(1 << 20);
        let shapes =
            [(0, 1), (1, 0), (1, 1025)].map(|(grid, block)| LaunchConfig::new(grid, block));
        for config in shapes.into_iter().chain([shared]) {
            let error = gpu.launch(nothing::args().config(config)).unwrap_err();
            let HostError::Launch(LaunchError::Refused { kernel: "nothing", .. }) = error else {
                panic!("{error}")
            };
        }
        let comm = gpu.dev_comm(barriers(64))?;
        let error = gpu.launch(nothing_with_comm::args(&comm).grid(33).block(32)).unwrap_err();
        assert!(error.to_string().contains("the GPU holds 32 "), "{error}");
        // Without a device communicator, the grid may be larger than what is resident.
        gpu.launch(nothing::args().grid(33).block(32))
    });
}

#[test]
fn bad_settings_and_lengths_are_errors() {
    let refuses = |simulation: Simulation| {
        assert!(matches!(Machine::new(&simulation), Err(Error::Settings(_))), "{simulation:?}");
    };
    refuses(Simulation::new(0));
    refuses(Simulation::new(4).team_size(3));
    refuses(Simulation::new(1).stack_size(1));
    refuses(Simulation::new(1).stack_size(usize::MAX));
    simulate(Simulation::new(1).multiprocessors(1 << 20), |gpu| {
        let comm = gpu.communicator()?;
        assert!(gpu.window(&[0.0_f32; 4])?.copy_from_host(&[0.0; 5]).is_err());
        for len in [usize::MAX, usize::MAX - 10_000, 1 << 60] {
            assert!(comm.window::<u8>(len).is_err() && comm.mem_alloc::<f64>(len).is_err());
        }
        let error = gpu.launch(nothing::args().grid(1 << 20).block(1024)).unwrap_err();
        assert!(error.to_string().contains("concurrent threads"), "{error}");
        Ok(())
    });
}

#[test]
fn several_machines_run_on_several_threads() {
    let threads: Vec<_> = (0..4)
        .map(|_| {
            std::thread::spawn(|| {
                simulate(Simulation::new(2), |gpu| {
                    gpu.launch(rank_1_skips::args(&gpu.dev_comm(barriers(1))?).grid(1).block(32))
                });
                deadlock(&failure_of::<half_a_block_syncs>(1, 64)).threads()
            })
        })
        .collect();
    for thread in threads {
        assert_eq!(thread.join().unwrap(), 32);
    }
}
