//! Tests of waits with a timeout, and of threads that exit.

use core::ffi::c_void;
use core::mem::MaybeUninit;
use core::ptr::null_mut;

use crate::common::*;
use cuda_std::atomic::{Atomic, Order, Scope};
use cuda_std::prelude::*;
use devcomm::Simulation;
use devcomm::sim::{Error, Waiting};
use devcomm_testing::simulated::{failure, read, run, simulate, world};
use nccl_device::raw::{self, CoopAny, Gin, GinRequest};
use nccl_device::{Coop, DevComm, EMPTY, Lamport, LamportMemory, LamportSlots, Timeout, Window};

/// A timeout in cycles that only passes when nothing else can happen.
const LONG: u64 = 1 << 40;

/// Every thread records the result of its wait for a signal, which only rank 0 gets.
#[kernel]
unsafe fn waits_with_timeout(comm: DevComm, out: Window<i32>) {
    let comm = comm.as_raw();
    let (team, mut net, coop) = (comm.world_team(), gin(comm, 0), cta());
    // SAFETY: the window has an element per thread.
    unsafe {
        if comm.rank == 1 && thread::thread_idx_x() == 0 {
            signal(&mut net, &team, 0, SignalMode::Inc(0, true));
        }
        let result =
            raw::ncclGinWaitSignalTimeout(&mut net, &coop, 0, 1, SIGNAL_BITS, ACQ_REL, LONG);
        out.local().store(thread::thread_idx_x() as usize, result);
    }
}

#[test]
fn a_timeout_is_told_to_the_coops_first_thread_only() {
    for seed in 0..50 {
        let out = simulate(Simulation::new(3).seed(seed), |gpu| {
            let (comm, out) = (gpu.dev_comm(full())?, gpu.window(&[-1_i32; 4])?);
            gpu.launch(waits_with_timeout::args(&comm, &out).grid(1).block(4))?;
            read(&out)
        });
        let none = [TIMEOUT, 0, 0, 0];
        assert_eq!(out, [[0; 4], none, none], "seed {seed}");
    }
}

/// Waits until the signal at the beginning of a window is 1. Returns NCCL's code.
///
/// # Safety
///
/// The window has the signal.
#[track_caller]
unsafe fn wait_for_signal_in(window: *mut c_void, net: &mut Gin, one: &CoopAny) -> i32 {
    // SAFETY: the caller guarantees the signal.
    unsafe { raw::ncclGinWaitSignalTimeoutVA(net, one, window, 0, 1, SIGNAL_BITS, ACQ_REL, LONG) }
}

/// Records the result of each kind of wait: timed out, or not.
#[kernel]
unsafe fn every_kind(comm: DevComm, out: Window<i32>, signals: Window<u64>) {
    let comm = comm.as_raw();
    let (team, mut net, one) = (comm.world_team(), gin(comm, 0), thread_coop());
    let window = handle(&signals);
    let mut request = MaybeUninit::<GinRequest>::uninit();
    let request = request.as_mut_ptr();
    // SAFETY: the windows have the elements.
    unsafe {
        let timed_out = [
            raw::ncclGinWaitSignalTimeout(&mut net, &one, 0, 1, SIGNAL_BITS, ACQ_REL, LONG),
            wait_for_signal_in(window, &mut net, &one),
            raw::ncclGinWaitCounterTimeout(&mut net, &one, 0, 1, COUNTER_BITS, ACQ_REL, LONG),
        ];
        let then = SignalMode::IncVa((window, 0), true);
        put(&mut net, &team, 0, (window, 8), (window, 0), 8, then, Some(0));
        signal(&mut net, &team, 0, SignalMode::Inc(0, true));
        raw::ncclGinFlushAsync(&mut net, &team, 0, request, &one, 0, false, null_mut());
        let completed = [
            raw::ncclGinWaitSignalTimeout(&mut net, &one, 0, 1, SIGNAL_BITS, ACQ_REL, LONG),
            wait_for_signal_in(window, &mut net, &one),
            raw::ncclGinWaitCounterTimeout(&mut net, &one, 0, 1, COUNTER_BITS, ACQ_REL, LONG),
            raw::ncclGinFlushTimeout(&mut net, &one, ACQ_REL, false, null_mut(), LONG),
            raw::ncclGinWaitTimeout(&mut net, request, &one, false, null_mut(), ACQ_REL, LONG),
        ];
        // A timeout of 0 cycles polls once.
        let single_polls = [
            raw::ncclGinWaitSignalTimeout(&mut net, &one, 0, 2, SIGNAL_BITS, ACQ_REL, 0),
            raw::ncclGinWaitSignalTimeout(&mut net, &one, 0, 1, SIGNAL_BITS, ACQ_REL, 0),
        ];
        let all = timed_out.into_iter().chain(completed).chain(single_polls);
        all.enumerate().for_each(|(i, result)| out.local().store(i, result));
    }
}

