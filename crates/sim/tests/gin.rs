//! The network of kernels: what arrives when, what completes when, and what is refused.

mod common;

use core::mem::MaybeUninit;
use core::ptr::null_mut;

use common::*;
use cuda_std::prelude::*;
use devcomm_sim::{DevCommConfig, Simulator};
use nccl_device::raw::{self, GinRequest};
use nccl_device::{DevComm, Window};

/// Two ranks send a number back and forth, each adding one.
#[kernel]
unsafe fn ping_pong(comm: DevComm, out: Window<u64>, rounds: u64) {
    let comm = comm.as_raw();
    let (team, me) = (comm.world_team(), comm.rank);
    let peer = 1 - me;
    let (mut net, window) = (gin(comm, 0), handle(&out));
    // SAFETY: element 0 is sent, element 1 received; the signal orders them.
    unsafe {
        for round in 1..=rounds {
            if (round % 2 == 1) == (me == 0) {
                let value = if round == 1 { 0 } else { out.local().load(1) };
                out.local().store(0, value + 1);
                put(&mut net, &team, peer, (window, 8), (window, 0), 8, Then::Inc(0, true), None);
                flush(&mut net);
            } else {
                wait(&mut net, 0, round.div_ceil(2) - u64::from(me == 0 && round % 2 == 1));
            }
        }
    }
}

#[test]
fn a_ping_pong_counts_right_in_a_thousand_orders() {
    for seed in 0..1000 {
        let sim = Simulator::builder().ranks(2).seed(seed).build().unwrap();
        let (comm, out) = (sim.dev_comm(full()).unwrap(), sim.window::<u64>(2).unwrap());
        run(&sim, ping_pong, 1, 1, |rank| (comm.rank(rank), out.rank(rank), 10_u64));
        assert_eq!(out.read(0)[1], 10, "seed {seed}");
    }
}

#[test]
fn a_ping_pong_counts_right_however_threads_run() {
    let builder = || Simulator::builder().ranks(2);
    for builder in [builder(), builder().watch(false), builder().preempt(true).seed(5)] {
        let sim = builder.build().unwrap();
        let (comm, out) = (sim.dev_comm(full()).unwrap(), sim.window::<u64>(2).unwrap());
        for _ in 0..2 {
            // The rounds of the next launch count on: its signals are reset.
            run(&sim, resets_signal, 1, 1, |rank| (comm.rank(rank),));
            run(&sim, ping_pong, 1, 1, |rank| (comm.rank(rank), out.rank(rank), 100_u64));
            assert_eq!(out.read(0)[1], 100);
        }
    }
}

#[kernel]
unsafe fn resets_signal(comm: DevComm) {
    // SAFETY: a handle; nothing is under way.
    unsafe { raw::ncclGinResetSignal(&mut gin(comm.as_raw(), 0), 0) };
}

/// Every rank puts a block of numbers to every rank, each block's threads to the peers in turn, and waits for all.
#[kernel]
unsafe fn all_to_all(comm: DevComm, send: Window<u32>, recv: Window<u32>, count: usize) {
    let comm = comm.as_raw();
    let (team, me, ranks) = (comm.world_team(), comm.rank as usize, comm.n_ranks as usize);
    let context = thread::block_idx_x() % comm.gin_context_count;
    let (mut net, bytes) = (gin(comm, context), count * 4);
    // SAFETY: each rank has a place for every rank's numbers.
    unsafe {
        let mut peer = thread::index_1d() as usize;
        while peer < ranks {
            let (dst, src) = ((handle(&recv), me * bytes), (handle(&send), peer * bytes));
            put(
                &mut net,
                &team,
                peer as i32,
                dst,
                src,
                bytes,
                Then::Inc(1, peer.is_multiple_of(2)),
                None,
            );
            peer += (thread::grid_dim_x() * thread::block_dim_x()) as usize;
        }
        raw::ncclGinFlush(&mut net, &cta(), ACQ_REL);
    }
}

#[test]
fn an_all_to_all_is_complete_in_a_thousand_orders() {
    for seed in 0..1000 {
        let sim = Simulator::builder().ranks(4).lsa_ranks(2).seed(seed).build().unwrap();
        let comm = sim.dev_comm(full()).unwrap();
        let (send, recv) = (sim.window::<u32>(4 * 3).unwrap(), sim.window::<u32>(4 * 3).unwrap());
        for rank in 0..4 {
            let data: Vec<u32> = (0..12).map(|i| rank as u32 * 100 + i).collect();
            send.write(rank, &data).unwrap();
        }
        run(&sim, all_to_all, 2, 2, |rank| {
            (comm.rank(rank), send.rank(rank), recv.rank(rank), 3_usize)
        });
        for rank in 0..4_u32 {
            let want: Vec<u32> =
                (0..4).flat_map(|from| (0..3).map(move |i| from * 100 + rank * 3 + i)).collect();
            assert_eq!(recv.read(rank as usize), want, "seed {seed} rank {rank}");
        }
    }
}

