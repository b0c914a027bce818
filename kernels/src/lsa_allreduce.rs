//! All-reduce (sum) by load and store within the LSA team, in two steps: every rank sums its slice
//! of all ranks' inputs, and stores the sum to all ranks.

use cuda_std::prelude::*;
use cuda_std::reduce::Sum;
use cuda_std::vector::{Accumulate, Vec16};
use half::{bf16, f16};
use nccl_device::reduce_copy::{Threads, lsa_reduce_copy};
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};

/// `recv[i] = sum over ranks of send[i]`, for `i < count`, in every rank of the LSA team.
///
/// f16 and bf16 are summed in f32 and rounded once. All ranks get the same bits. `recv` may be
/// `send`.
///
/// Grid: any, up to the device communicator's LSA barriers, the same in every rank. Block: any,
/// one-dimensional, the same in every rank. `count` is in elements.
///
/// # Safety
///
/// Both windows have at least `count` elements in every rank, and nothing else touches them until
/// the kernel has ended in every rank.
#[kernel(T = [f32, f16, bf16])]
pub unsafe fn lsa_allreduce<T: Accumulate>(
    comm: DevComm,
    send: Window<T>,
    recv: Window<T>,
    count: usize,
) {
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire);
    // Each rank sums one contiguous part, in whole 16-byte vectors but for the last.
    let team = comm.lsa_team();
    let vectors = count.div_ceil(Vec16::<T>::LANES);
    let each = vectors.div_ceil((team.n_ranks as usize).max(1)) * Vec16::<T>::LANES;
    let first = (each * team.rank as usize).min(count);
    let n = each.min(count - first);
    // SAFETY: the kernel's contract; between the barriers every element is read and written by one
    // thread of one rank.
    unsafe { lsa_reduce_copy(Threads::grid(), Sum, send, first, recv, first, n, team) };
    barrier.sync(MemoryOrder::Release);
}
