//! All-reduce (sum) by load and store within the LSA team, in two steps: every rank sums its slice
//! of all ranks' inputs, and stores the sum to all ranks.
//!
//! `lsa_reduce_copy` of `nccl_device` does the same for any operator and any offset, in a kernel of
//! 25 lines (`bench/kernels/src/reduce_copy.rs`). This kernel relies on the 16-byte alignment of
//! windows and computes each rank's slice itself, which saves 0.2 us before the first load.

use crate::prelude::*;

/// Sums over the ranks: `recv[i]` becomes the sum of `send[i]`, for `i < count`, in every rank of
/// the LSA team.
///
/// f16 and bf16 are summed in f32 and rounded once. All ranks get the same bits. `recv` may be
/// `send`. Nothing else writes to the windows until the kernel has ended in every rank, or the sums
/// are wrong.
///
/// Grid: any, up to the device communicator's LSA barriers, the same in every rank. Block: any,
/// one-dimensional, the same in every rank. `count` is in elements.
#[kernel(T = [f32, f16, bf16], in_place, requires(count <= send.len(), count <= recv.len()))]
pub fn lsa_allreduce<T: Accumulate>(comm: DevComm, send: Window<T>, recv: Window<T>, count: usize) {
    let team = comm.lsa_team();
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire); // Every rank's input is complete.
    // SAFETY: the launch checks both lengths; between the barriers one thread accesses an element.
    unsafe {
        match team.n_ranks {
            1 => sum_slice::<T, 1, 4>(team, send, recv, count),
            2 => sum_slice::<T, 2, 8>(team, send, recv, count),
            4 => sum_slice::<T, 4, 4>(team, send, recv, count),
            8 => sum_slice::<T, 8, 1>(team, send, recv, count),
            _ => {
                let (begin, end) = slice_of::<T>(team, count);
                for i in thread::grid_strided(end - begin) {
                    let at = (begin + i) * Vec16::<T>::LANES;
                    recv.store_vec_to_all(team, at, T::narrow(send.sum_vec(team, at)));
                }
            }
        }
        sum_tail(team, send, recv, count);
    }
    barrier.sync(MemoryOrder::Release); // Every rank has the sums of all slices.
}

/// Returns this rank's slice: a contiguous range of the whole 16-byte vectors, as vector indices.
fn slice_of<T: Accumulate>(team: Team, count: usize) -> (usize, usize) {
    let (n_ranks, rank) = (team.n_ranks as usize, team.rank as usize);
    let vectors = count / Vec16::<T>::LANES;
    // SAFETY: a team has at least one rank. (A check would add the kernel's only function call.)
    unsafe { core::hint::assert_unchecked(n_ranks > 0) };
    let len = vectors.div_ceil(n_ranks);
    let begin = (len * rank).min(vectors);
    (begin, (begin + len).min(vectors))
}

/// Sums this rank's slice for a team of `N` ranks, with `UNROLL` vectors of each rank in flight per
/// thread. Both windows have `count` elements in every rank, and only this rank accesses its slice.
unsafe fn sum_slice<T: Accumulate, const N: usize, const UNROLL: usize>(
    team: Team,
    send: Window<T>,
    recv: Window<T>,
    count: usize,
) {
    // Each rank starts with its own window and takes the peers in ascending order, so that at any
    // time the ranks read from and write to different peers.
    let (mut from, mut to) = ([send.local(); N], [recv.local(); N]);
    for i in 1..N {
        let peer = ((team.rank as usize + i) % N) as i32;
        (from[i], to[i]) = (send.lsa(peer), recv.lsa(peer));
    }
    // A row is one vector per thread of the grid; UNROLL rows are in flight.
    let row = (thread::grid_dim_x() * thread::block_dim_x()) as usize;
    let (begin, end) = slice_of::<T>(team, count);
    let mut at = begin + thread::index_1d() as usize;
    let mut loaded = [[Vec16::<T>::from_bits([0; 4]); N]; UNROLL];
    // SAFETY: the vectors are in this rank's slice, so below `count`; the caller ensures the rest.
    unsafe {
        while at + (UNROLL - 1) * row < end {
            for (u, parts) in loaded.iter_mut().enumerate() {
                load_each(&from, at + u * row, parts);
            }
            for (u, parts) in loaded.iter().enumerate() {
                store_each(&to, at + u * row, sum_of(parts));
            }
            at += UNROLL * row;
        }
        // The remaining rows, fewer than UNROLL, are also in flight together.
        for (u, parts) in loaded.iter_mut().enumerate() {
            if at + u * row < end {
                load_each(&from, at + u * row, parts);
            }
        }
        for (u, parts) in loaded.iter().enumerate() {
            if at + u * row < end {
                store_each(&to, at + u * row, sum_of(parts));
            }
        }
    }
}

/// Loads vector `at` from each rank. The conditions are those of [`LsaPtr::load_vec`].
unsafe fn load_each<T: Accumulate, const N: usize>(
    from: &[LsaPtr<T>; N],
    at: usize,
    parts: &mut [Vec16<T>; N],
) {
    let at = at * Vec16::<T>::LANES;
    for (part, from) in parts.iter_mut().zip(from) {
        // SAFETY: the vector is below the window's end, as the caller guarantees.
        *part = unsafe { from.load_vec(at) };
    }
}

/// Returns the sum of one vector of each rank.
fn sum_of<T: Accumulate, const N: usize>(parts: &[Vec16<T>; N]) -> Vec16<T> {
    let mut sum = T::widen(parts[0]);
    for part in &parts[1..] {
        T::add(&mut sum, *part);
    }
    T::narrow(sum)
}

/// Stores vector `at` to each rank. The conditions are those of [`LsaPtr::store_vec`].
unsafe fn store_each<T: Accumulate, const N: usize>(to: &[LsaPtr<T>; N], at: usize, sum: Vec16<T>) {
    let at = at * Vec16::<T>::LANES;
    for to in to {
        // SAFETY: the vector is below the window's end, as the caller guarantees.
        unsafe { to.store_vec(at, sum) };
    }
}

/// Sums the elements after the last whole vector, in the last rank. Both windows have `count`
/// elements in every rank, and only this rank accesses these elements.
unsafe fn sum_tail<T: Accumulate>(team: Team, send: Window<T>, recv: Window<T>, count: usize) {
    if team.rank + 1 < team.n_ranks {
        return;
    }
    let first = count / Vec16::<T>::LANES * Vec16::<T>::LANES;
    for i in thread::grid_strided(count - first) {
        // SAFETY: the index is below `count`; the caller ensures the rest.
        unsafe {
            let mut sum = send.lsa(0).load(first + i).to_acc();
            for peer in 1..team.n_ranks {
                sum += send.lsa(peer).load(first + i).to_acc();
            }
            for peer in team.all_from_self() {
                recv.lsa(peer).store(first + i, T::from_acc(sum));
            }
        }
    }
}
