//! Over the ranks that load and store reach.

use core::mem::size_of;

use cuda_std::hint;
use cuda_std::reduce::ReduceOp;
use cuda_std::vector::Accumulate;
use devcomm_types::Team;

use super::parts::Parts;
use super::pass::Plan;
use super::sink::{Each, Many, One};
use super::source::{Copied, Reduced, ReducedMany};
use super::threads::Threads;
use crate::Window;

// How many vectors a thread has in flight: for the usual numbers of ranks about twelve loads, as
// many as leave registers for 512 threads. Latency hiding decides the speed over NVLink.

/// Whether a vector takes four times its registers while it is reduced: fewer are in flight then.
const fn widens_fourfold<T: Accumulate>() -> bool {
    size_of::<T>() == 1
}

/// `dst[i] = op over the ranks of team of src[src_index + i]`, for `i < count`.
///
/// Every rank that reduces the same elements gets the same bits.
///
/// C++ has it for sums only: `ncclLsaReduceSum`.
///
/// # Safety
///
/// Every one of `threads` calls it alike. Each rank's part of `src` has the elements, and nobody
/// writes them at the same time; `dst` is valid for `count` writes, aligned, and touched by nobody
/// else. Team members are within load and store, and there is one at least.
#[doc(alias = "ncclLsaReduceSum")]
#[cfg_attr(target_arch = "nvptx64", inline(always))]
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
    let from = Parts::of_team(src, src_index, team);
    let (many, to) = (ReducedMany { op, from }, One(dst));
    let plan = Plan::new(threads.into(), &many, &to, count);
    let small = const { widens_fourfold::<T>() };
    // SAFETY: the caller's.
    unsafe {
        match team.n_ranks {
            2 if small => plan.vectors::<T, 2>(Reduced::<T, _, 2>::of(op, from), to),
            2 => plan.vectors::<T, 6>(Reduced::<T, _, 2>::of(op, from), to),
            4 if small => plan.vectors::<T, 1>(Reduced::<T, _, 4>::of(op, from), to),
            4 => plan.vectors::<T, 3>(Reduced::<T, _, 4>::of(op, from), to),
            8 => plan.vectors::<T, 1>(Reduced::<T, _, 8>::of(op, from), to),
            _ if small => plan.vectors::<T, 1>(many, to),
            _ => plan.vectors::<T, 2>(many, to),
        }
        plan.elements(many, to);
    }
}

/// `dst[dst_index + i] = src[i]` in every rank of `team`, for `i < count`.
///
/// NCCL: `ncclLsaCopy`.
///
/// # Safety
///
/// Every one of `threads` calls it alike. `src` is valid for `count` reads and aligned, and nobody
/// writes there at the same time; each rank's part of `dst` has the elements, and nobody else
/// touches them. Team members are within load and store.
#[doc(alias = "ncclLsaCopy")]
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub unsafe fn lsa_copy<T: Accumulate>(
    threads: impl Into<Threads>,
    src: *const T,
    dst: Window<T>,
    dst_index: usize,
    count: usize,
    team: Team,
) {
    let (from, to) = (Copied(src), Many(Parts::of_team_from_own(dst, dst_index, team)));
    // SAFETY: the caller's.
    unsafe { Plan::new(threads.into(), &from, &to, count).all::<T, 8>(from, to) }
}

/// `dst[dst_index + i] = op over the ranks of team of src[src_index + i]` in every rank of `team`,
/// for `i < count`.
///
/// The two-shot all-reduce is this over each rank's share, between barriers.
///
/// C++ has it for sums only: `ncclLsaReduceSumCopy`.
///
/// # Safety
///
/// Every one of `threads` calls it alike. Each rank's part of `src` has the elements, and nobody
/// writes them at the same time; each rank's part of `dst` has the elements, and nobody else
/// touches them. Team members are within load and store, and there is one at least.
#[doc(alias = "ncclLsaReduceSumCopy")]
#[expect(clippy::too_many_arguments, reason = "two places, each a window and an index")]
#[cfg_attr(target_arch = "nvptx64", inline(always))]
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
    let threads = threads.into();
    let places = |team: Team| {
        let from = Parts::of_team_from_own(src, src_index, team);
        let to = Parts::of_team_from_own(dst, dst_index, team);
        let (many, to_many) = (ReducedMany { op, from }, Many(to));
        (from, to, many, to_many, Plan::new(threads, &many, &to_many, count))
    };
    let (from, to, many, to_many, plan) = places(team);
    let small = const { widens_fourfold::<T>() };
    // SAFETY: the caller's.
    unsafe {
        match team.n_ranks {
            1 => plan.vectors::<T, 4>(Reduced::<T, _, 1>::of(op, from), Each::<T, 1>::of(to)),
            2 if small => {
                plan.vectors::<T, 2>(Reduced::<T, _, 2>::of(op, from), Each::<T, 2>::of(to))
            }
            2 => plan.vectors::<T, 8>(Reduced::<T, _, 2>::of(op, from), Each::<T, 2>::of(to)),
            4 if small => {
                plan.vectors::<T, 1>(Reduced::<T, _, 4>::of(op, from), Each::<T, 4>::of(to))
            }
            4 => plan.vectors::<T, 4>(Reduced::<T, _, 4>::of(op, from), Each::<T, 4>::of(to)),
            8 => plan.vectors::<T, 1>(Reduced::<T, _, 8>::of(op, from), Each::<T, 8>::of(to)),
            _ if small => plan.vectors::<T, 1>(many, to_many),
            _ => plan.vectors::<T, 2>(many, to_many),
        }
        // Recomputed, so that it takes no registers from the vectors.
        let rank = hint::opaque(team.rank as u32) as i32;
        let n_ranks = hint::opaque(team.n_ranks as u32) as i32;
        let (_, _, many, to_many, plan) = places(Team { n_ranks, rank, ..team });
        plan.elements(many, to_many);
    }
}
