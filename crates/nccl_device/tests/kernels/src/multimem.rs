//! Reductions and copies over multicast addresses. The *copies* of an element at such an address
//! are the element in each rank's part of the window.

use cuda_std::prelude::*;
use cuda_std::reduce::{Max, Sum};
use nccl_device::reduce_copy as rc;
use nccl_device::{Coop, DevComm, Window};

/// Adds up the copies of each element of `src`, and stores the sums to this rank's `dst`.
#[kernel(T = [f32, f16, bf16, f64, i32])]
pub unsafe fn multimem_reduce<T: rc::MultimemReduce<Sum>>(
    comm: DevComm,
    src: Window<T>,
    index: usize,
    dst: *mut T,
    count: usize,
) {
    let src = src.multimem(&comm).wrapping_add(index);
    // SAFETY: the test passes windows and buffers with these elements, which no other kernel uses.
    unsafe { rc::multimem_reduce(Coop::cta(), Sum, src, dst, count) }
}

/// Stores each element of this rank's `src` to all copies in `dst`.
#[kernel(T = [f32, f16, u8])]
pub unsafe fn multimem_copy<T: Accumulate>(
    comm: DevComm,
    src: *const T,
    dst: Window<T>,
    index: usize,
    count: usize,
) {
    let dst = dst.multimem(&comm).wrapping_add(index);
    // SAFETY: the test passes windows and buffers with these elements, which no other kernel uses.
    unsafe { rc::multimem_copy(Coop::cta(), src, dst, count) }
}

/// Adds up the copies of each element of `src`, and stores the sum to all copies in `dst`.
#[kernel(T = [f32, f16, bf16])]
pub unsafe fn multimem_reduce_copy<T: rc::MultimemReduce<Sum>>(
    comm: DevComm,
    src: Window<T>,
    src_index: usize,
    dst: Window<T>,
    dst_index: usize,
    count: usize,
) {
    let src = src.multimem(&comm).wrapping_add(src_index);
    let dst = dst.multimem(&comm).wrapping_add(dst_index);
    // SAFETY: the test passes windows and buffers with these elements, which no other kernel uses.
    unsafe { rc::multimem_reduce_copy(Coop::cta(), Sum, src, dst, count) }
}

/// Loads each rank's element by itself, and stores the maximum to all copies by one multicast
/// store.
#[kernel(T = [f32, bf16])]
pub unsafe fn lsa_reduce_multimem_copy<T: Accumulate>(
    comm: DevComm,
    src: Window<T>,
    src_index: usize,
    dst: Window<T>,
    dst_index: usize,
    count: usize,
) {
    let (team, coop) = (comm.lsa_team(), Coop::cta());
    let dst = dst.multimem(&comm).wrapping_add(dst_index);
    // SAFETY: the test passes windows and buffers with these elements, which no other kernel uses.
    unsafe { rc::lsa_reduce_multimem_copy(coop, Max, src, src_index, dst, count, team) }
}

/// Takes the maximum of the copies by one multicast load, and stores it to each rank by itself.
#[kernel(T = [f16, i64])]
pub unsafe fn multimem_reduce_lsa_copy<T: rc::MultimemReduce<Max>>(
    comm: DevComm,
    src: Window<T>,
    src_index: usize,
    dst: Window<T>,
    dst_index: usize,
    count: usize,
) {
    let (team, coop) = (comm.lsa_team(), Coop::cta());
    let src = src.multimem(&comm).wrapping_add(src_index);
    // SAFETY: the test passes windows and buffers with these elements, which no other kernel uses.
    unsafe { rc::multimem_reduce_lsa_copy(coop, Max, src, dst, dst_index, count, team) }
}
