//! All-reduce (sum) by reduce-copy: `nccl_device`'s here, NCCL's own in C++.

use cuda_std::prelude::*;
use cuda_std::reduce::Sum;
use cuda_std::vector::{Accumulate, Vec16};
use half::{bf16, f16};
use nccl_device::reduce_copy::lsa_reduce_copy;
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};

/// `recv[i] = sum over ranks of send[i]`, for `i < count`, in every rank of the LSA team. Every block of every rank sums one
/// contiguous part, in whole 16-byte vectors but for the last.
///
/// Grid: any, up to the device communicator's LSA barriers, the same in every rank. Block: any, one-dimensional, the same in
/// every rank. `count` is in elements.
///
/// # Safety
///
/// Both windows have at least `count` elements in every rank, and nothing else touches them until the kernel has ended
/// in every rank.
#[kernel(T = [f32, f16, bf16])]
pub unsafe fn reduce_copy<T: Accumulate>(
    comm: DevComm,
    send: Window<T>,
    recv: Window<T>,
    count: usize,
) {
    let (team, coop) = (comm.lsa_team(), Coop::cta());
    let mut barrier = comm.lsa_barrier(coop, BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire);
    let lanes = Vec16::<T>::LANES;
    let blocks = thread::grid_dim_x() as usize;
    let parts = team.n_ranks as usize * blocks;
    // SAFETY: a team has a rank, a grid a block. (A check here would be a branch to a trap.)
    unsafe { core::hint::assert_unchecked(parts > 0) };
    let each = count.div_ceil(lanes).div_ceil(parts) * lanes;
    let part = team.rank as usize * blocks + thread::block_idx_x() as usize;
    let begin = (part * each).min(count);
    let length = each.min(count - begin);
    // SAFETY: the contract; the part lies below `count`, and is this block's alone between the barriers.
    unsafe { lsa_reduce_copy(coop, Sum, send, begin, recv, begin, length, team) };
    barrier.sync(MemoryOrder::Release);
}
