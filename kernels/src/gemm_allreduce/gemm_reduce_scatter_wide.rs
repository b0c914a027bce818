//! The product of large matrices and the reduce-scatter of its rows, on Hopper.
//!
//! The product is that of [`gemm_wgmma`](crate::gemm::gemm_wgmma). A rank sends the other ranks
//! their rows from shared memory; its own it stores, or sends itself if there are more than two.
//! Warps that neither load nor multiply add what the ranks computed, in the order of the ranks,
//! while the next tiles are multiplied.

use cuda_std::prelude::*;
use devcomm_types::{GridConstant, TensorMap};
use nccl_device::{DevComm, PeerTiles, RowOwners, Window};

use super::wide::{CLUSTER_M, summed};
use crate::files::gemm::epilogue::Identity;

/// `m` is a multiple of this number of rows for each rank: those of a cluster's tile.
pub const ROWS: u32 = CLUSTER_M;

/// Computes a rank's rows of the sum over N ranks of `A x B^T` in bf16: each rank's product is
/// rounded, and then their sum, which is in f32 and in the order of the ranks.
///
/// The grid, the block and the maps are those of
/// [`gemm_wgmma`](crate::gemm::gemm_wgmma::gemm_wgmma()), with `m` a multiple of [`ROWS`] times the
/// ranks and `n` of 8. `map` and `product` are of this rank's product, `m x n` elements that only
/// this kernel uses, and nobody if there are more than two ranks; `c` has the `m / ranks x n` sums
/// of this rank's rows. `slots` and `state` are the memory of [`Lamport`] messages, with `capacity`
/// slots: one is used for eight elements of C. Ranks launch with the same grid and the same `m`,
/// `n` and `k`. -0 counts as +0.
///
/// # Safety
///
/// As for `gemm_wgmma`; `product` and `c` begin at multiples of 16 bytes. `slots` and `state` are
/// as [`LamportSlots`] needs them, for the ranks of the LSA team.
///
/// [`Lamport`]: nccl_device::Lamport
/// [`LamportSlots`]: nccl_device::LamportSlots
#[kernel(arch = "sm_90a", max_threads = 384, cluster = 2, N = [2, 4, 8])]
pub unsafe fn gemm_reduce_scatter_wide<const N: usize>(
    comm: DevComm,
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    map: GridConstant<TensorMap>,
    product: *mut bf16,
    c: *mut bf16,
    slots: Window<u32>,
    state: *mut u32,
    capacity: u32,
    m: u32,
    n: u32,
    k: u32,
) {
    // SAFETY: the caller of the kernel passes matrices, slots and state as the body needs them.
    unsafe {
        let peers = PeerTiles::<RowOwners, N>::new(&comm, &slots, state, capacity, c, [m, n]);
        let peers = peers.kept_in(product);
        summed([&a, &b, &map], [m, n, k], &peers, Identity::<bf16>::new(), &peers);
    }
}

/// Returns the slots that a rank has for each other one's messages of its rows, if 32 bits count
/// them.
#[must_use]
pub fn slots(rows: usize, n: usize) -> Option<u32> {
    RowOwners::slots(rows, n)
}
