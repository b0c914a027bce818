//! All-to-all over the network (GIN): every rank puts its messages into its peers' windows, and
//! waits for one signal from each peer.

use cuda_std::prelude::*;
use cuda_std::strided::share;
use half::{bf16, f16};
use nccl_device::gin::GinBackend;
use nccl_device::reduce_copy::local_copy;
use nccl_device::{BarrierIndex, Coop, DevComm, FenceLevel, MemoryOrder, Window};

/// Exchanges messages: `recv[p * count + i]` of rank `r` becomes `send[r * count + i]` of rank `p`,
/// for `i < count`: every rank has `count` elements for every rank.
///
/// Each block moves a share of every message. Block `b` uses GIN context `b % n_gin_contexts`.
///
/// Grid: any, up to the signals and world GIN barriers that the host reserved, the same in every
/// rank. Block: any, one-dimensional. `count` is in elements, the same in every rank. Connections:
/// FULL.
///
/// # Safety
///
/// Nothing else accesses this rank's windows until the kernel has ended in this rank. The launch
/// checks their lengths.
#[kernel(
    T = [u8, f32, f16, bf16],
    B = gin,
    requires(
        count.saturating_mul(comm.n_ranks() as usize) <= send.len(),
        count.saturating_mul(comm.n_ranks() as usize) <= recv.len()
    )
)]
pub unsafe fn gin_alltoall<T: Accumulate, B: GinBackend>(
    comm: DevComm,
    send: Window<T>,
    recv: Window<T>,
    count: usize,
) {
    let (world, coop, block) = (comm.world_team(), Coop::cta(), thread::block_idx_x());
    let (first, len) = share(count, block as usize, thread::grid_dim_x() as usize);
    if len == 0 {
        return; // `len` is the same in every rank.
    }
    let gin = comm.gin::<B>(block % comm.n_gin_contexts().max(1)); // `gin` traps without contexts.
    let arrived = comm.signal(block);
    let message = |peer: i32| peer as usize * count + first;

    // After this barrier every rank's kernel has begun, so peers may write to its windows.
    let mut barrier = gin.world_barrier(coop, BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire, FenceLevel::None);

    // One thread puts to each peer. Each rank starts with the next rank, so that at any time the
    // ranks put to different peers.
    let others = (world.n_ranks - 1) as u32;
    for i in coop.strided(others) {
        let peer = world.rotated(1 + i as i32);
        let (to, from) = (recv.at(message(world.rank)), send.at(message(peer)));
        // SAFETY: the kernel's contract; the peer reads the message after the signal.
        let put = unsafe { gin.put(world, peer, to, from, len) };
        put.signal(arrived.inc().weak()).post(Coop::thread());
    }
    // Meanwhile, the block copies this rank's message to itself.
    let (own, copies, stride) = (message(world.rank), 1, 0);
    // SAFETY: the launch checks that both windows have the message.
    unsafe {
        let (from, to) = (send.local().as_ptr().add(own), recv.local().as_ptr().add(own));
        local_copy(coop, from, copies, to, stride, len);
    }
    gin.wait_signal_follow_shadow(coop, arrived, others.into(), MemoryOrder::Acquire);
    // After the flush the puts have read `send`, so it may be written again.
    gin.flush(coop, MemoryOrder::Relaxed);
}
