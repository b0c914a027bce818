//! Reductions and copies over the ranks of an LSA team, by load and store.

use super::buffers::Buffers;
use super::pass::Plan;
use super::sink::{Each, Many, One};
use super::source::{Copied, Reduced, ReducedMany};
use super::threads::Threads;
use crate::prelude::*;

// `U` of `Plan::vectors`, the vectors in flight per thread and buffer, is chosen to hide latency,
// which decides the speed over NVLink: 8 to 16 loads in flight for the usual numbers of ranks,
// within the registers that 512 threads per block leave to a thread.

/// Returns whether a vector takes four times its registers while it is reduced, as 8-bit elements
/// do: then fewer vectors are in flight.
const fn widens_fourfold<T: Accumulate>() -> bool {
    size_of::<T>() == 1
}

/// Computes `dst[i] = op over the ranks of team of src[src_index + i]`, for `i < count`.
///
/// Every rank that reduces the same elements gets the same bits.
///
/// NCCL, in C++ and for sums only: `ncclLsaReduceSum`.
///
/// # Safety
///
/// Every thread of `threads` makes the same call. Each rank's part of `src` has the elements, which
/// are not written at the same time; `dst` is valid for `count` writes, aligned, and not accessed
/// by other threads. `team` is within the LSA team and not empty.
#[doc(alias = "ncclLsaReduceSum")]
#[track_caller]
pub unsafe fn lsa_reduce<T: Accumulate>(
    threads: impl Into<Threads>,
    op: impl ReduceOp<T>,
    src: Window<T>,
    src_index: usize,
    dst: *mut T,
    count: usize,
    team: Team,
) {
    let call = CoopCall::new("lsa_reduce")
        .arg("source's window", src.as_raw().addr() as u64)
        .arg("source's index", src_index as u64)
        .arg("destination", dst.addr() as u64)
        .arg("count", count as u64)
        .arg("ranks", team.n_ranks as u64);
    let threads: Threads = threads.into().call(call);
    let from = Buffers::of_team(src, src_index, team);
    let (many, to) = (ReducedMany { op, from }, One(dst));
    let plan = Plan::new(threads, &many, &to, count);
    let fourfold = const { widens_fourfold::<T>() };
    // SAFETY: the caller's buffers have `count` elements, and the threads share them out by `Plan`.
    unsafe {
        match team.n_ranks {
            2 if fourfold => plan.vectors::<T, 2>(Reduced::<T, _, 2>::of(op, from), to),
            2 => plan.vectors::<T, 6>(Reduced::<T, _, 2>::of(op, from), to),
            4 if fourfold => plan.vectors::<T, 1>(Reduced::<T, _, 4>::of(op, from), to),
            4 => plan.vectors::<T, 3>(Reduced::<T, _, 4>::of(op, from), to),
            8 => plan.vectors::<T, 1>(Reduced::<T, _, 8>::of(op, from), to),
            _ if fourfold => plan.vectors::<T, 1>(many, to),
            _ => plan.vectors::<T, 2>(many, to),
        }
        plan.elements(many, to);
    }
}

/// Computes `dst[dst_index + i] = src[i]` in every rank of `team`, for `i < count`.
///
/// NCCL: `ncclLsaCopy`.
///
/// # Safety
///
/// Every thread of `threads` makes the same call. `src` is valid for `count` reads, aligned, and
/// not written at the same time; each rank's part of `dst` has the elements, which other threads do
/// not access. `team` is within the LSA team.
#[doc(alias = "ncclLsaCopy")]
#[track_caller]
pub unsafe fn lsa_copy<T: Accumulate>(
    threads: impl Into<Threads>,
    src: *const T,
    dst: Window<T>,
    dst_index: usize,
    count: usize,
    team: Team,
) {
    let call = CoopCall::new("lsa_copy")
        .arg("source", src.addr() as u64)
        .arg("destination's window", dst.as_raw().addr() as u64)
        .arg("destination's index", dst_index as u64)
        .arg("count", count as u64)
        .arg("ranks", team.n_ranks as u64);
    let threads: Threads = threads.into().call(call);
    let (from, to) = (Copied(src), Many(Buffers::of_team_starting_at_self(dst, dst_index, team)));
    // SAFETY: the caller's buffers have `count` elements, and the threads share them out by `Plan`.
    unsafe { Plan::new(threads, &from, &to, count).all::<T, 8>(from, to) }
}

