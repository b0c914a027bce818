//! The product of large matrices and its sum over two ranks, on Hopper.
//!
//! The product is that of [`gemm_wgmma`](crate::gemm::gemm_wgmma), stored to C in bf16, and sent to
//! the peer from the same shared memory. The warps that neither load nor multiply add the peer's
//! tile to each stored one, behind the products of the next tiles. Both ranks add the same two
//! numbers, in f32, and round the sum: both get the same bits.

use core::marker::PhantomData;

use cuda_std::prelude::*;
use devcomm_types::{GridConstant, TensorMap};
use nccl_device::{DevComm, Window};

use super::messages::Messages;
use super::owners::{self, All};
use crate::files::gemm::epilogue::Identity;
use crate::files::gemm::gemm_wgmma::product_and;

/// `C = sum over the two ranks of A x B^T` in bf16: each rank's product is rounded, and then their
/// sum.
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
    let (comm, slots, of_all, owners) = (&comm, &slots, None, PhantomData::<All>);
    let messages =
        Messages::<_, 2> { comm, slots, state, capacity, product: to, c: to, of_all, m, n, owners };
    messages.prepare();
    // SAFETY: the kernel's contract.
    unsafe {
        let (maps, aligned) = ([&*a, &*b, &*c], core::ptr::null_mut());
        let epilogue = Identity::<bf16>::new();
        product_and::<bf16, _>(maps, aligned, [m, n, k], [false; 2], epilogue, &messages);
        messages.end();
    }
}

/// The slots that a product of `m x n` elements uses, if 32 bits count them.
#[must_use]
pub fn slots(m: usize, n: usize) -> Option<u32> {
    owners::slots(m, n)
}
