//! Waits that end by time, and threads that leave: who is told, and who goes on.

mod common;

use core::mem::MaybeUninit;
use core::ptr::null_mut;

use common::*;
use cuda_std::atomic::{Atomic, Order, Scope};
use cuda_std::prelude::*;
use devcomm_sim::{Error, Simulator, Waiting};
use nccl_device::raw::{self, GinRequest};
use nccl_device::{DevComm, Window};

/// A long time, in cycles.
const LONG: u64 = 1 << 40;

/// Every thread notes what its wait for a signal gave; rank 0 gets one, the others none.
#[kernel]
unsafe fn waits_with_timeout(comm: DevComm, out: Window<i32>) {
    let comm = comm.as_raw();
    let (team, mut net, coop) = (comm.world_team(), gin(comm, 0), cta());
    // SAFETY: the window has an element a thread.
    unsafe {
        if comm.rank == 1 && thread::thread_idx_x() == 0 {
            signal(&mut net, &team, 0, Then::Inc(0, true));
        }
        let result = raw::ncclGinWaitSignalTimeout(&mut net, &coop, 0, 1, 64, ACQ_REL, LONG);
        out.local().store(thread::thread_idx_x() as usize, result);
    }
}

#[test]
fn a_timeout_is_told_to_the_coops_first_thread_only() {
    for seed in 0..50 {
        let sim = Simulator::builder().ranks(3).seed(seed).build().unwrap();
        let (comm, out) = (sim.dev_comm(full()).unwrap(), sim.window::<i32>(4).unwrap());
        run(&sim, waits_with_timeout, 1, 4, |rank| (comm.rank(rank), out.rank(rank)));
        assert_eq!(out.read(0), [0, 0, 0, 0], "seed {seed}");
        assert_eq!(out.read(1), [TIMEOUT, 0, 0, 0], "seed {seed}");
        assert_eq!(out.read(2), [TIMEOUT, 0, 0, 0], "seed {seed}");
    }
}

/// What each kind of wait gives when it is in vain, and when it is not.
#[kernel]
unsafe fn every_kind(comm: DevComm, out: Window<i32>, signals: Window<u64>) {
    let comm = comm.as_raw();
    let (team, mut net, one) = (comm.world_team(), gin(comm, 0), thread_coop());
    let window = handle(&signals);
    let mut request = MaybeUninit::<GinRequest>::uninit();
    let request = request.as_mut_ptr();
    // SAFETY: the windows have the elements.
    unsafe {
        let in_vain = [
            raw::ncclGinWaitSignalTimeout(&mut net, &one, 0, 1, 64, ACQ_REL, LONG),
            raw::ncclGinWaitSignalTimeoutVA(&mut net, &one, window, 0, 1, 64, ACQ_REL, LONG),
            raw::ncclGinWaitCounterTimeout(&mut net, &one, 0, 1, 56, ACQ_REL, LONG),
        ];
        put(
            &mut net,
            &team,
            0,
            (window, 8),
            (window, 0),
            8,
            Then::IncVa((window, 0), true),
            Some(0),
        );
        signal(&mut net, &team, 0, Then::Inc(0, true));
        raw::ncclGinFlushAsync(&mut net, &team, 0, request, &one, 0, false, null_mut());
        let fulfilled = [
            raw::ncclGinWaitSignalTimeout(&mut net, &one, 0, 1, 64, ACQ_REL, LONG),
            raw::ncclGinWaitSignalTimeoutVA(&mut net, &one, window, 0, 1, 64, ACQ_REL, LONG),
            raw::ncclGinWaitCounterTimeout(&mut net, &one, 0, 1, 56, ACQ_REL, LONG),
            raw::ncclGinFlushTimeout(&mut net, &one, ACQ_REL, false, null_mut(), LONG),
            raw::ncclGinWaitTimeout(&mut net, request, &one, false, null_mut(), ACQ_REL, LONG),
        ];
        // No cycles at all: a look.
        let looks = [
            raw::ncclGinWaitSignalTimeout(&mut net, &one, 0, 2, 64, ACQ_REL, 0),
            raw::ncclGinWaitSignalTimeout(&mut net, &one, 0, 1, 64, ACQ_REL, 0),
        ];
        let all = in_vain.into_iter().chain(fulfilled).chain(looks);
        all.enumerate().for_each(|(i, result)| out.local().store(i, result));
    }
}

#[test]
fn every_wait_with_a_timeout_ends() {
    for seed in 0..20 {
        let sim = Simulator::builder().seed(seed).build().unwrap();
        let comm = sim.dev_comm(full()).unwrap();
        let (out, signals) = (sim.window::<i32>(10).unwrap(), sim.window::<u64>(2).unwrap());
        signals.write(0, &[0; 2]).unwrap();
        run(&sim, every_kind, 1, 1, |rank| (comm.rank(rank), out.rank(rank), signals.rank(rank)));
        assert_eq!(out.read(0), [8, 8, 8, 0, 0, 0, 0, 0, 8, 0]);
    }
}

