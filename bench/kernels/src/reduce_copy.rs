//! All-reduce (sum) by `lsa_reduce_copy` of `nccl_device`; the C++ twin calls NCCL's function.

use cuda_std::prelude::*;
use cuda_std::reduce::Sum;
use cuda_std::vector::{Accumulate, Vec16};
use half::{bf16, f16};
use nccl_device::reduce_copy::{Threads, lsa_reduce_copy};
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};

/// Computes `recv[i] = sum over ranks of send[i]`, for `i < count`, in every rank of the LSA team.
/// Every rank sums one contiguous part of whole 16-byte vectors (the last rank's part may end
/// within a vector), and all threads of its grid share the part. (NCCL's function takes a coop, so
/// in C++ every block has its own contiguous part.)
///
/// Grid: any, up to the device communicator's LSA barriers, the same in every rank. Block: any,
/// one-dimensional, the same in every rank. `count` is in elements.
///
/// # Safety
///
/// Both windows have at least `count` elements in every rank, and nothing else accesses them until
/// the kernel has ended in every rank.
#[kernel(T = [f32, f16, bf16])]
pub unsafe fn reduce_copy<T: Accumulate>(
    comm: DevComm,
    send: Window<T>,
    recv: Window<T>,
    count: usize,
) {
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire);
    let team = comm.lsa_team();
    let vectors = count.div_ceil(Vec16::<T>::LANES);
    // `max` spares the check of the division.
    let len = vectors.div_ceil((team.n_ranks as usize).max(1)) * Vec16::<T>::LANES;
    let first = (len * team.rank as usize).min(count);
    let n = len.min(count - first);
    // SAFETY: the part lies below `count`, for which the caller's windows have elements, and only
    // this rank accesses it between the barriers.
    unsafe { lsa_reduce_copy(Threads::grid(), Sum, send, first, recv, first, n, team) };
    barrier.sync(MemoryOrder::Release);
}
