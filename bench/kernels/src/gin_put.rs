//! Ping-pong over the network (GIN's PROXY back end) between two neighbouring ranks. Each message
//! is a put with a signal.

use cuda_std::prelude::*;
use nccl_device::gin::Proxy;
use nccl_device::{Coop, DevComm, MemoryOrder, Window};

/// Makes `rounds` round trips: the even rank puts the first `bytes` bytes of its `send` to the odd
/// rank's `recv`, then the odd rank does the same to the even rank. Uses signal 0, whose shadow
/// counts the messages received by all launches.
///
/// Grid: one block. Block: one warp.
///
/// # Safety
///
/// Both windows have `bytes` bytes in every rank, every rank passes the same `bytes` and `rounds`,
/// nothing else accesses the windows or the signal until the kernel has ended in every rank, and
/// the GIN type of the device communicator is PROXY.
#[kernel]
pub unsafe fn gin_put(
    comm: DevComm,
    send: Window<u8>,
    recv: Window<u8>,
    bytes: usize,
    rounds: u32,
) {
    let (world, warp) = (comm.world_team(), Coop::warp());
    let peer = world.rank ^ 1;
    if peer >= world.n_ranks {
        return;
    }
    let gin = comm.gin::<Proxy>(0);
    let arrived = comm.signal(0);
    // The even rank puts in the even rounds, and the odd rank in the odd ones.
    let is_even = world.rank % 2 == 0;
    for round in 0..2 * rounds {
        if is_even == (round % 2 == 0) {
            // SAFETY: the caller passes windows of `bytes` bytes; a rank puts only after it has
            // received the previous message.
            let put = unsafe { gin.put(world, peer, recv.at(0), send.at(0), bytes) };
            put.signal(arrived.inc().weak()).post(warp);
        } else {
            if warp.thread_rank() == 0 {
                gin.expect(arrived, 1);
            }
            // It begins with a barrier, after which all lanes see the new shadow.
            gin.wait_signal_meets_shadow(warp, arrived, MemoryOrder::Acquire);
        }
    }
    gin.flush(warp, MemoryOrder::Acquire);
}
