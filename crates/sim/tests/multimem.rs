//! Multicast addresses: what is behind them, and what may not be done with them.

mod common;

use core::mem::MaybeUninit;
use core::panic::Location;

use common::*;
use cuda_std::arch::{CTX, MulticastParts};
use cuda_std::prelude::*;
use devcomm_sim::{DevCommConfig, Error, ResourceBuffer, Simulator, TeamMultimem, Waiting};
use nccl_device::raw::{self, LsaBarrierSession, MultimemHandle};
use nccl_device::{DevComm, Window};

/// The copies behind an address, as a `multimem` instruction gets them.
#[track_caller]
fn parts<T>(address: *mut T) -> Vec<*mut T> {
    let context = CTX.get();
    // SAFETY: a kernel runs, and its context with it.
    let ops = unsafe { (*context).ops };
    let at = Location::caller();
    let MulticastParts { first, stride, n } =
        (ops.multimem)(context, address.addr(), size_of::<T>(), at);
    (0..n).map(|i| first.wrapping_add(i * stride).cast()).collect()
}

/// A store to all, and a sum of all, as the instructions do it.
#[track_caller]
fn store_all(address: *mut u32, value: u32) {
    // SAFETY: the simulator found the elements.
    parts(address).into_iter().for_each(|part| unsafe { part.write(value) });
}

#[track_caller]
fn sum(address: *mut u32) -> u32 {
    // SAFETY: the simulator found the elements.
    parts(address).into_iter().map(|part| unsafe { part.read() }).sum()
}

/// Each rank stores its number plus one to all of its LSA team, in a window and in a buffer.
#[kernel]
unsafe fn stores_to_all(comm: DevComm, out: Window<u32>, buffer: u32) {
    let (comm, me) = (comm.as_raw(), comm.rank() as usize);
    // SAFETY: the window has an element a rank and one more, the buffer an element a rank.
    unsafe {
        let all = raw::ncclGetLsaMultimemPointer(handle(&out), 4 * me, comm).cast::<u32>();
        let by_handle = raw::ncclGetMultimemPointer(handle(&out), 4 * me, &comm.lsa_multimem);
        assert_eq!(all, by_handle.cast());
        store_all(all, me as u32 + 1);
        let all = raw::ncclGetResourceBufferLsaMultimemPointer(comm, buffer).cast::<u32>();
        let by_handle = raw::ncclGetResourceBufferMultimemPointer(comm, buffer, &comm.lsa_multimem);
        assert_eq!(all, by_handle.cast());
        store_all(all.wrapping_add(me), me as u32 + 1);
    }
}

/// Notes the sum over its LSA team of the element that its first rank stored.
#[kernel]
unsafe fn sums_all(comm: DevComm, out: Window<u32>, buffer: u32, ranks: usize) {
    let comm = comm.as_raw();
    let first = (comm.rank - comm.lsa_rank) as usize;
    // SAFETY: as above.
    unsafe {
        let all = raw::ncclGetLsaMultimemPointer(handle(&out), 4 * first, comm).cast();
        let again = raw::ncclGetResourceBufferLsaMultimemPointer(comm, buffer).cast::<u32>();
        let total = sum(all) + 1000 * sum(again.wrapping_add(first));
        out.local().store(ranks, total);
    }
}

#[test]
fn a_multicast_address_is_every_members_copy() {
    let sim = Simulator::builder().ranks(6).lsa_ranks(3).build().unwrap();
    let mut config = DevCommConfig { lsa_barriers: 1, lsa_multimem: true, ..Default::default() };
    let key = config.add(ResourceBuffer { bytes: 24, align: 128 });
    let comm = sim.dev_comm(config).unwrap();
    let buffer = comm.rank(0).resource(key);
    // Another window lies before.
    let (_other, out) = (sim.window::<u32>(1000).unwrap(), sim.window::<u32>(7).unwrap());
    (0..6).for_each(|rank| out.write(rank, &[0; 7]).unwrap());
    run(&sim, stores_to_all, 1, 1, |rank| (comm.rank(rank), out.rank(rank), buffer));
    run(&sim, sums_all, 1, 1, |rank| (comm.rank(rank), out.rank(rank), buffer, 6_usize));
    for rank in 0..6 {
        let want = if rank < 3 { [1, 2, 3, 0, 0, 0, 3003] } else { [0, 0, 0, 4, 5, 6, 12012] };
        assert_eq!(out.read(rank), want);
    }
}

/// Stores to all of a team of its own.
#[kernel]
unsafe fn stores_to_team(comm: DevComm, out: Window<u32>, base: u64) {
    let team = MultimemHandle { base: core::ptr::without_provenance_mut(base as usize) };
    let me = comm.rank() as usize;
    // SAFETY: the window has an element a rank.
    let all = unsafe { raw::ncclGetMultimemPointer(handle(&out), 4 * me, &team) };
    store_all(all.cast(), 1);
}

#[test]
fn teams_have_multicast_of_their_own() {
    let sim = Simulator::builder().ranks(8).lsa_ranks(4).build().unwrap();
    let mut config = DevCommConfig { lsa_barriers: 1, ..Default::default() };
    let key = config.add(TeamMultimem { ranks: 2, stride: 2 });
    let comm = sim.dev_comm(config).unwrap();
    let out = sim.window::<u32>(8).unwrap();
    (0..8).for_each(|rank| out.write(rank, &[0; 8]).unwrap());
    let base = |rank: usize| comm.rank(rank).resource(key).base.addr() as u64;
    run(&sim, stores_to_team, 1, 1, |rank| (comm.rank(rank), out.rank(rank), base(rank)));
    for rank in 0..8 {
        let mut want = [0; 8];
        (want[rank], want[rank ^ 2]) = (1, 1);
        assert_eq!(out.read(rank), want, "rank {rank}");
    }
    // The multicast address of a team is not another's.
    let error =
        error_of(&sim, stores_to_team, 1, 1, |rank| (comm.rank(rank), out.rank(rank), base(1)));
    assert!(error.to_string().contains("a multicast group without rank 0"), "{error}");
}