/// Rank 0 puts element 0 to elements 0 and 1 of rank 1: first without a signal, then with one. Rank 1 notes what it sees then.
#[kernel]
unsafe fn two_puts(comm: DevComm, out: Window<u32>, seen: Window<u32>, strong: bool) {
    let comm = comm.as_raw();
    let (team, mut net, window) = (comm.world_team(), gin(comm, 0), handle(&out));
    // SAFETY: the windows have two elements.
    unsafe {
        if comm.rank == 0 {
            put(&mut net, &team, 1, (window, 0), (window, 0), 4, Then::Nothing, None);
            put(&mut net, &team, 1, (window, 4), (window, 0), 4, Then::Inc(3, strong), None);
            return;
        }
        wait(&mut net, 3, 1);
        seen.local().store(0, out.local().load(0));
        seen.local().store(1, out.local().load(1));
    }
}

/// What rank 1 saw of two puts, by seed.
fn seen_of_two_puts(seed: Option<u64>, strong: bool) -> Vec<u32> {
    let builder = Simulator::builder().ranks(2);
    let sim = seed.map_or(builder, |seed| builder.seed(seed)).build().unwrap();
    let comm = sim.dev_comm(full()).unwrap();
    let (out, seen) = (sim.window::<u32>(2).unwrap(), sim.window::<u32>(2).unwrap());
    out.write(0, &[7, 7]).unwrap();
    out.write(1, &[0, 0]).unwrap();
    run(&sim, two_puts, 1, 1, |rank| (comm.rank(rank), out.rank(rank), seen.rank(rank), strong));
    // Both have arrived when the launch is over.
    assert_eq!(out.read(1), [7, 7]);
    seen.read(1)
}

#[test]
fn a_strong_signal_comes_after_all_puts_before_it() {
    assert_eq!(seen_of_two_puts(None, true), [7, 7]);
    assert!((0..200).all(|seed| seen_of_two_puts(Some(seed), true) == [7, 7]));
}

#[test]
fn a_weak_signal_promises_its_own_put_only() {
    let seen: Vec<_> = (0..200).map(|seed| seen_of_two_puts(Some(seed), false)).collect();
    assert!(seen.iter().all(|seen| seen[1] == 7));
    assert!(seen.iter().any(|seen| seen[0] == 0), "the first put always came first");
    assert!(seen.iter().any(|seen| seen[0] == 7), "the first put never came first");
}

/// Rank 0 overwrites what it puts, after a flush or not.
#[kernel]
unsafe fn overwrites(comm: DevComm, out: Window<u32>, flushes: bool) {
    let comm = comm.as_raw();
    let (team, mut net, window) = (comm.world_team(), gin(comm, 0), handle(&out));
    // SAFETY: the window has two elements.
    unsafe {
        if comm.rank == 0 {
            out.local().store(0, 1);
            put(&mut net, &team, 1, (window, 4), (window, 0), 4, Then::Inc(0, true), None);
            if flushes {
                flush(&mut net);
            }
            out.local().store(0, 2);
        } else {
            wait(&mut net, 0, 1);
        }
    }
}

#[test]
fn a_source_is_read_when_the_network_comes_to_it_and_not_after_a_flush() {
    let got = |flushes: bool, seed: Option<u64>| {
        let builder = Simulator::builder().ranks(2);
        let sim = seed.map_or(builder, |seed| builder.seed(seed)).build().unwrap();
        let (comm, out) = (sim.dev_comm(full()).unwrap(), sim.window::<u32>(2).unwrap());
        run(&sim, overwrites, 1, 1, |rank| (comm.rank(rank), out.rank(rank), flushes));
        out.read(1)[1]
    };
    assert_eq!((got(true, None), got(false, None)), (1, 2));
    assert!((0..50).all(|seed| got(true, Some(seed)) == 1));
}

/// Rank 0 flushes a put, and tells rank 1 by a plain store, which is wrong.
#[kernel]
unsafe fn takes_a_flush_for_delivery(comm: DevComm, out: Window<u32>, flag: Window<u32>) {
    let comm = comm.as_raw();
    let (team, mut net, window) = (comm.world_team(), gin(comm, 0), handle(&out));
    // SAFETY: the windows have two elements.
    unsafe {
        if comm.rank == 0 {
            out.local().store(0, 1);
            put(&mut net, &team, 1, (window, 4), (window, 0), 4, Then::Nothing, None);
            flush(&mut net);
            mem::store_volatile(flag.lsa(1).as_ptr(), 1);
        } else {
            while mem::load_volatile(flag.local().as_ptr()) == 0 {}
            let seen = out.local().load(1);
            out.local().store(0, seen);
        }
    }
}