/// Computes `dst[dst_index + i] = op over the ranks of team of src[src_index + i]` in every rank of
/// `team`, for `i < count`.
///
/// A two-shot all-reduce calls this on each rank's share, between barriers.
///
/// NCCL, in C++ and for sums only: `ncclLsaReduceSumCopy`.
///
/// # Safety
///
/// Every thread of `threads` makes the same call. Each rank's part of `src` has the elements, which
/// are not written at the same time; each rank's part of `dst` has the elements, which other
/// threads do not access. `team` is within the LSA team and not empty.
#[doc(alias = "ncclLsaReduceSumCopy")]
#[expect(clippy::too_many_arguments, reason = "two windows, each with an index")]
#[track_caller]
pub unsafe fn lsa_reduce_copy<T: Accumulate>(
    threads: impl Into<Threads>,
    op: impl ReduceOp<T>,
    src: Window<T>,
    src_index: usize,
    dst: Window<T>,
    dst_index: usize,
    count: usize,
    team: Team,
) {
    let call = CoopCall::new("lsa_reduce_copy")
        .arg("source's window", src.as_raw().addr() as u64)
        .arg("source's index", src_index as u64)
        .arg("destination's window", dst.as_raw().addr() as u64)
        .arg("destination's index", dst_index as u64)
        .arg("count", count as u64)
        .arg("ranks", team.n_ranks as u64);
    let threads: Threads = threads.into().call(call);
    let operands = |team: Team| {
        let from = Buffers::of_team_starting_at_self(src, src_index, team);
        let to = Buffers::of_team_starting_at_self(dst, dst_index, team);
        let (many, to_many) = (ReducedMany { op, from }, Many(to));
        (from, to, many, to_many, Plan::new(threads, &many, &to_many, count))
    };
    let (from, to, many, to_many, plan) = operands(team);
    let fourfold = const { widens_fourfold::<T>() };
    // SAFETY: the caller's buffers have `count` elements, and the threads share them out by `Plan`.
    unsafe {
        match team.n_ranks {
            1 => plan.vectors::<T, 4>(Reduced::<T, _, 1>::of(op, from), Each::<T, 1>::of(to)),
            2 if fourfold => {
                plan.vectors::<T, 2>(Reduced::<T, _, 2>::of(op, from), Each::<T, 2>::of(to))
            }
            2 => plan.vectors::<T, 8>(Reduced::<T, _, 2>::of(op, from), Each::<T, 2>::of(to)),
            4 if fourfold => {
                plan.vectors::<T, 1>(Reduced::<T, _, 4>::of(op, from), Each::<T, 4>::of(to))
            }
            4 => plan.vectors::<T, 4>(Reduced::<T, _, 4>::of(op, from), Each::<T, 4>::of(to)),
            8 => plan.vectors::<T, 1>(Reduced::<T, _, 8>::of(op, from), Each::<T, 8>::of(to)),
            _ if fourfold => plan.vectors::<T, 1>(many, to_many),
            _ => plan.vectors::<T, 2>(many, to_many),
        }
        // The operands are recomputed, so that they do not occupy registers during `vectors`.
        let rank = hint::opaque(team.rank as u32) as i32;
        let n_ranks = hint::opaque(team.n_ranks as u32) as i32;
        let (_, _, many, to_many, plan) = operands(Team { n_ranks, rank, ..team });
        plan.elements(many, to_many);
    }
}
