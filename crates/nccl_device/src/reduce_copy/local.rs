//! Reductions and copies over strided buffers that this GPU accesses by pointer.

use super::buffers::Buffers;
use super::pass::Plan;
use super::sink::{Many, One};
use super::source::{Copied, ReducedMany};
use super::threads::Threads;
use crate::prelude::*;

/// Computes `dst[i] = op over j < n_src of src[j * src_stride + i]`, for `i < count`.
///
/// NCCL, in C++ and for sums only: `ncclLocalReduceSum`.
///
/// # Safety
///
/// Every thread of `threads` makes the same call. There is at least one source; the sources are
/// valid for reads, aligned, and not written at the same time; `dst` is valid for `count` writes,
/// aligned, and not accessed by other threads.
#[doc(alias = "ncclLocalReduceSum")]
#[track_caller]
pub unsafe fn local_reduce<T: Accumulate>(
    threads: impl Into<Threads>,
    op: impl ReduceOp<T>,
    n_src: usize,
    src: *const T,
    src_stride: usize,
    dst: *mut T,
    count: usize,
) {
    let call = CoopCall::new("local_reduce")
        .arg("sources", n_src as u64)
        .arg("source", src.addr() as u64)
        .arg("their stride", src_stride as u64)
        .arg("destination", dst.addr() as u64)
        .arg("count", count as u64);
    let threads: Threads = threads.into().call(call);
    let from = Buffers::strided(src.cast_mut(), src_stride, n_src);
    let (from, to) = (ReducedMany { op, from }, One(dst));
    // SAFETY: the caller's buffers have `count` elements, and the threads share them out by `Plan`.
    unsafe { Plan::new(threads, &from, &to, count).all::<T, 2>(from, to) }
}

/// Computes `dst[j * dst_stride + i] = src[i]` for every `j < n_dst`, for `i < count`.
///
/// NCCL: `ncclLocalCopy`.
///
/// # Safety
///
/// Every thread of `threads` makes the same call. `src` is valid for `count` reads, aligned, and
/// not written at the same time; the destinations are valid for writes, aligned, and not accessed
/// by other threads.
#[doc(alias = "ncclLocalCopy")]
#[track_caller]
pub unsafe fn local_copy<T: Accumulate>(
    threads: impl Into<Threads>,
    src: *const T,
    n_dst: usize,
    dst: *mut T,
    dst_stride: usize,
    count: usize,
) {
    let call = CoopCall::new("local_copy")
        .arg("source", src.addr() as u64)
        .arg("destinations", n_dst as u64)
        .arg("destination", dst.addr() as u64)
        .arg("their stride", dst_stride as u64)
        .arg("count", count as u64);
    let threads: Threads = threads.into().call(call);
    let (from, to) = (Copied(src), Many(Buffers::strided(dst, dst_stride, n_dst)));
    // SAFETY: the caller's buffers have `count` elements, and the threads share them out by `Plan`.
    unsafe { Plan::new(threads, &from, &to, count).all::<T, 8>(from, to) }
}

/// Computes `dst[k * dst_stride + i] = op over j < n_src of src[j * src_stride + i]` for every `k <
/// n_dst`, for `i < count`.
///
/// NCCL, in C++ and for sums only: `ncclLocalReduceSumCopy`.
///
/// # Safety
///
/// Every thread of `threads` makes the same call. There is at least one source; the sources are
/// valid for reads, aligned, and not written at the same time; the destinations are valid for
/// writes, aligned, and not accessed by other threads.
#[doc(alias = "ncclLocalReduceSumCopy")]
#[expect(clippy::too_many_arguments, reason = "two sets of buffers, of three arguments each")]
#[track_caller]
pub unsafe fn local_reduce_copy<T: Accumulate>(
    threads: impl Into<Threads>,
    op: impl ReduceOp<T>,
    n_src: usize,
    src: *const T,
    src_stride: usize,
    n_dst: usize,
    dst: *mut T,
    dst_stride: usize,
    count: usize,
) {
    let call = CoopCall::new("local_reduce_copy")
        .arg("sources", n_src as u64)
        .arg("source", src.addr() as u64)
        .arg("destinations", n_dst as u64)
        .arg("destination", dst.addr() as u64)
        .arg("count", count as u64);
    let threads: Threads = threads.into().call(call);
    let from = Buffers::strided(src.cast_mut(), src_stride, n_src);
    let (from, to) = (ReducedMany { op, from }, Many(Buffers::strided(dst, dst_stride, n_dst)));
    // SAFETY: the caller's buffers have `count` elements, and the threads share them out by `Plan`.
    unsafe { Plan::new(threads, &from, &to, count).all::<T, 2>(from, to) }
}
