//! Tests of GIN: delivery, completion, ordering and flow control.

use core::mem::MaybeUninit;
use core::ptr::null_mut;
use std::collections::BTreeSet;

use crate::common::*;
use cuda_std::prelude::*;
use devcomm::{Error, Lag, Simulation};
use devcomm_testing::simulated::{read, simulate};
use nccl_device::raw::{self, GinRequest};
use nccl_device::{DevComm, Window};

/// Two ranks send a number back and forth; each adds one. Rank 0 sends in odd rounds, so in round
/// `r` the receiver gets its signal number `r / 2`, rounded up.
#[kernel]
unsafe fn ping_pong(comm: DevComm, out: Window<u64>, rounds: u64) {
    let comm = comm.as_raw();
    let (team, me) = (comm.world_team(), comm.rank);
    let peer = 1 - me;
    let (mut net, window) = (gin(comm, 0), handle(&out));
    // SAFETY: element 0 is sent, element 1 received; the signals order the accesses.
    unsafe {
        for round in 1..=rounds {
            if (round % 2 == 1) == (me == 0) {
                let value = if round == 1 { 0 } else { out.local().load(1) };
                out.local().store(0, value + 1);
                put(
                    &mut net,
                    &team,
                    peer,
                    (window, 8),
                    (window, 0),
                    8,
                    SignalMode::Inc(0, true),
                    None,
                );
                flush(&mut net);
            } else {
                wait(&mut net, 0, round.div_ceil(2));
            }
        }
    }
}

/// Runs `games` ping-pongs of `rounds` rounds on one machine.
fn check_ping_pong(simulation: Simulation, games: usize, rounds: u64) {
    simulate(simulation, |gpu| {
        let (comm, out) = (gpu.dev_comm(full())?, gpu.window(&[0_u64; 2])?);
        for _ in 0..games {
            gpu.launch(ping_pong::args(&comm, &out, rounds).grid(1).block(1))?;
            assert!(!gpu.is_root() || read(&out)?[1] == rounds);
            // The next ping-pong counts its signals from 1.
            gpu.launch(resets_signal::args(&comm).grid(1).block(1))?;
        }
        Ok(())
    });
}

#[test]
fn a_ping_pong_counts_right_in_a_thousand_orders() {
    (0..20).for_each(|seed| check_ping_pong(Simulation::new(2).seed(seed), 50, 10));
}

#[test]
fn a_ping_pong_counts_right_however_threads_run() {
    let two = || Simulation::new(2);
    let lagging = |lag| two().seed(3).lag(lag);
    for simulation in [
        two(),
        two().watch(false),
        two().preempt(true).seed(5),
        two().seed(5).pct(3),
        two().choices(&[]),
        lagging(Lag::Thread),
        lagging(Lag::Rank),
    ] {
        check_ping_pong(simulation, 2, 100);
    }
}

#[kernel]
unsafe fn resets_signal(comm: DevComm) {
    // SAFETY: the handle is valid; no operation is in flight.
    unsafe { raw::ncclGinResetSignal(&mut gin(comm.as_raw(), 0), 0) };
}

/// Every rank puts `count` elements to every rank and waits for all puts to itself. Peers are
/// distributed over the threads; the thread of the rank's own put waits.
#[kernel]
unsafe fn all_to_all(
    comm: DevComm,
    send: Window<u32>,
    recv: Window<u32>,
    count: usize,
    round: u64,
) {
    let comm = comm.as_raw();
    let (team, me, ranks) = (comm.world_team(), comm.rank as usize, comm.n_ranks as usize);
    let context = thread::block_idx_x() % comm.gin_context_count;
    let (mut net, bytes) = (gin(comm, context), count * 4);
    // SAFETY: both windows have `count` elements per rank.
    unsafe {
        let mut peer = thread::index_1d() as usize;
        while peer < ranks {
            let (dst, src) = ((handle(&recv), me * bytes), (handle(&send), peer * bytes));
            let then = SignalMode::Inc(1, peer.is_multiple_of(2));
            put(&mut net, &team, peer as i32, dst, src, bytes, then, None);
            peer += (thread::grid_dim_x() * thread::block_dim_x()) as usize;
        }
        raw::ncclGinFlush(&mut net, &cta(), ACQ_REL);
        let threads = (thread::grid_dim_x() * thread::block_dim_x()) as usize;
        if thread::index_1d() as usize == me % threads {
            wait(&mut net, 1, round * ranks as u64);
        }
    }
}