#[test]
fn a_flush_is_no_delivery() {
    let early = (0..200).filter(|seed| {
        let sim = Simulator::builder().ranks(2).seed(*seed).build().unwrap();
        let comm = sim.dev_comm(full()).unwrap();
        let (out, flag) = (sim.window::<u32>(2).unwrap(), sim.window::<u32>(1).unwrap());
        out.write(1, &[9, 9]).unwrap();
        flag.write(1, &[0]).unwrap();
        let args = |rank: usize| (comm.rank(rank), out.rank(rank), flag.rank(rank));
        run(&sim, takes_a_flush_for_delivery, 1, 1, args);
        let [seen, in_the_end] = out.read(1)[..] else { panic!("two elements") };
        assert_eq!(in_the_end, 1);
        seen == 9
    });
    assert!(early.count() > 0, "a flush always delivered");
}

/// Rank 0 gets from rank 1, and notes the element before and after it waited; in the end the counter's values.
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
            put(&mut net, &team, 1, (window, 56), (window, 0), 8, Then::Nothing, Some(2));
        }
        let early = raw::ncclGinReadCounter(&mut net, 2, 56, RELAXED);
        local.store(3, u64::from(early <= 3));
        raw::ncclGinWaitCounter(&mut net, &one, 2, 3, 56, ACQ_REL);
        local.store(4, raw::ncclGinReadCounter(&mut net, 2, 56, RELAXED));
        raw::ncclGinResetCounter(&mut net, 2);
        local.store(5, raw::ncclGinReadCounter(&mut net, 2, 56, RELAXED));
    }
}

#[test]
fn gets_are_there_after_a_flush_and_counters_count_puts() {
    for by_request in [false, true] {
        let sim = Simulator::new(2).unwrap();
        let (comm, out) = (sim.dev_comm(full()).unwrap(), sim.window::<u64>(8).unwrap());
        out.write(0, &[5; 8]).unwrap();
        out.write(1, &[6; 8]).unwrap();
        run(&sim, gets_and_counts, 1, 1, |rank| (comm.rank(rank), out.rank(rank), by_request));
        assert_eq!(out.read(0)[..6], [6, 5, 6, 1, 3, 0]);
    }
}

/// Rank 0 puts values of every size and signals in windows and by number; rank 1 waits for all and notes them.
#[kernel]
unsafe fn signals_of_all_kinds(comm: DevComm, out: Window<u64>) {
    let comm = comm.as_raw();
    let (team, mut net, window) = (comm.world_team(), gin(comm, 0), handle(&out));
    let (one, local) = (thread_coop(), out.local());
    // SAFETY: the window has sixteen elements.
    unsafe {
        if comm.rank == 0 {
            for (i, size) in [1, 2, 4, 8].into_iter().enumerate() {
                raw::ncclGinPutValue(
                    &mut net,
                    &team,
                    1,
                    window,
                    i * 8,
                    0x1122_3344_5566_7788,
                    size,
                    true,
                    1,
                    ADD,
                    10,
                    &one,
                    false,
                    null_mut(),
                    THREAD,
                    SYSTEM,
                );
            }
            signal(&mut net, &team, 1, Then::AddTo(1, 2));
            signal(&mut net, &team, 1, Then::IncVa((window, 64), true));
            put(
                &mut net,
                &team,
                1,
                (window, 32),
                (window, 0),
                8,
                Then::IncVa((window, 64), false),
                None,
            );
            raw::ncclGinSignal(
                &mut net,
                &team,
                1,
                true,
                2,
                INC,
                0,
                &one,
                false,
                null_mut(),
                THREAD,
                SYSTEM,
            );
            return;
        }
        wait(&mut net, 1, 42);
        local.store(9, raw::ncclGinReadSignal(&mut net, 1, 64, ACQ_REL));
        local.store(10, raw::ncclGinReadSignal(&mut net, 1, 3, ACQ_REL));
        raw::ncclGinWaitSignalVA(&mut net, &one, window, 64, 2, 64, ACQ_REL);
        local.store(11, raw::ncclGinReadSignalVA(&mut net, window, 64, 64, ACQ_REL));
        wait(&mut net, 2, 1);
        raw::ncclGinResetSignal(&mut net, 1);
        raw::ncclGinResetSignalVA(&mut net, window, 64);
        local.store(12, raw::ncclGinReadSignal(&mut net, 1, 64, ACQ_REL));
        // Another context has signals of its own.
        let mut other = gin(comm, 1);
        local.store(13, raw::ncclGinReadSignal(&mut other, 2, 64, ACQ_REL));
        local.store(14, raw::ncclGinReadSignal(&mut net, 2, 64, ACQ_REL));
    }
}

