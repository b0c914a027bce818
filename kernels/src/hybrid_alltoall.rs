//! All-to-all by load and store within the LSA team, and over the network to the ranks of the other
//! teams, at the same time.

use cuda_std::prelude::*;
use half::{bf16, f16};
use nccl_device::gin::GinBackend;
use nccl_device::reduce_copy::local_copy;
use nccl_device::{BarrierIndex, Coop, DevComm, FenceLevel, MemoryOrder, Window};

use crate::share::share;

/// `recv[p * count + i]` of rank `r` becomes `send[r * count + i]` of rank `p`, for `i < count`:
/// every rank has `count` elements for every other.
///
/// Each block moves a share of every message, on a context of its own while there are enough.
///
/// Grid: any, up to the signals and hybrid barriers that the host reserved, the same in every rank.
/// Block: any, one-dimensional. `count` is in elements, the same in every rank. Connections: FULL.
///
/// # Safety
///
/// Nothing else touches this rank's windows until the kernel has ended here. The launch checks
/// their lengths.
#[kernel(
    T = [u8, f32, f16, bf16],
    B = gin,
    requires(
        count.saturating_mul(comm.n_ranks() as usize) <= send.len(),
        count.saturating_mul(comm.n_ranks() as usize) <= recv.len()
    )
)]
pub unsafe fn hybrid_alltoall<T: Accumulate, B: GinBackend>(
    comm: DevComm,
    send: Window<T>,
    recv: Window<T>,
    count: usize,
) {
    let (world, lsa, coop) = (comm.world_team(), comm.lsa_team(), Coop::cta());
    let block = thread::block_idx_x();
    let (first, len) = share(count, block as usize, thread::grid_dim_x() as usize);
    if len == 0 {
        return; // In every rank alike.
    }
    let gin = comm.gin::<B>(block % comm.n_gin_contexts().max(1));
    let arrived = comm.signal(block);
    let message = |peer: i32| peer as usize * count + first;
    // The ranks of other teams come behind this team's, round the world.
    let (next_team, outside) = (lsa.to_world(world.rank, lsa.n_ranks), world.n_ranks - lsa.n_ranks);

    let mut barrier = gin.hybrid_barrier(coop, BarrierIndex::this_block());
    // Every rank's kernel has begun, so its window may be written.
    barrier.sync(MemoryOrder::Acquire, FenceLevel::None);

    // To other teams by puts, a thread per peer. Every rank starts at its own place of the next
    // team.
    for i in coop.strided(outside as u32) {
        let peer = (next_team + (lsa.rank + i as i32) % outside) % world.n_ranks;
        let (to, from) = (recv.at(message(world.rank)), send.at(message(peer)));
        // SAFETY: the kernel's contract; the peer reads it after the signal.
        let put = unsafe { gin.put(world, peer, to, from, len) };
        put.signal(arrived.inc().weak()).post(Coop::thread());
    }
    // Within the team by stores, meanwhile.
    for member in lsa.all_from_self() {
        let peer = lsa.to_world(world.rank, member);
        // SAFETY: the kernel's contract; the peer reads it after the barrier.
        unsafe {
            let from = send.local().as_ptr().add(message(peer));
            let to = recv.lsa(member).as_ptr().add(message(world.rank));
            local_copy(coop, from, 1, to, 0, len);
        }
    }
    gin.wait_signal_follow_shadow(coop, arrived, outside as u64, MemoryOrder::Acquire);
    // `send` can be written again, and the team's stores have arrived.
    gin.flush(coop, MemoryOrder::Relaxed);
    barrier.lsa().sync(MemoryOrder::Release);
}