#[test]
fn an_all_to_all_is_complete_in_a_thousand_orders() {
    let sent = |rank: u32| (0..12).map(move |i| rank * 100 + i);
    for seed in 0..20 {
        simulate(Simulation::new(4).team_size(2).seed(seed), |gpu| {
            let (comm, me) = (gpu.dev_comm(full())?, gpu.rank() as u32);
            let send = gpu.window(&sent(me).collect::<Vec<_>>())?;
            let recv = gpu.window(&[0_u32; 12])?;
            let mine = |from| sent(from).skip(3 * me as usize).take(3);
            let want: Vec<u32> = (0..4).flat_map(mine).collect();
            for round in 1..=50_u64 {
                recv.fill_bytes(0xff)?;
                gpu.barrier()?;
                gpu.launch(all_to_all::args(&comm, &send, &recv, 3_usize, round).grid(2).block(2))?;
                assert_eq!(read(&recv)?, want, "seed {seed} round {round}");
            }
            Ok(())
        });
    }
}

/// Rank 0 puts element 0 to elements 0 and 1 of rank 1: first without a signal, then with one. Rank
/// 1 records both elements at the signal of the second put, and then waits for both puts.
#[kernel]
unsafe fn two_puts(comm: DevComm, out: Window<u32>, seen: Window<u32>, strong: bool, round: u64) {
    let comm = comm.as_raw();
    let (team, mut net, window) = (comm.world_team(), gin(comm, 0), handle(&out));
    // SAFETY: the windows have two elements.
    unsafe {
        if comm.rank == 0 {
            put(&mut net, &team, 1, (window, 0), (window, 0), 4, SignalMode::Nothing, None);
            put(&mut net, &team, 1, (window, 4), (window, 0), 4, SignalMode::Inc(3, strong), None);
            signal(&mut net, &team, 1, SignalMode::Inc(4, true));
            return;
        }
        wait(&mut net, 3, round);
        seen.local().store(0, out.local().load(0));
        seen.local().store(1, out.local().load(1));
        wait(&mut net, 4, round);
    }
}

/// Returns what rank 1 saw of the two puts in each round.
fn seen_of_two_puts(simulation: Simulation, strong: bool) -> Vec<Vec<u32>> {
    let seen = simulate(simulation, |gpu| {
        let comm = gpu.dev_comm(full())?;
        let (out, seen) = (gpu.window(&[7_u32; 2])?, gpu.window(&[0_u32; 2])?);
        let mut all = Vec::new();
        for round in 1..=50_u64 {
            if gpu.rank() == 1 {
                out.fill_bytes(0)?;
            }
            gpu.barrier()?;
            gpu.launch(two_puts::args(&comm, &out, &seen, strong, round).grid(1).block(1))?;
            assert_eq!(read(&out)?, [7, 7]);
            all.push(read(&seen)?);
        }
        Ok(all)
    });
    seen.into_iter().nth(1).unwrap()
}

fn seeds() -> impl Iterator<Item = Simulation> {
    (0..10).map(|seed| Simulation::new(2).seed(seed))
}

#[test]
fn a_strong_signal_comes_after_all_puts_before_it() {
    for simulation in seeds().chain([Simulation::new(2)]) {
        assert!(seen_of_two_puts(simulation, true).iter().all(|seen| seen[..] == [7, 7]));
    }
}

#[test]
fn a_weak_signal_promises_its_own_put_only() {
    // The first put races with the load of what it writes.
    let seeds = seeds().map(|seed| seed.races(false));
    let seen: Vec<_> = seeds.flat_map(|seed| seen_of_two_puts(seed, false)).collect();
    assert!(seen.iter().all(|seen| seen[1] == 7));
    assert!(seen.iter().any(|seen| seen[0] == 0), "the first put always arrived first");
    assert!(seen.iter().any(|seen| seen[0] == 7), "the first put never arrived first");
}

