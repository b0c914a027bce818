//! Kernels that test teams, windows, resource buffers, multicast addresses and polls.

use cuda_std::atomic::{Order, Scope};
use cuda_std::multimem;
use cuda_std::prelude::*;
use cuda_std::reduce::Sum;
use cuda_std::vector::Vec16;
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Timeout};

use crate::extra::{Extra, Words};

/// Stores the device communicator's ranks and teams: 16 words in `out`.
#[kernel]
pub unsafe fn teams(comm: DevComm, _mail: Words, out: Words, _extra: Extra, _n: u32) {
    if thread::thread_idx_x() > 0 {
        return;
    }
    let (world, lsa, rail) = (comm.world_team(), comm.lsa_team(), comm.rail_team());
    let numbers = [
        comm.rank(),
        comm.n_ranks(),
        world.n_ranks,
        world.rank,
        world.stride,
        lsa.n_ranks,
        lsa.rank,
        lsa.stride,
        rail.n_ranks,
        rail.rank,
        rail.stride,
        comm.lsa_team_index(),
        comm.n_lsa_barriers() as i32,
        lsa.to_world(comm.rank(), 0),
        i32::from(comm.is_aborted()),
        i32::from(comm.lsa_multimem().is_some()),
    ];
    for (i, number) in numbers.into_iter().enumerate() {
        // SAFETY: `out` has 16 words, and one thread stores them.
        unsafe { out.local().store(i, number as u64) };
    }
}

/// Accesses windows: thread `t`, for each rank `t` of the LSA team, writes and reads rows of
/// `mail`, of one word per rank, by every kind of peer address.
#[kernel]
pub unsafe fn windows(comm: DevComm, mail: Words, out: Words, _extra: Extra, _n: u32) {
    let (world, lsa) = (comm.world_team(), comm.lsa_team());
    let (me, l) = (lsa.rank as usize, lsa.n_ranks as usize);
    let t = thread::thread_idx_x() as usize;
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire);
    if t < l {
        let peer = t as i32;
        let in_world = lsa.to_world(comm.rank(), peer);
        let name = comm.rank() as u64;
        // SAFETY: four rows in each rank's memory; a word is written by one rank between two
        // barriers.
        unsafe {
            mail.lsa(peer).store(me, name);
            mail.peer(world, in_world).store(l + me, 100 + name);
            mail.peer(lsa, peer).store(2 * l + me, 200 + name);
            mail.local().store(3 * l + t, 300 + 10 * name + t as u64);
        }
    }
    barrier.sync(MemoryOrder::AcqRel);
    if t < l {
        let peer = t as i32;
        let in_world = lsa.to_world(comm.rank(), peer);
        // SAFETY: no rank writes the rows after the barrier.
        unsafe {
            let own = out.local();
            own.store(t, mail.local().load(t));
            own.store(l + t, mail.local().load(l + t));
            own.store(2 * l + t, mail.lsa(comm.lsa_team().rank).load(2 * l + t));
            own.store(3 * l + t, mail.lsa(peer).load(3 * l + me));
            own.store(4 * l + t, mail.peer(world, in_world).load(3 * l + me));
            own.store(5 * l + t, mail.peer(lsa, peer).load(3 * l + me));
        }
    }
    barrier.sync(MemoryOrder::Release);
}

/// Copies in each thread a 16-byte vector to the right neighbor.
#[kernel]
pub unsafe fn vectors(comm: DevComm, mail: Words, out: Words, _extra: Extra, _n: u32) {
    let lsa = comm.lsa_team();
    let t = thread::thread_idx_x() as usize;
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire);
    let right = (lsa.rank + 1) % lsa.n_ranks;
    // SAFETY: both windows have two elements per thread.
    unsafe { out.lsa(right).store_vec(2 * t, mail.local().load_vec(2 * t)) };
    barrier.sync(MemoryOrder::AcqRel);
    // SAFETY: both windows have two elements per thread, which the neighbor has written.
    unsafe {
        let got: Vec16<u64> = out.local().load_vec(2 * t);
        out.local().store(2 * t, got.lane(0) + 1);
    }
    barrier.sync(MemoryOrder::Release);
}

/// Exchanges in `n` rounds: each rank stores data and then a flag (a release store) to its right
/// neighbor in the LSA team, which waits by acquire loads and answers with a second flag.
#[kernel]
pub unsafe fn flags(comm: DevComm, mail: Words, out: Words, _extra: Extra, n: u32) {
    let (lsa, coop) = (comm.lsa_team(), Coop::cta());
    let t = thread::thread_idx_x() as usize;
    let right = mail.lsa((lsa.rank + 1) % lsa.n_ranks);
    let left = mail.lsa((lsa.rank + lsa.n_ranks - 1) % lsa.n_ranks);
    let mut wrong = 0;
    let mut round = 1;
    while round <= u64::from(n) {
        // SAFETY: words 0 and 1 are flags, written only by ordered stores; the flags order the
        // accesses to the others.
        unsafe {
            right.store(2 + t, round * 1000 + t as u64);
            coop.sync();
            if t == 0 {
                right.store_release(0, round);
            }
            comm.wait_until(coop, || mail.local().load_acquire(0) == round);
            wrong += u64::from(mail.local().load(2 + t) != round * 1000 + t as u64);
            coop.sync();
            if t == 0 {
                left.store_release(1, round);
            }
            comm.wait_until(coop, || mail.local().load_acquire(1) == round);
        }
        round += 1;
    }
    // SAFETY: `out` has one word per thread.
    unsafe { out.local().store(t, wrong) };
}

