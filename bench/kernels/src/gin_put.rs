//! Ping-pong over the network between two neighbouring ranks, each message a put with a signal, by
//! the PROXY back end.

use cuda_std::prelude::*;
use nccl_device::gin::Proxy;
use nccl_device::{Coop, DevComm, MemoryOrder, Window};

/// `rounds` round trips: the first `bytes` of the even rank's `send` to the odd rank's `recv`, then
/// the other way round. Uses signal 0, whose shadow counts the received messages, across launches
/// too.
///
/// Grid: one block. Block: one warp.
///
/// # Safety
///
/// Both windows have `bytes` bytes in every rank, every rank passes the same numbers, nothing else
/// touches the windows or the signal until the kernel has ended in every rank, and the device
/// communicator's GIN is PROXY.
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
    let first = world.rank % 2 == 0;
    for round in 0..2 * rounds {
        if first == (round % 2 == 0) {
            // SAFETY: the contract; a rank puts only after it has received the previous message.
            let put = unsafe { gin.put(world, peer, recv.at(0), send.at(0), bytes) };
            put.signal(arrived.inc().weak()).post(warp);
        } else {
            if warp.thread_rank() == 0 {
                gin.expect(arrived, 1);
            }
            gin.wait_signal_meets_shadow(warp, arrived, MemoryOrder::Acquire);
        }
    }
    gin.flush(warp, MemoryOrder::Acquire);
}
