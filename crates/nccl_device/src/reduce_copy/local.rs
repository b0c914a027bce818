//! Over parts of memory that this GPU reaches by pointers.

use cuda_std::reduce::ReduceOp;
use cuda_std::vector::Accumulate;

use super::parts::Parts;
use super::pass::Plan;
use super::sink::{Many, One};
use super::source::{Copied, ReducedMany};
use super::threads::Threads;

/// `dst[i] = op over j < n_src of src[j * src_stride + i]`, for `i < count`.
///
/// C++ has it for sums only: `ncclLocalReduceSum`.
///
/// # Safety
///
/// Every one of `threads` calls it alike. There is one source at least; they are valid for reads
/// and aligned, and nobody writes there at the same time; `dst` is valid for `count` writes,
/// aligned, and touched by nobody else.
#[doc(alias = "ncclLocalReduceSum")]
#[cfg_attr(target_arch = "nvptx64", inline(always))]
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
    let from = Parts::strided(src.cast_mut(), src_stride, n_src);
    let (from, to) = (ReducedMany { op, from }, One(dst));
    // SAFETY: the caller's.
    unsafe { Plan::new(threads.into(), &from, &to, count).all::<T, 2>(from, to) }
}

/// `dst[j * dst_stride + i] = src[i]` for every `j < n_dst`, for `i < count`.
///
/// NCCL: `ncclLocalCopy`.
///
/// # Safety
///
/// Every one of `threads` calls it alike. `src` is valid for `count` reads and aligned, and nobody
/// writes there at the same time; the destinations are valid for writes, aligned, and touched by
/// nobody else.
#[doc(alias = "ncclLocalCopy")]
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub unsafe fn local_copy<T: Accumulate>(
    threads: impl Into<Threads>,
    src: *const T,
    n_dst: usize,
    dst: *mut T,
    dst_stride: usize,
    count: usize,
) {
    let (from, to) = (Copied(src), Many(Parts::strided(dst, dst_stride, n_dst)));
    // SAFETY: the caller's.
    unsafe { Plan::new(threads.into(), &from, &to, count).all::<T, 8>(from, to) }
}

/// `dst[k * dst_stride + i] = op over j < n_src of src[j * src_stride + i]` for every `k < n_dst`,
/// for `i < count`.
///
/// C++ has it for sums only: `ncclLocalReduceSumCopy`.
///
/// # Safety
///
/// Every one of `threads` calls it alike. There is one source at least; they are valid for reads
/// and aligned, and nobody writes there at the same time; the destinations are valid for writes,
/// aligned, and touched by nobody else.
#[doc(alias = "ncclLocalReduceSumCopy")]
#[expect(clippy::too_many_arguments, reason = "two sets of parts, of three arguments each")]
#[cfg_attr(target_arch = "nvptx64", inline(always))]
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
    let from = Parts::strided(src.cast_mut(), src_stride, n_src);
    let (from, to) = (ReducedMany { op, from }, Many(Parts::strided(dst, dst_stride, n_dst)));
    // SAFETY: the caller's.
    unsafe { Plan::new(threads.into(), &from, &to, count).all::<T, 2>(from, to) }
}
