//! Reductions and copies over multicast addresses. Such an address stands for one element of each
//! rank's part of a window: its copies. The NVLink switch combines the copies, or stores to all.
//!
//! Addresses come from [`Window::multimem`](crate::Window::multimem), plus an index in elements.

use super::buffers::{Buffers, misalignment};
pub use super::multicast::MultimemReduce;
use super::pack::Pack;
use super::pass::Plan;
use super::sink::{Each, Many, One, Sink};
use super::source::{Copied, Reduced, ReducedMany, Source};
use super::threads::Threads;
use crate::prelude::*;

/// A multicast address whose copies the switch reduces.
#[derive(Clone, Copy)]
struct Multicast<T, Op> {
    op: Op,
    from: *const T,
}

impl<T: MultimemReduce<Op>, Op: ReduceOp<T>> Source<T> for Multicast<T, Op> {
    type Loaded<P: Pack<T>> = P::Value;

    fn misalignment(&self) -> Option<usize> {
        Some(misalignment(self.from))
    }

    unsafe fn rows<P: Pack<T>, const U: usize>(
        &self,
        at: usize,
        row: usize,
        live: impl Fn(usize) -> bool,
    ) -> [P::Value; U] {
        let mut values = [P::zero(); U];
        for (u, value) in values.iter_mut().enumerate() {
            if live(u) {
                // SAFETY: the caller passes rows that the buffers have, aligned for the pack.
                *value =
                    unsafe { P::load_multicast(self.op, self.from.wrapping_add(at + u * row)) };
            }
        }
        values
    }

    fn finish<P: Pack<T>>(&self, loaded: P::Value) -> P::Value {
        loaded
    }
}

/// A multicast address: stores go to all copies.
#[derive(Clone, Copy)]
struct ToMulticast<T>(*mut T);

impl<T: Accumulate> Sink<T> for ToMulticast<T> {
    fn misalignment(&self) -> Option<usize> {
        Some(misalignment(self.0))
    }

    unsafe fn store<P: Pack<T>>(&self, at: usize, value: P::Value) {
        // SAFETY: the caller passes an index of a pack that the buffer has, aligned for it.
        unsafe { P::store_multicast(self.0.wrapping_add(at), value) }
    }
}

/// Computes `dst[i] = op over the copies of src[i]`, for `i < count`.
///
/// NCCL, in C++ and for sums only: `ncclMultimemReduceSum`.
///
/// # Safety
///
/// Every thread of `threads` makes the same call. `src` is a multicast address, aligned to the
/// element, that has `count` elements in each copy, which are not written at the same time; `dst`
/// is valid for `count` writes, aligned, and not accessed by other threads. [Elements of 16
/// bits](super#small-elements-at-multicast-addresses) have more conditions.
#[doc(alias = "ncclMultimemReduceSum")]
#[track_caller]
pub unsafe fn multimem_reduce<T: MultimemReduce<Op>, Op: ReduceOp<T>>(
    threads: impl Into<Threads>,
    op: Op,
    src: *const T,
    dst: *mut T,
    count: usize,
) {
    let call = CoopCall::new("multimem_reduce")
        .arg("source", src.addr() as u64)
        .arg("destination", dst.addr() as u64)
        .arg("count", count as u64);
    let threads: Threads = threads.into().call(call);
    let (from, to) = (Multicast { op, from: src }, One(dst));
    // SAFETY: the caller's buffers have `count` elements, and the threads share them out by `Plan`.
    unsafe { Plan::new(threads, &from, &to, count).all::<T, 8>(from, to) }
}

/// Stores `src[i]` to every copy of `dst[i]`, for `i < count`.
///
/// NCCL: `ncclMultimemCopy`, which takes no `i8` or `u8`, and no odd counts of `f16` and `bf16`.
///
/// # Safety
///
/// Every thread of `threads` makes the same call. `src` is valid for `count` reads, aligned, and
/// not written at the same time; `dst` is a multicast address, aligned to the element, that has
/// `count` elements in each copy, which other threads do not access. [Elements of 8 and 16
/// bits](super#small-elements-at-multicast-addresses) have more conditions.
#[doc(alias = "ncclMultimemCopy")]
#[track_caller]
pub unsafe fn multimem_copy<T: Accumulate>(
    threads: impl Into<Threads>,
    src: *const T,
    dst: *mut T,
    count: usize,
) {
    let call = CoopCall::new("multimem_copy")
        .arg("source", src.addr() as u64)
        .arg("destination", dst.addr() as u64)
        .arg("count", count as u64);
    let threads: Threads = threads.into().call(call);
    let (from, to) = (Copied(src), ToMulticast(dst));
    // SAFETY: the caller's buffers have `count` elements, and the threads share them out by `Plan`.
    unsafe { Plan::new(threads, &from, &to, count).all::<T, 8>(from, to) }
}

