//! Reductions and copies over the LSA team, by load and store.

use cuda_std::prelude::*;
use cuda_std::reduce::{Avg, Max, Sum};
use devcomm_types::{F8E4M3, F8E5M2};
use nccl_device::reduce_copy::{lsa_copy, lsa_reduce, lsa_reduce_copy};
use nccl_device::{Coop, DevComm, Window};

/// Sums `count` elements of every rank into `dst`.
#[kernel(T = [f32, f16, bf16, F8E4M3, F8E5M2, f64, i32, u8])]
pub unsafe fn reduce<T: Accumulate>(
    comm: DevComm,
    src: Window<T>,
    index: usize,
    dst: *mut T,
    count: usize,
) {
    // SAFETY: the test passes windows and buffers with these elements, which no other kernel uses.
    unsafe { lsa_reduce(Coop::cta(), Sum, src, index, dst, count, comm.lsa_team()) }
}

/// Computes the maximum over the ranks, by one warp.
#[kernel(T = [f16])]
pub unsafe fn reduce_by_warp<T: Accumulate>(
    comm: DevComm,
    src: Window<T>,
    index: usize,
    dst: *mut T,
    count: usize,
) {
    // SAFETY: the test passes windows and buffers with these elements, which no other kernel uses.
    unsafe { lsa_reduce(Coop::warp(), Max, src, index, dst, count, comm.lsa_team()) }
}

/// Finds the element of largest magnitude over the ranks, by a closure.
#[kernel(T = [bf16])]
pub unsafe fn reduce_by_closure<T: Accumulate<Acc = f32>>(
    comm: DevComm,
    src: Window<T>,
    index: usize,
    dst: *mut T,
    count: usize,
) {
    let larger = |a: f32, b: f32| if a.abs() > b.abs() { a } else { b };
    // SAFETY: the test passes windows and buffers with these elements, which no other kernel uses.
    unsafe { lsa_reduce(Coop::cta(), larger, src, index, dst, count, comm.lsa_team()) }
}

/// Copies `src` into every rank.
#[kernel(T = [f32, f16, u8])]
pub unsafe fn copy<T: Accumulate>(
    comm: DevComm,
    src: *const T,
    dst: Window<T>,
    index: usize,
    count: usize,
) {
    // SAFETY: the test passes windows and buffers with these elements, which no other kernel uses.
    unsafe { lsa_copy(Coop::cta(), src, dst, index, count, comm.lsa_team()) }
}

/// Averages `count` elements of every rank into every rank.
#[kernel(T = [f32, f16, bf16])]
pub unsafe fn reduce_copy<T: Accumulate>(
    comm: DevComm,
    src: Window<T>,
    src_index: usize,
    dst: Window<T>,
    dst_index: usize,
    count: usize,
) {
    let team = comm.lsa_team();
    let mean = Avg { of: team.n_ranks as u32 };
    // SAFETY: the test passes windows and buffers with these elements, which no other kernel uses.
    unsafe { lsa_reduce_copy(Coop::cta(), mean, src, src_index, dst, dst_index, count, team) }
}