/// Rank 0 overwrites the source of a put, with or without a flush.
#[kernel]
unsafe fn overwrites(comm: DevComm, out: Window<u32>, flushes: bool, round: u64) {
    let comm = comm.as_raw();
    let (team, mut net, window) = (comm.world_team(), gin(comm, 0), handle(&out));
    // SAFETY: the window has two elements.
    unsafe {
        if comm.rank == 0 {
            out.local().store(0, 1);
            put(&mut net, &team, 1, (window, 4), (window, 0), 4, SignalMode::Inc(0, true), None);
            if flushes {
                flush(&mut net);
            }
            out.local().store(0, 2);
        } else {
            wait(&mut net, 0, round);
        }
    }
}

#[test]
fn a_source_is_read_when_the_network_comes_to_it_and_not_after_a_flush() {
    let got = |simulation: Simulation, flushes: bool| {
        let got = simulate(simulation, |gpu| {
            let (comm, out) = (gpu.dev_comm(full())?, gpu.window(&[0_u32; 2])?);
            let arrives = |round: u64| {
                // Waits until all ranks have read the previous round's data.
                gpu.barrier()?;
                gpu.launch(overwrites::args(&comm, &out, flushes, round).grid(1).block(1))?;
                read(&out).map(|out| out[1])
            };
            (1..=10).map(arrives).collect::<Result<Vec<_>, _>>()
        });
        got.into_iter().nth(1).unwrap()
    };
    assert_eq!(got(Simulation::new(2), true), [1; 10]);
    assert!(got(Simulation::new(2).races(false), false).contains(&2));
    assert!(seeds().all(|seed| got(seed, true) == [1; 10]));
}

/// Rank 0 flushes a put and then sets rank 1's flag by a store, which does not order the put. Rank
/// 1 records the element at the flag, and then waits for the put.
#[kernel]
unsafe fn takes_a_flush_for_delivery(
    comm: DevComm,
    out: Window<u32>,
    flag: Window<u32>,
    round: u64,
) {
    let comm = comm.as_raw();
    let (team, mut net, window) = (comm.world_team(), gin(comm, 0), handle(&out));
    // SAFETY: the windows have two elements.
    unsafe {
        if comm.rank == 0 {
            out.local().store(0, round as u32);
            put(&mut net, &team, 1, (window, 4), (window, 0), 4, SignalMode::Nothing, None);
            flush(&mut net);
            mem::store_volatile(flag.lsa(1).as_ptr(), round as u32);
            signal(&mut net, &team, 1, SignalMode::Inc(0, true));
        } else {
            while mem::load_volatile(flag.local().as_ptr()) != round as u32 {}
            let seen = out.local().load(1);
            out.local().store(0, seen);
            wait(&mut net, 0, round);
        }
    }
}

#[test]
fn a_flush_is_no_delivery() {
    let early = seeds().flat_map(|simulation| {
        let early = simulate(simulation.races(false), |gpu| {
            let comm = gpu.dev_comm(full())?;
            let (out, flag) = (gpu.window(&[0_u32; 2])?, gpu.window(&[0_u32])?);
            let is_early = |round: u64| {
                // Waits until all ranks have read the previous round's data.
                gpu.barrier()?;
                gpu.launch(
                    takes_a_flush_for_delivery::args(&comm, &out, &flag, round).grid(1).block(1),
                )?;
                let out = read(&out)?;
                assert!(gpu.is_root() || u64::from(out[1]) == round);
                Ok::<_, Error>(u64::from(out[0]) != round)
            };
            (1..=20).map(is_early).collect::<Result<Vec<_>, _>>()
        });
        early.into_iter().nth(1).unwrap()
    });
    assert!({ early }.any(|early| early), "a flush always delivered");
}

