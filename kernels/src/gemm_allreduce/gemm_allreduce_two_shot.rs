//! The product of large matrices and its sum over more than two ranks, on Hopper.
//!
//! The product is that of [`gemm_wgmma`](crate::gemm::gemm_wgmma). Each tile has an owner, to which
//! all ranks send their parts from shared memory, the owner too. Its warps that neither load nor
//! multiply add these while the next tiles are multiplied, and store the sums to all ranks. The
//! blocks of all ranks with the same index meet at a barrier before the first sum is stored, and at
//! the end.

use cuda_std::prelude::*;
use devcomm_types::{GridConstant, TensorMap};
use nccl_device::{DevComm, PeerTiles, Window};

use super::wide::{ClusterTileOwners, summed};
use crate::files::gemm::epilogue::Identity;

/// Computes `C = sum over the N ranks of A x B^T` in bf16: each rank's product is rounded, and then
/// their sum, which is in f32 and in the order of the ranks. All ranks get the same bits.
///
/// The grid, the block and the maps are those of
/// [`gemm_wgmma`](crate::gemm::gemm_wgmma::gemm_wgmma()); C is the window `to`, and `n` a multiple
/// of 8. `slots` and `state` are the memory of [`Lamport`] messages, with `capacity` slots:
/// [`slots()`] of them are used. Ranks launch with the same grid, of at most as many blocks as the
/// device communicator has LSA barriers, and the same `m`, `n` and `k`. -0 counts as +0.
///
/// # Safety
///
/// As for `gemm_wgmma`; `to` begins at a multiple of 16 bytes in every rank. Nothing accesses it
/// until the kernel has ended but what comes before it in its stream. `slots` and `state` are as
/// [`LamportSlots`] needs them, for the ranks of the LSA team.
///
/// [`Lamport`]: nccl_device::Lamport
/// [`LamportSlots`]: nccl_device::LamportSlots
#[kernel(arch = "sm_90a", max_threads = 384, cluster = 2, N = [4, 8])]
pub unsafe fn gemm_allreduce_two_shot<const N: usize>(
    comm: DevComm,
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: GridConstant<TensorMap>,
    to: Window<bf16>,
    slots: Window<u32>,
    state: *mut u32,
    capacity: u32,
    m: u32,
    n: u32,
    k: u32,
) {
    // SAFETY: the caller of the kernel passes matrices, slots and state as the body needs them.
    unsafe {
        let own = to.local().as_ptr();
        let peers =
            PeerTiles::<ClusterTileOwners, N>::new(&comm, &slots, state, capacity, own, [m, n]);
        let peers = peers.stored_in_all(&to);
        summed([&a, &b, &c], [m, n, k], &peers, Identity::<bf16>::new(), &peers);
    }
}

/// Returns the slots that a rank has for each other one's messages of a product of `m x n`
/// elements, if 32 bits count them.
#[must_use]
pub fn slots(m: usize, n: usize, ranks: u32) -> Option<u32> {
    ClusterTileOwners::slots(m, n, ranks)
}