/// Stores `op over the copies of src[i]` to every copy of `dst[i]`, for `i < count`.
///
/// NCCL, in C++ and for sums only: `ncclMultimemReduceSumCopy`.
///
/// # Safety
///
/// Every thread of `threads` makes the same call. `src` and `dst` are multicast addresses, aligned
/// to the element, that have `count` elements in each copy. Other threads do not write the elements
/// of `src` or access those of `dst` at the same time. [Elements of 16
/// bits](super#small-elements-at-multicast-addresses) have more conditions.
#[doc(alias = "ncclMultimemReduceSumCopy")]
#[track_caller]
pub unsafe fn multimem_reduce_copy<T: MultimemReduce<Op>, Op: ReduceOp<T>>(
    threads: impl Into<Threads>,
    op: Op,
    src: *const T,
    dst: *mut T,
    count: usize,
) {
    let call = CoopCall::new("multimem_reduce_copy")
        .arg("source", src.addr() as u64)
        .arg("destination", dst.addr() as u64)
        .arg("count", count as u64);
    let threads: Threads = threads.into().call(call);
    let (from, to) = (Multicast { op, from: src }, ToMulticast(dst));
    // SAFETY: the caller's buffers have `count` elements, and the threads share them out by `Plan`.
    unsafe { Plan::new(threads, &from, &to, count).all::<T, 8>(from, to) }
}

/// Reduces `src[src_index + i]` over the ranks of `team` by `op`, and stores the result to every
/// copy of `dst[i]`, for `i < count`.
///
/// NCCL, in C++ and for sums only: `ncclLsaReduceSumMultimemCopy`.
///
/// # Safety
///
/// The contract is that of [`lsa_reduce`](super::lsa_reduce) for `src`, and of [`multimem_copy`]
/// for `dst`.
#[doc(alias = "ncclLsaReduceSumMultimemCopy")]
#[track_caller]
pub unsafe fn lsa_reduce_multimem_copy<T: Accumulate>(
    threads: impl Into<Threads>,
    op: impl ReduceOp<T>,
    src: Window<T>,
    src_index: usize,
    dst: *mut T,
    count: usize,
    team: Team,
) {
    let call = CoopCall::new("lsa_reduce_multimem_copy")
        .arg("source's window", src.as_raw().addr() as u64)
        .arg("source's index", src_index as u64)
        .arg("destination", dst.addr() as u64)
        .arg("count", count as u64)
        .arg("ranks", team.n_ranks as u64);
    let threads: Threads = threads.into().call(call);
    let from = Buffers::of_team_starting_at_self(src, src_index, team);
    let (many, to) = (ReducedMany { op, from }, ToMulticast(dst));
    let plan = Plan::new(threads, &many, &to, count);
    // The number of vectors in flight is chosen as in the module `lsa`.
    // SAFETY: the caller's buffers have `count` elements, and the threads share them out by `Plan`.
    unsafe {
        match team.n_ranks {
            2 => plan.vectors::<T, 4>(Reduced::<T, _, 2>::of(op, from), to),
            4 => plan.vectors::<T, 2>(Reduced::<T, _, 4>::of(op, from), to),
            8 => plan.vectors::<T, 1>(Reduced::<T, _, 8>::of(op, from), to),
            _ => plan.vectors::<T, 2>(many, to),
        }
        plan.elements(many, to);
    }
}

/// Computes `dst[dst_index + i] = op over the copies of src[i]` in every rank of `team`, for `i <
/// count`.
///
/// NCCL, in C++ and for sums only: `ncclMultimemReduceSumLsaCopy`.
///
/// # Safety
///
/// The contract is that of [`multimem_reduce`] for `src`, and of [`lsa_copy`](super::lsa_copy) for
/// `dst`.
#[doc(alias = "ncclMultimemReduceSumLsaCopy")]
#[track_caller]
pub unsafe fn multimem_reduce_lsa_copy<T: MultimemReduce<Op>, Op: ReduceOp<T>>(
    threads: impl Into<Threads>,
    op: Op,
    src: *const T,
    dst: Window<T>,
    dst_index: usize,
    count: usize,
    team: Team,
) {
    let call = CoopCall::new("multimem_reduce_lsa_copy")
        .arg("source", src.addr() as u64)
        .arg("destination's window", dst.as_raw().addr() as u64)
        .arg("destination's index", dst_index as u64)
        .arg("count", count as u64)
        .arg("ranks", team.n_ranks as u64);
    let threads: Threads = threads.into().call(call);
    let (from, to) =
        (Multicast { op, from: src }, Buffers::of_team_starting_at_self(dst, dst_index, team));
    let plan = Plan::new(threads, &from, &Many(to), count);
    // SAFETY: the caller's buffers have `count` elements, and the threads share them out by `Plan`.
    unsafe {
        match team.n_ranks {
            2 => plan.vectors::<T, 8>(from, Each::<T, 2>::of(to)),
            4 => plan.vectors::<T, 8>(from, Each::<T, 4>::of(to)),
            8 => plan.vectors::<T, 6>(from, Each::<T, 8>::of(to)),
            _ => plan.vectors::<T, 8>(from, Many(to)),
        }
        plan.elements(from, Many(to));
    }
}