/// Rank 0 gets an element from rank 1 and records it before and after the wait. Then it counts puts
/// and records the counter's values.
#[kernel]
unsafe fn gets_and_counts(comm: DevComm, out: Window<u64>, by_request: bool) {
    let comm = comm.as_raw();
    let (team, mut net, window) = (comm.world_team(), gin(comm, 1), handle(&out));
    let (one, local) = (thread_coop(), out.local());
    if comm.rank == 1 {
        return;
    }
    // SAFETY: the window has eight elements.
    unsafe {
        raw::ncclGinGet(&mut net, &team, 1, window, 0, window, 0, 8, &one, false, null_mut(), 0);
        local.store(1, local.load(0));
        if by_request {
            let mut request = MaybeUninit::<GinRequest>::uninit();
            let request = request.as_mut_ptr();
            raw::ncclGinFlushAsync(&mut net, &team, 1, request, &one, 0, false, null_mut());
            raw::ncclGinWait(&mut net, request, &one, false, null_mut(), ACQ_REL);
        } else {
            flush(&mut net);
        }
        local.store(2, local.load(0));

        for _ in 0..3 {
            put(&mut net, &team, 1, (window, 56), (window, 0), 8, SignalMode::Nothing, Some(2));
        }
        local.store(3, raw::ncclGinReadCounter(&mut net, 2, COUNTER_BITS, RELAXED));
        raw::ncclGinWaitCounter(&mut net, &one, 2, 3, COUNTER_BITS, ACQ_REL);
        local.store(4, raw::ncclGinReadCounter(&mut net, 2, COUNTER_BITS, RELAXED));
        raw::ncclGinResetCounter(&mut net, 2);
        local.store(5, raw::ncclGinReadCounter(&mut net, 2, COUNTER_BITS, RELAXED));
    }
}

#[test]
fn gets_are_there_after_a_flush_and_counters_count_puts() {
    let mut counts = BTreeSet::new();
    for simulation in seeds().chain([Simulation::new(2)]) {
        for by_request in [false, true] {
            // The kernel reads an element that a get may be writing.
            let out = simulate(simulation.clone().races(false), |gpu| {
                let (comm, out) = (gpu.dev_comm(full())?, gpu.window(&[5 + gpu.rank() as u64; 8])?);
                gpu.launch(gets_and_counts::args(&comm, &out, by_request).grid(1).block(1))?;
                read(&out)
            });
            counts.insert(out[0][3]);
            assert_eq!((&out[0][..3], &out[0][4..6]), (&[6, 5, 6][..], &[3, 0][..]));
        }
    }
    // Without a wait some puts may not have been counted yet.
    assert!(counts.first() < Some(&3) && counts.last() == Some(&3), "{counts:?}");
}

/// Rank 0 puts values of every size and sends VA and indexed signals; rank 1 waits for all signals
/// and records them.
#[kernel]
unsafe fn signals_of_all_kinds(comm: DevComm, out: Window<u64>) {
    let comm = comm.as_raw();
    let (team, mut net, window) = (comm.world_team(), gin(comm, 0), handle(&out));
    let (one, local) = (thread_coop(), out.local());
    // SAFETY: the window has sixteen elements.
    unsafe {
        if comm.rank == 0 {
            for (i, size) in [1, 2, 4, 8].into_iter().enumerate() {
                let value = (0x1122_3344_5566_7788, size);
                put_value(&mut net, &team, 1, (window, i * 8), value, SignalMode::AddTo(1, 10));
            }
            signal(&mut net, &team, 1, SignalMode::AddTo(1, 2));
            signal(&mut net, &team, 1, SignalMode::IncVa((window, 64), true));
            let then = SignalMode::IncVa((window, 64), false);
            put(&mut net, &team, 1, (window, 32), (window, 0), 8, then, None);
            let (id, none) = (2, null_mut());
            raw::ncclGinSignal(
                &mut net, &team, 1, true, id, INC, 0, &one, false, none, THREAD, SYSTEM,
            );
            return;
        }
        wait(&mut net, 1, 42);
        local.store(9, raw::ncclGinReadSignal(&mut net, 1, SIGNAL_BITS, ACQ_REL));
        local.store(10, raw::ncclGinReadSignal(&mut net, 1, 3, ACQ_REL));
        raw::ncclGinWaitSignalVA(&mut net, &one, window, 64, 2, SIGNAL_BITS, ACQ_REL);
        local.store(11, raw::ncclGinReadSignalVA(&mut net, window, 64, SIGNAL_BITS, ACQ_REL));
        wait(&mut net, 2, 1);
        raw::ncclGinResetSignal(&mut net, 1);
        raw::ncclGinResetSignalVA(&mut net, window, 64);
        local.store(12, raw::ncclGinReadSignal(&mut net, 1, SIGNAL_BITS, ACQ_REL));
        // Another context has other signals.
        let mut other = gin(comm, 1);
        local.store(13, raw::ncclGinReadSignal(&mut other, 2, SIGNAL_BITS, ACQ_REL));
        local.store(14, raw::ncclGinReadSignal(&mut net, 2, SIGNAL_BITS, ACQ_REL));
    }
}

