//! The product of large matrices and the reduce-scatter of its rows over two ranks, on Hopper: as
//! [`gemm_allreduce_wide`](crate::gemm_allreduce_wide()), of half of the rows.

use cuda_std::prelude::*;
use devcomm_types::{GridConstant, TensorMap};
use nccl_device::{DevComm, Window};

use super::messages::Messages;
use crate::files::gemm::epilogue::Identity;
use crate::files::gemm::gemm_wgmma::product_and;

/// `m` is a multiple of it: tiles of a cluster for each rank.
pub const ROWS: u32 = 512;

/// A rank's half of the rows of the sum over the two ranks of `A x B^T` in bf16: each rank's
/// product is rounded, and then their sum.
///
/// The grid, the block and the maps are those of
/// [`gemm_wgmma`](crate::gemm::gemm_wgmma::gemm_wgmma()), with `m` a multiple of [`ROWS`] and `n`
/// of 8. `map` and `product` are of this rank's product, `m x n` elements that only this kernel
/// uses, and `c` has the `m / 2 x n` sums of this rank's rows. `slots` and `state` are the memory
/// of [`Lamport`] messages, with `capacity` slots: one is used for eight elements of C. Ranks
/// launch with the same grid and the same `m`, `n` and `k`. -0 counts as +0.
///
/// # Safety
///
/// As for `gemm_wgmma`; `product` and `c` begin at multiples of 16 bytes. `slots` and `state` are
/// as [`LamportSlots`] needs them, for the two ranks of the LSA team.
///
/// [`Lamport`]: nccl_device::Lamport
/// [`LamportSlots`]: nccl_device::LamportSlots
#[kernel(arch = "sm_90a", max_threads = 384, cluster = 2)]
pub unsafe fn gemm_reduce_scatter_wide(
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
    let messages =
        Messages::<true> { comm: &comm, slots: &slots, state, capacity, product, c, m, n };
    messages.prepare();
    // SAFETY: the kernel's contract.
    unsafe {
        let (maps, aligned) = ([&*a, &*b, &*map], core::ptr::null_mut());
        let epilogue = Identity::<bf16>::new();
        product_and::<bf16, _>(maps, aligned, [m, n, k], [false; 2], epilogue, &messages);
        messages.end();
    }
}
