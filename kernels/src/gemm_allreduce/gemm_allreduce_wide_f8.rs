//! The product of large matrices and its sum over two ranks, on Hopper, of which 8-bit floats with
//! scales travel.
//!
//! As [`gemm_allreduce_wide`](super::gemm_allreduce_wide), but each rank's product is rounded to
//! [`F8E4M3`](devcomm_types::F8E4M3), half of the bytes. Only the sums are stored to C.

use cuda_std::prelude::*;
use devcomm_types::{GridConstant, TensorMap};
use nccl_device::{DevComm, PeerTiles, Window};

use super::quantised::{self, Quantised};
use super::wide::summed;

/// Computes `C = sum over the two ranks of A x B^T` in bf16: each rank's product is rounded to
/// [`F8E4M3`](devcomm_types::F8E4M3), with a scale for 64 columns of a row, and the sum to bf16.
///
/// The grid, the block and the maps are those of
/// [`gemm_wgmma`](crate::gemm::gemm_wgmma::gemm_wgmma()); `c` begins at a multiple of 16 bytes, and
/// `n` is a multiple of 8. `own`, `slots` and `state` are workspace: four words for each slot, and
/// the memory of [`Lamport`] messages, with `capacity` slots: [`slots()`] of them are used. Ranks
/// launch with the same grid and the same `m`, `n` and `k`.
///
/// # Safety
///
/// As for `gemm_wgmma`. `slots` and `state` are as [`LamportSlots`] needs them, for the two ranks
/// of the LSA team; only this kernel uses `own`.
///
/// [`Lamport`]: nccl_device::Lamport
/// [`LamportSlots`]: nccl_device::LamportSlots
#[kernel(arch = "sm_90a", max_threads = 384, cluster = 2)]
pub unsafe fn gemm_allreduce_wide_f8(
    comm: DevComm,
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: *mut bf16,
    own: *mut u32,
    slots: Window<u32>,
    state: *mut u32,
    capacity: u32,
    m: u32,
    n: u32,
    k: u32,
) {
    // SAFETY: the kernel's contract. No map is used for C.
    unsafe {
        let peers = PeerTiles::new(&comm, &slots, state, capacity, c, [m, n]);
        let quantised = Quantised { peers, own, c, m, n };
        summed([&a, &b, &a], [m, n, k], &peers, quantised, &quantised);
    }
}

/// Returns the slots that a product of `m x n` elements uses, if 32 bits count them.
#[must_use]
pub fn slots(m: usize, n: usize) -> Option<u32> {
    quantised::slots(m, n)
}