#[test]
fn values_and_signals_of_every_kind_arrive() {
    for seed in 0..20 {
        let out = simulate(Simulation::new(2).seed(seed), |gpu| {
            let first = if gpu.is_root() { 77_u64 } else { 0 };
            let (comm, out) = (gpu.dev_comm(full())?, gpu.window(&[first; 16])?);
            gpu.launch(signals_of_all_kinds::args(&comm, &out).grid(1).block(1))?;
            read(&out)
        });
        let got = &out[1];
        assert_eq!(got[..5], [0x88, 0x7788, 0x5566_7788, 0x1122_3344_5566_7788, 77]);
        assert_eq!(got[8..15], [0, 42, 2, 2, 0, 0, 1]);
    }
}

/// Rank 0 sends five signals; rank 1 waits for them by the signal's shadow.
#[kernel]
unsafe fn follows_shadows(comm: DevComm, out: Window<u64>) {
    let comm = comm.as_raw();
    let (team, mut net, local) = (comm.world_team(), gin(comm, 2), out.local());
    // SAFETY: the window has eight elements.
    unsafe {
        if comm.rank == 0 {
            if thread::thread_idx_x() == 0 {
                (0..5).for_each(|_| signal(&mut net, &team, 1, SignalMode::Inc(4, true)));
            }
            return;
        }
        let coop = cta();
        let shadow = raw::ncclGinGetSignalShadowPtr(&mut net, 4);
        if thread::thread_idx_x() == 0 {
            raw::ncclGinIncreaseSignalShadow(&mut net, 4, 2);
        }
        raw::ncclGinWaitSignalMeetShadow(&mut net, &coop, 4, SIGNAL_BITS, ACQ_REL);
        let (mut before, mut delta) = (0, 0);
        let (old, by) = (&mut before, &mut delta);
        raw::ncclGinWaitSignalFollowShadow(&mut net, &coop, 4, 3, old, by, SIGNAL_BITS, ACQ_REL);
        // Every thread gets the two values.
        let at = 2 * thread::thread_idx_x() as usize;
        local.store(at, before);
        local.store(at + 1, delta);
        thread::sync_threads();
        if thread::thread_idx_x() == 0 {
            local.store(4, mem::load(shadow));
            raw::ncclGinResetSignal(&mut net, 4);
            local.store(5, mem::load(shadow));
            local.store(6, raw::ncclGinReadSignal(&mut net, 4, SIGNAL_BITS, ACQ_REL));
        }
    }
}

#[test]
fn shadows_are_met_and_followed_by_every_thread() {
    for seed in 0..50 {
        let out = simulate(Simulation::new(2).seed(seed), |gpu| {
            let (comm, out) = (gpu.dev_comm(full())?, gpu.window(&[0_u64; 8])?);
            gpu.launch(follows_shadows::args(&comm, &out).grid(1).block(2))?;
            read(&out)
        });
        assert_eq!(out[1][..7], [2, 3, 2, 3, 5, 0, 0], "seed {seed}");
    }
}

/// Posts `count` puts to the next rank, and waits for those of the previous rank.
#[kernel]
unsafe fn posts_many(comm: DevComm, out: Window<u32>, count: u32) {
    let comm = comm.as_raw();
    let (team, mut net, window) = (comm.world_team(), gin(comm, 0), handle(&out));
    let peer = (comm.rank + 1) % comm.n_ranks;
    for i in 0..count {
        let dst = (window, 4 * (1 + i as usize));
        // SAFETY: the window has `count + 1` elements.
        unsafe { put(&mut net, &team, peer, dst, (window, 0), 4, SignalMode::Inc(0, true), None) };
    }
    // SAFETY: the handle is valid.
    unsafe { wait(&mut net, 0, count.into()) };
}

#[test]
fn a_thread_that_fills_a_queue_waits_for_room() {
    // 0 is NCCL's default.
    for depth in [1, 2, 0] {
        let last = simulate(Simulation::new(3), |gpu| {
            let comm = gpu.dev_comm(full().gin_queue_depth(depth))?;
            let out = gpu.window(&[gpu.rank() as u32; 1001])?;
            gpu.launch(posts_many::args(&comm, &out, 1000_u32).grid(1).block(1))?;
            read(&out).map(|out| out[1000])
        });
        assert_eq!(last, [2, 0, 1]);
    }
}