#[test]
fn every_wait_with_a_timeout_ends() {
    for seed in 0..20 {
        let out = simulate(Simulation::new(1).seed(seed), |gpu| {
            let (out, signals) = (gpu.window(&[-1_i32; 10])?, gpu.window(&[0_u64; 2])?);
            gpu.launch(every_kind::args(&gpu.dev_comm(full())?, &out, &signals).grid(1).block(1))?;
            read(&out)
        });
        assert_eq!(out, [[TIMEOUT, TIMEOUT, TIMEOUT, 0, 0, 0, 0, 0, TIMEOUT, 0]]);
    }
}

/// Rank 1 is slow: before it signals, it executes `rounds` loads and block barriers.
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
                signal(&mut net, &team, 0, SignalMode::Inc(0, true));
            }
            return;
        }
        let result =
            raw::ncclGinWaitSignalTimeout(&mut net, &coop, 0, 1, SIGNAL_BITS, ACQ_REL, LONG);
        if thread::thread_idx_x() == 0 {
            out.local().store(1, result as u32);
        }
    }
}

#[test]
fn no_wait_is_over_while_others_can_go_on() {
    for seed in 0..20 {
        let out = simulate(Simulation::new(2).seed(seed), |gpu| {
            let (comm, out) = (gpu.dev_comm(full())?, gpu.window(&[9_u32; 2])?);
            gpu.launch(is_slow::args(&comm, &out, 500_u32).grid(1).block(2))?;
            read(&out)
        });
        assert_eq!(out[0][1], 0, "seed {seed}");
    }
}

/// Rank 0 spins on a flag that rank 1 sets when its own wait has timed out.
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
        let result = raw::ncclGinWaitSignalTimeout(
            &mut net,
            &thread_coop(),
            0,
            1,
            SIGNAL_BITS,
            ACQ_REL,
            LONG,
        );
        mem::store_volatile(flag.lsa(0).as_ptr(), result as u32);
    }
}

#[test]
fn a_wait_is_over_although_others_spin() {
    let flags = simulate(Simulation::new(2).step_limit(100_000), |gpu| {
        let (comm, flag) = (gpu.dev_comm(full())?, gpu.window(&[0_u32])?);
        gpu.launch(spins_for_a_timeout::args(&comm, &flag).grid(1).block(1))?;
        read(&flag)
    });
    assert_eq!(flags[0], [TIMEOUT as u32]);
}

#[test]
fn a_seed_fixes_what_the_network_does() {
    let trace = |seed| {
        let world = world(Simulation::new(3).seed(seed));
        let ran = run(&world, |gpu| {
            let (comm, out) = (gpu.dev_comm(full())?, gpu.window(&[0_i32; 4])?);
            gpu.launch(waits_with_timeout::args(&comm, &out).grid(1).block(4))
        });
        ran.unwrap();
        world.simulated_machine().unwrap().activity().trace
    };
    assert_eq!(trace(3), trace(3));
    assert_ne!(trace(3), trace(4));
}

/// Half of the block exits, in a nested function; the rest synchronises.
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
    // SAFETY: the mask has the remaining lanes; the window has an element per thread.
    unsafe {
        let voted = warp::warp_vote_ballot(0x5555_5555, true);
        thread::sync_threads();
        out.local().store(thread::index_1d() as usize, voted);
    }
}

#[test]
fn threads_that_exit_leave_barriers_passable() {
    for seed in 0..10 {
        let out = simulate(Simulation::new(1).seed(seed), |gpu| {
            let out = gpu.window(&[0_u32; 3 * 64])?;
            gpu.launch(half_leaves::args(&out).grid(3).block(64))?;
            read(&out)
        });
        let got = &out[0];
        assert!((0..3 * 64).all(|i| got[i] == if i % 2 == 0 { 0x5555_5555 } else { 0 }), "{got:?}");
    }
}

/// The first thread waits for a signal that no rank sends, the others for the first thread.
#[kernel]
unsafe fn waits_in_vain(comm: DevComm) {
    let comm = comm.as_raw();
    if thread::thread_idx_x() == 0 {
        // SAFETY: the handle is valid.
        unsafe { wait(&mut gin(comm, 0), 3, 1) };
    }
    thread::sync_threads();
}

#[test]
fn a_wait_in_vain_is_found_at_once() {
    let error = failure(Simulation::new(2).step_limit(1000), |gpu| {
        gpu.launch(waits_in_vain::args(&gpu.dev_comm(full())?).grid(2).block(64))
    });
    let Error::Deadlock(stall) = &*error else { panic!("{error}") };
    let named = stall.waiters.iter().filter(|w| matches!(w.what, Waiting::For(_)));
    // The first thread of each of two blocks on two ranks.
    assert_eq!(named.map(|w| w.threads).sum::<u32>(), 4);
}

