//! Kernels that test LSA barriers.

use core::mem::MaybeUninit;

use cuda_std::prelude::*;
use devcomm_types::nccl::{LsaBarrierSession, MultimemHandle};
use nccl_device::{BarrierIndex, Coop, DevComm, LsaBarriers, MemoryOrder, Timeout, raw};

use crate::extra::{Extra, Words};

/// Returns the memory order with this number.
fn order(n: u32) -> MemoryOrder {
    match n {
        0 => MemoryOrder::Relaxed,
        2 => MemoryOrder::Acquire,
        3 => MemoryOrder::Release,
        4 => MemoryOrder::AcqRel,
        _ => MemoryOrder::SeqCst,
    }
}

/// Repeats `rounds` times: this rank writes to every peer, calls `sync` (barrier `index` of
/// `coop`), checks what the peers wrote, and calls `sync` again, so that no peer writes before the
/// check. `sync` gets the number of the call, from 0 to `2 * rounds - 1`. Returns the number of
/// errors.
fn exchange(
    comm: &DevComm,
    mail: Words,
    coop: Coop,
    index: u32,
    rounds: u32,
    mut sync: impl FnMut(u32),
) -> u64 {
    let team = comm.lsa_team();
    let (l, row) = (team.n_ranks as u32, (index * team.n_ranks as u32) as usize);
    let mut wrong = 0;
    let mut step = 0;
    // A step has one call of `sync`, and even steps have the writes and the check. So `sync` is
    // called in one place only, and is inlined.
    while step < 2 * rounds {
        let (round, writes) = (step / 2, step.is_multiple_of(2));
        let mut p = coop.thread_rank();
        while writes && p < l {
            let value = round * 100 + team.rank as u32;
            // SAFETY: the window has a row of `l` words for each barrier in use; a word has one
            // writer, and the barriers order the accesses.
            unsafe { mail.lsa(p as i32).store(row + team.rank as usize, value.into()) };
            p += coop.size();
        }
        sync(step);
        let mut p = coop.thread_rank();
        while writes && p < l {
            // SAFETY: the row has a word for each rank; the barrier is between the peer's write and
            // this load.
            let got = unsafe { mail.local().load(row + p as usize) };
            wrong += u64::from(got != u64::from(round * 100 + p));
            p += coop.size();
        }
        step += 1;
    }
    wrong
}

/// Calls `sync` of the block's barrier with the order `n & 7`, in `n >> 3` rounds; a weaker order
/// than acquire-release orders no data, so none is exchanged. Stores the number of errors, one word
/// per thread.
#[kernel]
pub unsafe fn lsa_sync(comm: DevComm, mail: Words, out: Words, _extra: Extra, n: u32) {
    let coop = Coop::cta();
    let mut barrier = comm.lsa_barrier(coop, BarrierIndex::this_block());
    let (orders, rounds) = (n & 7 > 3, n >> 3);
    let mut sync = |_| barrier.sync(order(n & 7));
    let wrong = if orders {
        exchange(&comm, mail, coop, thread::block_idx_x(), rounds, sync)
    } else {
        (0..2 * rounds).for_each(&mut sync);
        0
    };
    // SAFETY: `out` has one word per thread.
    unsafe { out.local().store(thread::index_1d() as usize, wrong) };
}

/// Alternates in `n` rounds between arrive and wait, a dropped arrival (which waits), waits with a
/// timeout, and `sync`.
#[kernel]
pub unsafe fn lsa_split(comm: DevComm, mail: Words, out: Words, _extra: Extra, n: u32) {
    let (coop, order) = (Coop::cta(), MemoryOrder::AcqRel);
    let mut barrier = comm.lsa_barrier(coop, BarrierIndex::this_block());
    let wrong = exchange(&comm, mail, coop, thread::block_idx_x(), n, |i| match i % 5 {
        0 => barrier.arrive(order).wait(order),
        1 => drop(barrier.arrive(order)),
        2 => {
            let in_time = barrier.arrive(order).wait_timeout(order, Timeout::millis(60_000));
            assert!(in_time.is_ok());
        }
        3 => assert!(barrier.sync_timeout(order, Timeout::millis(60_000)).is_ok()),
        _ => barrier.sync(order),
    });
    // SAFETY: `out` has one word per thread.
    unsafe { out.local().store(thread::index_1d() as usize, wrong) };
}

