//! All-to-all over several LSA teams: by stores within the team and, at the same time, over the
//! network (GIN) to the other teams.

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
/// Grid: any, up to the signals and hybrid barriers that the host reserved, the same in every rank.
/// Block: any, one-dimensional. `count` is in elements, the same in every rank. Connections: FULL.
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
        return; // `len` is the same in every rank.
    }
    let gin = comm.gin::<B>(block % comm.n_gin_contexts().max(1)); // `gin` traps without contexts.
    let arrived = comm.signal(block);
    let message = |peer: i32| peer as usize * count + first;
    // The other teams' ranks follow this team's in world order, modulo the size of the world.
    let (next_team, outside) = (lsa.to_world(world.rank, lsa.n_ranks), world.n_ranks - lsa.n_ranks);

    let mut barrier = gin.hybrid_barrier(coop, BarrierIndex::this_block());
    // After this barrier every rank's kernel has begun, so peers may write to its windows.
    barrier.sync(MemoryOrder::Acquire, FenceLevel::None);

    // Messages to other teams are puts, by one thread per peer. Each rank starts with a different
    // rank of the next team.
    for i in coop.strided(outside as u32) {
        let peer = (next_team + (lsa.rank + i as i32) % outside) % world.n_ranks;
        let (to, from) = (recv.at(message(world.rank)), send.at(message(peer)));
        // SAFETY: the kernel's contract; the peer reads the message after the signal.
        let put = unsafe { gin.put(world, peer, to, from, len) };
        put.signal(arrived.inc().weak()).post(Coop::thread());
    }
    // Meanwhile, the block stores the messages within the team.
    for lsa_rank in lsa.all_from_self() {
        let (peer, copies, stride) = (lsa.to_world(world.rank, lsa_rank), 1, 0);
        // SAFETY: the kernel's contract; the peer reads the message after the barrier.
        unsafe {
            let from = send.local().as_ptr().add(message(peer));
            let to = recv.lsa(lsa_rank).as_ptr().add(message(world.rank));
            local_copy(coop, from, copies, to, stride, len);
        }
    }
    gin.wait_signal_follow_shadow(coop, arrived, outside as u64, MemoryOrder::Acquire);
    // The flush waits until the puts have read `send`, and the barrier waits for the team's stores.
    gin.flush(coop, MemoryOrder::Relaxed);
    barrier.lsa().sync(MemoryOrder::Release);
}