/// Thread `i` waits for word `i`, and sets word `i + 1`.
#[kernel]
unsafe fn passes_on(comm: DevComm, words: Window<u32>, starts: bool) {
    let (i, words) = (thread::index_1d() as usize, words.local().as_ptr());
    // SAFETY: the window has one word per thread plus one.
    unsafe {
        if i > 0 || !starts {
            comm.wait_until(Coop::thread(), || mem::load_volatile(words.add(i)) != 0);
        }
        mem::store_volatile(words.add(i + 1), 1);
    }
}

/// Returns simulations of one GPU, in fixed and random orders, with and without `watch`.
fn one_gpu() -> impl Iterator<Item = Simulation> {
    let one = |watch| Simulation::new(1).step_limit(100_000).watch(watch);
    let seeds = move |watch| (0..20).map(move |seed| one(watch).seed(seed)).chain([one(watch)]);
    [true, false].into_iter().flat_map(seeds)
}

#[test]
fn threads_that_wait_for_each_other_in_a_row_all_pass() {
    for simulation in one_gpu() {
        let words = simulate(simulation, |gpu| {
            let (comm, words) = (gpu.dev_comm(full())?, gpu.window(&[0_u32; 129])?);
            gpu.launch(passes_on::args(&comm, &words, true).grid(2).block(64))?;
            read(&words)
        });
        assert_eq!(words[0][1..], [1; 128]);
    }
}

#[test]
fn polls_without_end_are_a_deadlock_and_have_names() {
    for watch in [true, false] {
        let simulation = Simulation::new(1).step_limit(100_000).watch(watch);
        let error = failure(simulation, |gpu| {
            let words = gpu.window(&[0_u32; 129])?;
            gpu.launch(passes_on::args(&gpu.dev_comm(full())?, &words, false).grid(2).block(64))
        });
        let Error::Deadlock(stall) = &*error else { panic!("{error}") };
        assert_eq!(stall.threads(), 128);
        assert!(stall.waiters.iter().all(|w| matches!(w.what, Waiting::For(_))));
        assert!(stall.waiters[0].at.unwrap().file().ends_with("waits.rs"));
    }
}

/// Thread 0 waits for a word with a timeout, then sets thread 1's word; both record the result of
/// their wait.
#[kernel]
unsafe fn times_out(comm: DevComm, words: Window<u32>) {
    let (i, words) = (thread::thread_idx_x() as usize, words.local().as_ptr());
    // SAFETY: the window has four words.
    unsafe {
        let is_set = || mem::load_volatile(words.add(i)) != 0;
        let mut set = 1;
        if i == 0 {
            let waited = comm.wait_until_timeout(Coop::thread(), Timeout::nanos(0), is_set);
            set = u32::from(waited.is_ok());
            mem::store_volatile(words.add(1), 1);
        } else {
            comm.wait_until(Coop::thread(), is_set);
        }
        mem::store(words.add(2 + i), 10 + set);
    }
}

#[test]
fn a_poll_with_a_timeout_is_over_when_nothing_else_can_go_on() {
    for simulation in one_gpu() {
        let words = simulate(simulation, |gpu| {
            let (comm, words) = (gpu.dev_comm(full())?, gpu.window(&[0_u32; 4])?);
            gpu.launch(times_out::args(&comm, &words).grid(1).block(2))?;
            read(&words)
        });
        assert_eq!(words, [[0, 1, 10, 11]]);
    }
}

/// Rank 0 waits for a message of rank 1, which sends none.
#[kernel]
unsafe fn waits_for_a_message(comm: DevComm, slots: Window<u32>, state: *mut u32) {
    if comm.rank() == 0 {
        // SAFETY: the window and the state are for one slot.
        unsafe {
            let memory = LamportMemory { slots, state, capacity: 1, alone: false };
            let session = LamportSlots::<2>::new(&comm, &memory).begin(1);
            session.receive_all::<f32>(0, Vec16::from_bits([1; 4]));
        }
    }
}

#[test]
fn a_wait_for_a_message_names_its_place_and_what_is_there() {
    let error = failure(Simulation::new(2), |gpu| {
        let slots = gpu.window(&[EMPTY; LamportSlots::<2>::words(1)])?;
        let (state, comm) =
            (gpu.buffer(&[0; Lamport::<2>::STATE])?, gpu.dev_comm(Default::default())?);
        gpu.launch(waits_for_a_message::args(&comm, &slots, &state).grid(1).block(1))
    });
    let Error::Deadlock(stall) = &*error else { panic!("{error}") };
    let [waiter] = &stall.waiters[..] else { panic!("{error}") };
    assert!(matches!(waiter.what, Waiting::Messages { .. }), "{error}");
    let polled = waiter.polled.as_deref().unwrap();
    assert!(polled.contains(" of `slots` (window ") && polled.contains(" is 0x"), "{polled}");
}