#[test]
fn values_and_signals_of_every_kind_arrive() {
    for seed in 0..20 {
        let sim = Simulator::builder().ranks(2).seed(seed).build().unwrap();
        let (comm, out) = (sim.dev_comm(full()).unwrap(), sim.window::<u64>(16).unwrap());
        out.write(0, &[77; 16]).unwrap();
        out.write(1, &[0; 16]).unwrap();
        run(&sim, signals_of_all_kinds, 1, 1, |rank| (comm.rank(rank), out.rank(rank)));
        let got = out.read(1);
        assert_eq!(got[..5], [0x88, 0x7788, 0x5566_7788, 0x1122_3344_5566_7788, 77]);
        assert_eq!(got[8..15], [0, 42, 2, 2, 0, 0, 1]);
    }
}

/// Shadows: rank 1 expects what rank 0 sends.
#[kernel]
unsafe fn follows_shadows(comm: DevComm, out: Window<u64>) {
    let comm = comm.as_raw();
    let (team, mut net, local) = (comm.world_team(), gin(comm, 2), out.local());
    // SAFETY: the window has eight elements.
    unsafe {
        if comm.rank == 0 {
            if thread::thread_idx_x() == 0 {
                (0..5).for_each(|_| signal(&mut net, &team, 1, Then::Inc(4, true)));
            }
            return;
        }
        let coop = cta();
        let shadow = raw::ncclGinGetSignalShadowPtr(&mut net, 4);
        if thread::thread_idx_x() == 0 {
            raw::ncclGinIncreaseSignalShadow(&mut net, 4, 2);
        }
        raw::ncclGinWaitSignalMeetShadow(&mut net, &coop, 4, 64, ACQ_REL);
        let (mut before, mut delta) = (0, 0);
        raw::ncclGinWaitSignalFollowShadow(
            &mut net,
            &coop,
            4,
            3,
            &mut before,
            &mut delta,
            64,
            ACQ_REL,
        );
        // Every thread gets them.
        let at = 2 * thread::thread_idx_x() as usize;
        local.store(at, before);
        local.store(at + 1, delta);
        thread::sync_threads();
        if thread::thread_idx_x() == 0 {
            local.store(4, mem::load(shadow));
            raw::ncclGinResetSignal(&mut net, 4);
            local.store(5, mem::load(shadow));
            local.store(6, raw::ncclGinReadSignal(&mut net, 4, 64, ACQ_REL));
        }
    }
}

#[test]
fn shadows_are_met_and_followed_by_every_thread() {
    for seed in 0..50 {
        let sim = Simulator::builder().ranks(2).seed(seed).build().unwrap();
        let (comm, out) = (sim.dev_comm(full()).unwrap(), sim.window::<u64>(8).unwrap());
        run(&sim, follows_shadows, 1, 2, |rank| (comm.rank(rank), out.rank(rank)));
        assert_eq!(out.read(1)[..7], [2, 3, 2, 3, 5, 0, 0], "seed {seed}");
    }
}

/// Posts `count` puts and flushes.
#[kernel]
unsafe fn posts_many(comm: DevComm, out: Window<u32>, count: u32) {
    let comm = comm.as_raw();
    let (team, mut net, window) = (comm.world_team(), gin(comm, 0), handle(&out));
    let peer = (comm.rank + 1) % comm.n_ranks;
    for i in 0..count {
        let dst = (window, 4 * (1 + i as usize));
        // SAFETY: the window has an element more than `count`.
        unsafe { put(&mut net, &team, peer, dst, (window, 0), 4, Then::Inc(0, true), None) };
    }
    // SAFETY: a handle.
    unsafe { wait(&mut net, 0, count.into()) };
}

#[test]
fn whoever_fills_a_queue_waits_for_room() {
    for depth in [1, 2, 0] {
        let sim = Simulator::new(3).unwrap();
        let comm = sim.dev_comm(DevCommConfig { gin_queue_depth: depth, ..full() }).unwrap();
        let out = sim.window::<u32>(1001).unwrap();
        (0..3).for_each(|rank| out.write(rank, &[rank as u32]).unwrap());
        run(&sim, posts_many, 1, 1, |rank| (comm.rank(rank), out.rank(rank), 1000_u32));
        (0..3).for_each(|rank| assert_eq!(out.read(rank)[1000], (rank as u32 + 2) % 3));
    }
}
