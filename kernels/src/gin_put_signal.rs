//! Ping-pong over the network (GIN) between the kernels of two ranks: each put increments a signal
//! when its data has arrived.

use cuda_std::clock;

use crate::prelude::*;

/// Puts bytes to and fro `rounds` times: each even rank puts `count` bytes to the next odd rank,
/// which puts them back. In the end `recv` of both equals `send` of the even rank. A last even rank
/// without a partner does nothing.
///
/// Each block exchanges its own bytes, from `block * rounds * count` on, `count` per round. Block
/// `b` uses GIN context `b % n_gin_contexts`. The even rank stores the nanoseconds of a round trip
/// to `nanos[block * rounds + round]`.
///
/// Grid: any, up to the signals that the host reserved, the same in every rank. Block: any,
/// one-dimensional.
///
/// # Safety
///
/// Both windows have at least `grid * rounds * count` bytes in every rank, `nanos` has `grid *
/// rounds` numbers in this rank, and nothing else accesses them until the kernel has ended in every
/// rank. Partners have a GIN connection (FULL connects all ranks).
#[kernel(B = gin)]
pub unsafe fn gin_put_signal<B: GinBackend>(
    comm: DevComm,
    send: Window<u8>,
    recv: Window<u8>,
    count: usize,
    rounds: u32,
    nanos: *mut u64,
) {
    let (world, coop, block) = (comm.world_team(), Coop::cta(), thread::block_idx_x());
    let (partner, is_even) = (world.rank ^ 1, world.rank % 2 == 0);
    if partner >= world.n_ranks {
        return;
    }
    let gin = comm.gin::<B>(block % comm.n_gin_contexts().max(1)); // `gin` traps without contexts.
    let arrived = comm.signal(block);
    // The signal's value before this launch. A partner that is ahead may already have incremented
    // the signal itself; only this rank changes the shadow.
    let before = gin.signal_shadow(arrived);
    for round in 0..rounds {
        let index = block as usize * rounds as usize + round as usize;
        let target = recv.at(index * count);
        let start = clock::globaltimer();
        if is_even {
            // SAFETY: the kernel's caller guarantees the windows; each put has its own bytes.
            let put = unsafe { gin.put(world, partner, target, send.at(index * count), count) };
            put.signal(arrived.inc().weak()).post(coop);
        }
        gin.wait_signal(coop, arrived, before + u64::from(round) + 1, MemoryOrder::Acquire);
        if is_even && coop.thread_rank() == 0 {
            // SAFETY: the kernel's caller guarantees a number for each block and round.
            unsafe { mem::store(nanos.add(index), clock::globaltimer() - start) };
        }
        if !is_even {
            // SAFETY: the windows are as above; the partner does not write these bytes again.
            let put = unsafe { gin.put(world, partner, target, target, count) };
            put.signal(arrived.inc().weak()).post(coop);
        }
    }
    if coop.thread_rank() == 0 {
        gin.expect(arrived, rounds.into());
    }
    gin.flush(coop, MemoryOrder::Relaxed); // After this the puts have read their sources.
}
