//! Reductions and copies over local memory.

use cuda_std::prelude::*;
use cuda_std::reduce::{Min, Sum};
use nccl_device::Coop;
use nccl_device::reduce_copy as rc;

/// Sums `n` buffers.
#[kernel(T = [f32, f16])]
pub unsafe fn local_reduce<T: Accumulate>(
    n: usize,
    src: *const T,
    stride: usize,
    dst: *mut T,
    count: usize,
) {
    // SAFETY: the test passes buffers with these elements.
    unsafe { rc::local_reduce(Coop::cta(), Sum, n, src, stride, dst, count) }
}

/// Copies to `n` buffers.
#[kernel(T = [f32, u8])]
pub unsafe fn local_copy<T: Accumulate>(
    src: *const T,
    n: usize,
    dst: *mut T,
    stride: usize,
    count: usize,
) {
    // SAFETY: the test passes buffers with these elements.
    unsafe { rc::local_copy(Coop::cta(), src, n, dst, stride, count) }
}

/// Stores the minimum of `n` buffers to `m` buffers.
#[kernel(T = [f32, bf16])]
pub unsafe fn local_reduce_copy<T: Accumulate>(
    n: usize,
    src: *const T,
    src_stride: usize,
    m: usize,
    dst: *mut T,
    dst_stride: usize,
    count: usize,
) {
    let coop = Coop::cta();
    // SAFETY: the test passes buffers with these elements.
    unsafe { rc::local_reduce_copy(coop, Min, n, src, src_stride, m, dst, dst_stride, count) }
}