/// Reads a zeroed resource buffer of `n` words, then writes to it by every kind of peer address.
#[kernel]
pub unsafe fn resources(comm: DevComm, _mail: Words, out: Words, extra: Extra, n: u32) {
    let (world, lsa) = (comm.world_team(), comm.lsa_team());
    let buffer = comm.resource_buffer(extra.buffer);
    let (t, me) = (thread::thread_idx_x(), lsa.rank as usize);
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    let mut sum = 0;
    let mut i = t;
    while i < n {
        // SAFETY: the buffer has `n` words, which no rank has written yet.
        sum |= unsafe { buffer.local::<u64>().load(i as usize) };
        i += thread::block_dim_x();
    }
    barrier.sync(MemoryOrder::AcqRel);
    if t < lsa.n_ranks as u32 {
        let (name, last) = (comm.rank() as u64, n as usize - 1);
        let peer = t as i32;
        // SAFETY: each of the words has one writer: two words per rank, and the last word.
        unsafe {
            buffer.lsa::<u64>(peer).store(me, name + 1);
            let in_world = lsa.to_world(comm.rank(), peer);
            buffer.peer::<u64>(world, in_world).store(lsa.n_ranks as usize + me, name + 2);
            if peer == lsa.rank {
                buffer.local::<u64>().store(last, name + 3);
            }
        }
    }
    barrier.sync(MemoryOrder::AcqRel);
    if t < lsa.n_ranks as u32 {
        let (t, l, own) = (t as usize, lsa.n_ranks as usize, out.local());
        // SAFETY: `out` has five rows of `l` words; no rank writes the buffer after the barrier.
        unsafe {
            own.store(t, buffer.local::<u64>().load(t));
            own.store(l + t, buffer.local::<u64>().load(l + t));
            own.store(2 * l + t, buffer.lsa::<u64>(t as i32).load(n as usize - 1));
            own.store(3 * l + t, sum);
            own.store(4 * l + t, (buffer.byte_offset() % 128) as u64);
        }
    }
    barrier.sync(MemoryOrder::Release);
}

/// Adds, in each rank, to words of a window and of a resource buffer in all ranks, by multicast
/// addresses.
#[kernel]
pub unsafe fn multicast(comm: DevComm, mail: Words, out: Words, extra: Extra, _n: u32) {
    let Some(handle) = comm.lsa_multimem() else { return };
    let buffer = comm.resource_buffer(extra.buffer);
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire);
    if thread::thread_idx_x() == 0 {
        let one = 1_u64 << (8 * comm.lsa_team().rank);
        let addresses = [
            mail.multimem(&comm),
            mail.multimem_of(handle).wrapping_add(1),
            buffer.multimem(),
            buffer.multimem_of::<u64>(handle).wrapping_add(1),
        ];
        for address in addresses {
            // SAFETY: this is the multicast address of a word to which the ranks only add.
            unsafe { multimem::red(Sum, address, one, Order::Relaxed, Scope::Sys) };
        }
    }
    barrier.sync(MemoryOrder::AcqRel);
    if thread::thread_idx_x() == 0 {
        // SAFETY: no rank adds after the barrier.
        unsafe {
            out.local().store(0, mail.local().load(0));
            out.local().store(1, mail.local().load(1));
            out.local().store(2, buffer.local::<u64>().load(0));
            out.local().store(3, buffer.local::<u64>().load(1));
        }
    }
    barrier.sync(MemoryOrder::Release);
}

/// Polls a word that no thread writes, until the timeout; then polls a word that one thread writes.
/// Stores which polls timed out, as bits, one word per thread; `n` selects the coop.
#[kernel]
pub unsafe fn polls(comm: DevComm, mail: Words, out: Words, _extra: Extra, n: u32) {
    let coop = if n == 0 { Coop::cta() } else { Coop::warp() };
    // SAFETY: only ordered stores write these words.
    let is_set = |word: usize| unsafe { mail.local().load_acquire(word) } != 0;
    let never = comm.wait_until_timeout(coop, Timeout::micros(100), || is_set(0));
    if thread::thread_idx_x() == thread::block_dim_x() - 1 {
        // SAFETY: the window has the word, which has ordered accesses only.
        unsafe { mail.local().store_release(1, 1) };
    }
    let at_last = comm.wait_until_timeout(coop, Timeout::millis(60_000), || is_set(1));
    let bits = u64::from(never.is_err()) | u64::from(at_last.is_err()) << 1;
    // SAFETY: `out` has one word per thread.
    unsafe { out.local().store(thread::thread_idx_x() as usize, bits) };
}