/// Rank 1 takes its time, with a barrier and a poll in each round, before it signals.
#[kernel]
unsafe fn is_slow(comm: DevComm, out: Window<u32>, rounds: u32) {
    let comm = comm.as_raw();
    let (team, mut net, coop) = (comm.world_team(), gin(comm, 0), cta());
    // SAFETY: the window has two elements.
    unsafe {
        if comm.rank == 1 {
            for _ in 0..rounds {
                mem::load_volatile(out.local().as_ptr());
                thread::sync_threads();
            }
            if thread::thread_idx_x() == 0 {
                signal(&mut net, &team, 0, Then::Inc(0, true));
            }
            return;
        }
        let result = raw::ncclGinWaitSignalTimeout(&mut net, &coop, 0, 1, 64, ACQ_REL, LONG);
        if thread::thread_idx_x() == 0 {
            out.local().store(1, result as u32);
        }
    }
}

#[test]
fn no_wait_is_over_while_others_can_go_on() {
    for seed in 0..20 {
        let sim = Simulator::builder().ranks(2).seed(seed).build().unwrap();
        let (comm, out) = (sim.dev_comm(full()).unwrap(), sim.window::<u32>(2).unwrap());
        run(&sim, is_slow, 1, 2, |rank| (comm.rank(rank), out.rank(rank), 500_u32));
        assert_eq!(out.read(0)[1], 0, "seed {seed}");
    }
}

/// Rank 0 spins for a flag that rank 1 sets when its wait is over.
#[kernel]
unsafe fn spins_for_a_timeout(comm: DevComm, flag: Window<u32>) {
    let comm = comm.as_raw();
    let mut net = gin(comm, 0);
    // SAFETY: the window has an element.
    unsafe {
        if comm.rank == 0 {
            let flag = Atomic::from_ptr(flag.local().as_ptr());
            while flag.load(Order::Acquire, Scope::Sys) == 0 {}
            return;
        }
        let result =
            raw::ncclGinWaitSignalTimeout(&mut net, &thread_coop(), 0, 1, 64, ACQ_REL, LONG);
        mem::store_volatile(flag.lsa(0).as_ptr(), result as u32);
    }
}

#[test]
fn a_wait_is_over_although_others_spin() {
    let sim = Simulator::builder().ranks(2).step_limit(100_000).build().unwrap();
    let (comm, flag) = (sim.dev_comm(full()).unwrap(), sim.window::<u32>(1).unwrap());
    flag.write(0, &[0]).unwrap();
    run(&sim, spins_for_a_timeout, 1, 1, |rank| (comm.rank(rank), flag.rank(rank)));
    assert_eq!(flag.read(0), [TIMEOUT as u32]);
}

#[test]
fn a_seed_fixes_what_the_network_does() {
    let run = |seed| {
        let sim = Simulator::builder().ranks(3).seed(seed).build().unwrap();
        let (comm, out) = (sim.dev_comm(full()).unwrap(), sim.window::<i32>(4).unwrap());
        run(&sim, waits_with_timeout, 1, 4, |rank| (comm.rank(rank), out.rank(rank))).trace
    };
    assert_eq!(run(3), run(3));
    assert_ne!(run(3), run(4));
}

/// Half of the block leaves, by `exit` from a function; the rest meets.
#[kernel]
unsafe fn half_leaves(out: Window<u32>) {
    fn leave_if(odd: bool) {
        if odd {
            thread::exit();
        }
    }
    thread::sync_threads();
    leave_if(thread::thread_idx_x() % 2 == 1);
    thread::sync_threads();
    // SAFETY: the mask names the lanes that are there; the window has an element a thread.
    unsafe {
        let voted = warp::warp_vote_ballot(0x5555_5555, true);
        thread::sync_threads();
        out.local().store(thread::thread_idx_x() as usize, voted);
    }
}

#[test]
fn threads_that_exit_leave_barriers_passable() {
    for seed in 0..10 {
        let sim = Simulator::builder().seed(seed).build().unwrap();
        let out = sim.window::<u32>(64).unwrap();
        out.write(0, &[0; 64]).unwrap();
        run(&sim, half_leaves, 3, 64, |rank| (out.rank(rank),));
        let got = out.read(0);
        assert!((0..64).all(|i| got[i] == if i % 2 == 0 { 0x5555_5555 } else { 0 }), "{got:?}");
    }
}

/// The first thread waits for a signal that does not come, the others for it.
#[kernel]
unsafe fn waits_in_vain(comm: DevComm) {
    let comm = comm.as_raw();
    if thread::thread_idx_x() == 0 {
        // SAFETY: a handle.
        unsafe { wait(&mut gin(comm, 0), 3, 1) };
    }
    thread::sync_threads();
}

#[test]
fn a_wait_in_vain_is_found_at_once() {
    let sim = Simulator::builder().ranks(2).step_limit(1000).build().unwrap();
    let comm = sim.dev_comm(full()).unwrap();
    let error = error_of(&sim, waits_in_vain, 2, 64, |rank| (comm.rank(rank),));
    let Error::Deadlock(stall) = error else { panic!("{error}") };
    let named = stall.waiters.iter().filter(|w| matches!(w.what, Waiting::For(_)));
    assert_eq!(named.map(|w| w.threads).sum::<u32>(), 4);
}