/// Makes one mistake, by number.
#[kernel]
unsafe fn mistakes(comm: DevComm, out: Window<u32>, which: u32) {
    let comm = comm.as_raw();
    // SAFETY: the simulator reports what is wrong.
    unsafe {
        let all = raw::ncclGetLsaMultimemPointer(handle(&out), 0, comm).cast::<u32>();
        match which {
            0 => mem::store(all, 1),
            1 => drop(mem::load(all)),
            2 => drop(sum(out.local().as_ptr())),
            3 => store_all(all.add(2), 1),
            4 => drop(parts(all.add(1).cast::<u64>())),
            _ => all.write_volatile(1),
        }
    }
}

#[test]
fn misuse_of_multicast_addresses_is_reported() {
    let sim = Simulator::new(2).unwrap();
    let out = sim.window::<u32>(2).unwrap();
    let config = DevCommConfig { lsa_barriers: 1, lsa_multimem: true, ..Default::default() };
    let wants = [
        "stores 4 bytes at 0x4",
        "loads 4 bytes at 0x4",
        "is no multicast address",
        "4 bytes at multicast offset 8 of memory of 8 bytes",
        "8 bytes at multicast offset 4 of memory of 8 bytes",
    ];
    for (which, want) in wants.into_iter().enumerate() {
        let comm = sim.dev_comm(config.clone()).unwrap();
        let error =
            error_of(&sim, mistakes, 1, 1, |rank| (comm.rank(rank), out.rank(rank), which as u32));
        assert!(matches!(error, Error::Misuse { .. }), "{error}");
        assert!(error.to_string().contains(want), "{error}");
        assert!(error.to_string().contains("multimem.rs"), "{error}");
    }
    let comm = sim.dev_comm(config).unwrap();
    let error = error_of(&sim, mistakes, 1, 1, |rank| (comm.rank(rank), out.rank(rank), 5_u32));
    assert!(matches!(error, Error::Fault { .. }), "{error}");
    let comm = sim.dev_comm(DevCommConfig { lsa_barriers: 1, ..Default::default() }).unwrap();
    let error = error_of(&sim, mistakes, 1, 1, |rank| (comm.rank(rank), out.rank(rank), 0_u32));
    assert!(error.to_string().contains("no multicast for the team"), "{error}");
}

/// What the ranks do around an LSA barrier over multimem.
#[kernel]
unsafe fn meets_by_multimem(comm: DevComm, out: Window<u32>, rounds: u32, absent: i32) {
    let comm = comm.as_raw();
    let (team, coop) = (comm.lsa_team(), cta());
    let mut session = MaybeUninit::<LsaBarrierSession>::uninit();
    let session = session.as_mut_ptr();
    if comm.rank == absent {
        return;
    }
    // SAFETY: the window has an element a rank.
    unsafe {
        raw::ncclLsaBarrierSessionInit(
            session,
            &coop,
            comm,
            &team,
            &comm.lsa_barrier,
            0,
            true,
            &comm.lsa_multimem,
        );
        for round in 1..=rounds {
            if thread::thread_idx_x() == 0 {
                out.local().store(0, round);
            }
            raw::ncclLsaBarrierSessionSync(session, &coop, ACQ_REL);
            for peer in 0..team.n_ranks {
                assert_eq!(out.lsa(peer).load(0), round);
            }
            raw::ncclLsaBarrierSessionSync(session, &coop, ACQ_REL);
        }
        raw::ncclLsaBarrierSessionDestroy(session);
    }
}

fn multimem() -> DevCommConfig {
    DevCommConfig { lsa_barriers: 1, lsa_multimem: true, ..Default::default() }
}

#[test]
fn an_lsa_barrier_over_multimem_meets_everyone() {
    for seed in 0..50 {
        let sim = Simulator::builder().ranks(6).lsa_ranks(3).seed(seed).build().unwrap();
        let (comm, out) = (sim.dev_comm(multimem()).unwrap(), sim.window::<u32>(1).unwrap());
        for _ in 0..2 {
            let args = |rank: usize| (comm.rank(rank), out.rank(rank), 3_u32, -1);
            let report = run(&sim, meets_by_multimem, 1, 2, args);
            assert!(report.open_sessions.is_empty());
        }
    }
}

#[test]
fn an_lsa_barrier_over_multimem_says_what_it_waits_for() {
    let sim = Simulator::new(3).unwrap();
    let (comm, out) = (sim.dev_comm(multimem()).unwrap(), sim.window::<u32>(1).unwrap());
    let error =
        error_of(&sim, meets_by_multimem, 1, 1, |rank| (comm.rank(rank), out.rank(rank), 1_u32, 2));
    let Error::Deadlock(stall) = error else { panic!("{error}") };
    assert!(stall.waiters.iter().all(|w| matches!(w.what, Waiting::For(_))));
    let comm = sim.dev_comm(DevCommConfig { lsa_multimem: false, ..multimem() }).unwrap();
    let error =
        error_of(&sim, meets_by_multimem, 1, 1, |rank| (comm.rank(rank), out.rank(rank), 1_u32, 2));
    assert!(error.to_string().contains("the multimem handle is NULL"), "{error}");
}