/// Executes one barrier per warp, with warp coops.
#[kernel]
pub unsafe fn lsa_warps(comm: DevComm, mail: Words, out: Words, _extra: Extra, n: u32) {
    let coop = Coop::warp();
    let index = thread::index_1d() / 32;
    let mut barrier = comm.lsa_barrier(coop, BarrierIndex::new(index));
    assert!(barrier.team() == comm.lsa_team());
    let sync = |_| barrier.sync(MemoryOrder::AcqRel);
    let wrong = exchange(&comm, mail, coop, index, n, sync);
    // SAFETY: `out` has one word per thread.
    unsafe { out.local().store(thread::index_1d() as usize, wrong) };
}

/// Uses the kinds of coops that the kernels above do not use, each with its own barrier: thread 3
/// alone, lanes of the first warp, a span of warps.
#[kernel]
pub unsafe fn lsa_coops(comm: DevComm, mail: Words, out: Words, _extra: Extra, n: u32) {
    let t = thread::thread_idx_x();
    let run = |coop: Coop, index: u32| {
        let mut barrier = comm.lsa_barrier(coop, BarrierIndex::new(index));
        exchange(&comm, mail, coop, index, n, |_| barrier.sync(MemoryOrder::AcqRel))
    };
    let mut wrong = 0;
    if t == 3 {
        wrong += run(Coop::thread(), 0);
    }
    if t < 32 && t.is_multiple_of(2) {
        wrong += run(Coop::lanes(0x5555_5555), 1);
    }
    if t >= 32 {
        wrong += run(Coop::warp_span(1, 2, 1), 2);
    }
    // SAFETY: `out` has one word per thread.
    unsafe { out.local().store(t as usize, wrong) };
}

/// Tests arrivals by multicast stores, on additional barriers that the host created.
#[kernel]
pub unsafe fn lsa_multicast(comm: DevComm, mail: Words, out: Words, extra: Extra, n: u32) {
    let (coop, index) = (Coop::cta(), BarrierIndex::this_block());
    let Some(handle) = comm.lsa_multimem() else { return };
    // SAFETY: the barriers and the multicast mapping are those of the LSA team.
    let set = unsafe { LsaBarriers::new(&comm, comm.lsa_team(), extra.lsa).over_multimem(handle) };
    let mut barrier = set.barrier(coop, index);
    let sync = |_| barrier.sync(MemoryOrder::AcqRel);
    let wrong = exchange(&comm, mail, coop, index.get(), n, sync);
    // SAFETY: `out` has one word per thread.
    unsafe { out.local().store(thread::index_1d() as usize, wrong) };
}

/// Alternates between sessions of `nccl_device` and of NCCL (its `raw` functions) on one barrier;
/// opens a session for each sync.
#[kernel]
pub unsafe fn lsa_with_raw(comm: DevComm, mail: Words, out: Words, extra: Extra, n: u32) {
    let (coop, team, index) = (Coop::cta(), comm.lsa_team(), thread::block_idx_x());
    let order = MemoryOrder::AcqRel;
    let raw_sync = || {
        let mut session = MaybeUninit::<LsaBarrierSession>::uninit();
        // SAFETY: the host created the barriers for the LSA team; only this coop uses the session.
        unsafe {
            raw::ncclLsaBarrierSessionInit(
                session.as_mut_ptr(),
                &coop.as_raw(),
                comm.as_raw(),
                &team,
                &extra.lsa,
                index,
                false,
                &MultimemHandle::NULL,
            );
            raw::ncclLsaBarrierSessionSync(session.as_mut_ptr(), &coop.as_raw(), order as i32);
            raw::ncclLsaBarrierSessionDestroy(session.as_mut_ptr());
        }
    };
    // SAFETY: the host created these barriers for this team.
    let set = unsafe { LsaBarriers::new(&comm, team, extra.lsa) };
    let wrong = exchange(&comm, mail, coop, index, n, |i| match i % 3 {
        0 => set.barrier(coop, BarrierIndex::new(index)).sync(order),
        _ => raw_sync(),
    });
    // SAFETY: `out` has one word per thread.
    unsafe { out.local().store(thread::index_1d() as usize, wrong) };
}

