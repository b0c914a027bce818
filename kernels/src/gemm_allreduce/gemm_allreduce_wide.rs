//! The product of large matrices and its sum over two ranks, on Hopper.
//!
//! The product is that of [`gemm_wgmma`](crate::gemm::gemm_wgmma), stored to C in bf16, and sent to
//! the peer from the same shared memory. The warps that neither load nor multiply add the peer's
//! tile to each stored one, while the next tiles are multiplied. Both ranks add the same two
//! numbers, in f32, and round the sum: both get the same bits.

use cuda_std::prelude::*;
use devcomm_types::{GridConstant, TensorMap};
use nccl_device::{DevComm, Everyone, PeerTiles, Window};

use super::wide::summed;
use crate::files::gemm::epilogue::Identity;

/// Computes `C = sum over the two ranks of A x B^T` in bf16: each rank's product is rounded, and
/// then their sum.
///
/// The grid, the block, the maps and the layouts of A and B are those of
/// [`gemm_wgmma`](crate::gemm::gemm_wgmma::gemm_wgmma()); `to` is C's address, a multiple of 16
/// bytes, and `n` a multiple of 8. `slots` and `state` are the memory of [`Lamport`] messages, with
/// `capacity` slots: [`slots()`] of them are used. Ranks launch with the same grid and the same
/// `m`, `n` and `k`. -0 counts as +0.
///
/// # Safety
///
/// As for `gemm_wgmma`. `slots` and `state` are as [`LamportSlots`] needs them, for the two ranks
/// of the LSA team.
///
/// [`Lamport`]: nccl_device::Lamport
/// [`LamportSlots`]: nccl_device::LamportSlots
#[kernel(arch = "sm_90a", max_threads = 384, cluster = 2)]
pub unsafe fn gemm_allreduce_wide(
    comm: DevComm,
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: GridConstant<TensorMap>,
    to: *mut bf16,
    slots: Window<u32>,
    state: *mut u32,
    capacity: u32,
    m: u32,
    n: u32,
    k: u32,
) {
    // SAFETY: the caller of the kernel passes matrices, slots and state as the body needs them.
    unsafe {
        let peers = PeerTiles::<Everyone, 2>::new(&comm, &slots, state, capacity, to, [m, n]);
        summed([&a, &b, &c], [m, n, k], &peers, Identity::<bf16>::new(), &peers);
    }
}

/// Returns the slots that a product of `m x n` elements uses, if 32 bits count them.
#[must_use]
pub fn slots(m: usize, n: usize) -> Option<u32> {
    Everyone::slots(m, n)
}
