//! Ping-pong over the network: puts whose signals say that their data has arrived, thrown from
//! kernel to kernel with no host between.

use cuda_std::clock;
use cuda_std::mem;
use cuda_std::prelude::*;
use nccl_device::gin::GinBackend;
use nccl_device::{Coop, DevComm, MemoryOrder, Window};

/// `rounds` times, each even rank throws `count` bytes to the odd rank behind it, which throws them
/// back: in the end `recv` of both is `send` of the even one. A last even rank has no partner and
/// does nothing.
///
/// Each block exchanges on its own, on a context of its own while there are enough, with the bytes
/// from `block * rounds * count` on, of which it throws `count` a round. `nanos[block * rounds +
/// round]` of the even rank becomes the time of that round trip.
///
/// Grid: any, up to the signals that the host reserved, the same in every rank. Block: any,
/// one-dimensional.
///
/// # Safety
///
/// Both windows have at least `grid * rounds * count` bytes in every rank, `nanos` has `grid *
/// rounds` numbers in this rank, and nothing else touches them until the kernel has ended in every
/// rank. Ranks that play are connected: with FULL connections all are.
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
    let (partner, serves) = (world.rank ^ 1, world.rank % 2 == 0);
    if partner >= world.n_ranks {
        return;
    }
    let gin = comm.gin::<B>(block % comm.n_gin_contexts().max(1));
    let arrived = comm.signal(block);
    // What has come before this launch. The signal itself may be raised by a partner that is ahead;
    // its shadow is this rank's own.
    let before = gin.signal_shadow(arrived);
    let mut round = 0;
    while round < rounds {
        let throw = block as usize * rounds as usize + round as usize;
        let ball = recv.at(throw * count);
        let start = clock::globaltimer();
        if serves {
            // SAFETY: the kernel's contract; each throw has bytes of its own.
            let put = unsafe { gin.put(world, partner, ball, send.at(throw * count), count) };
            put.signal(arrived.inc().weak()).post(coop);
        }
        gin.wait_signal(coop, arrived, before + u64::from(round) + 1, MemoryOrder::Acquire);
        if serves && coop.thread_rank() == 0 {
            // SAFETY: the kernel's contract.
            unsafe { mem::store(nanos.add(throw), clock::globaltimer() - start) };
        }
        if !serves {
            // SAFETY: as above; what has come lies still.
            let put = unsafe { gin.put(world, partner, ball, ball, count) };
            put.signal(arrived.inc().weak()).post(coop);
        }
        round += 1;
    }
    if coop.thread_rank() == 0 {
        gin.expect(arrived, rounds.into());
    }
    gin.flush(coop, MemoryOrder::Relaxed);
}