/// Sets the epochs of all barriers, which count syncs in 32 bits, to `n` below the largest one, so
/// that they wrap around in the next kernel, which uses the barriers.
#[kernel]
pub unsafe fn lsa_near_the_end(comm: DevComm, _mail: Words, _out: Words, extra: Extra, n: u32) {
    let (barriers, ranks) = (extra.lsa.n_barriers as usize, comm.lsa_team().n_ranks as usize);
    let words = comm.resource_buffer(extra.lsa.buffer).local::<u32>();
    let mut i = thread::thread_idx_x() as usize;
    // NCCL has three words per barrier, and one more for each rank.
    while thread::block_idx_x() == 0 && i < barriers * (3 + ranks) {
        // SAFETY: these are words of the barriers, and no session is open.
        unsafe { words.store(i, u32::MAX - n) };
        i += thread::block_dim_x() as usize;
    }
}

/// Waits for the last rank of the team, which arrives late: the other ranks time out in every
/// thread. Then all ranks sync in `n` rounds. Stores 100 times the number of errors, plus 1 after a
/// timeout.
#[kernel]
pub unsafe fn lsa_late(comm: DevComm, mail: Words, out: Words, _extra: Extra, n: u32) {
    let (team, coop, order) = (comm.lsa_team(), Coop::cta(), MemoryOrder::AcqRel);
    let (t, late) = (thread::thread_idx_x() as usize, team.rank == team.n_ranks - 1);
    let mail_of_late = mail.lsa(team.n_ranks - 1);
    // The index of the first flag, after the words of `exchange`. A rank sets its flag when it has
    // timed out.
    let flags = 64;
    let mut timeouts = 0;
    let mut barrier = comm.lsa_barrier(coop, BarrierIndex::new(0));
    if late {
        // SAFETY: only ordered stores write these words.
        comm.wait_until(coop, || unsafe {
            let mut all = true;
            for p in 0..team.n_ranks - 1 {
                all &= mail.local().load_acquire(flags + p as usize) == 1;
            }
            all
        });
        barrier.sync(order);
    } else {
        timeouts += u64::from(barrier.sync_timeout(order, Timeout::millis(5)).is_err());
        coop.sync();
        if t == 0 {
            // SAFETY: each rank has its own word.
            unsafe { mail_of_late.store_release(flags + team.rank as usize, 1) };
        }
    }
    let wrong = exchange(&comm, mail, coop, 0, n, |_| barrier.sync(order));
    // SAFETY: `out` has one word per thread.
    unsafe { out.local().store(t, wrong * 100 + timeouts) };
}

/// Waits for the first rank of the team, which never arrives. Each thread of the others stores 3
/// words: whether its two waits timed out, and whether they did in all threads of its coop.
#[kernel]
pub unsafe fn lsa_never(comm: DevComm, _mail: Words, out: Words, _extra: Extra, _n: u32) {
    let (team, order) = (comm.lsa_team(), MemoryOrder::AcqRel);
    let t = thread::thread_idx_x();
    if team.rank == 0 {
        return;
    }
    let wait = |coop: Coop, index: u32| {
        let mut barrier = comm.lsa_barrier(coop, BarrierIndex::new(index));
        let first = barrier.sync_timeout(order, Timeout::micros(200)).is_err();
        let second = barrier.arrive(order).wait_timeout(order, Timeout::nanos(1)).is_err();
        // Whether all threads of the coop have timed out.
        let third = !coop.any(!first || !second);
        // SAFETY: `out` has three words per thread.
        unsafe {
            out.local().store(3 * t as usize, first.into());
            out.local().store(3 * t as usize + 1, second.into());
            out.local().store(3 * t as usize + 2, third.into());
        }
    };
    // One call per kind of coop: a constant kind lets the compiler resolve the session's calls.
    if t < 64 {
        wait(Coop::warp_span(0, 2, 0), 0);
    } else {
        wait(Coop::warp(), 1);
    }
}
