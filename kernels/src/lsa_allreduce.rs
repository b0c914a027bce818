//! All-reduce (sum) by load and store within the LSA team, in two steps: every rank sums its slice of all ranks' inputs, and
//! stores the sum to all ranks.

use cuda_std::prelude::*;
use cuda_std::vector::{Accumulate, Vec16};
use half::{bf16, f16};
use nccl_device::{BarrierIndex, Coop, DevComm, LsaPtr, MemoryOrder, Team, Window};

/// `recv[i] = sum over ranks of send[i]`, for `i < count`, in every rank of the LSA team.
///
/// f16 and bf16 are summed in f32 and rounded once. All ranks get the same bits. `recv` may be `send`.
///
/// Grid: any, up to the device communicator's LSA barriers, the same in every rank. Block: any, one-dimensional, the same in
/// every rank. `count` is in elements.
///
/// # Safety
///
/// Both windows have at least `count` elements in every rank, and nothing else touches them until the kernel has ended
/// in every rank.
#[kernel(T = [f32, f16, bf16])]
pub unsafe fn lsa_allreduce<T: Accumulate>(
    comm: DevComm,
    send: Window<T>,
    recv: Window<T>,
    count: usize,
) {
    let team = comm.lsa_team();
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire);
    // SAFETY: the kernel's contract; between the barriers every element is read and written by one thread of one rank.
    unsafe {
        match team.n_ranks {
            1 => reduce_slice::<T, 1, 4>(team, send, recv, count),
            2 => reduce_slice::<T, 2, 8>(team, send, recv, count),
            4 => reduce_slice::<T, 4, 4>(team, send, recv, count),
            8 => reduce_slice::<T, 8, 1>(team, send, recv, count),
            _ => reduce_slice_of_many(team, send, recv, count),
        }
    }
    barrier.sync(MemoryOrder::Release);
}

/// What one rank sums: a contiguous share of the whole 16-byte vectors, and for the last rank the elements behind them.
struct Share {
    /// Vectors, as a range of vector indices.
    begin: usize,
    end: usize,
    /// First element behind the last whole vector, if this rank sums those.
    tail: Option<usize>,
}

impl Share {
    #[inline(always)]
    fn of<T: Accumulate>(team: Team, count: usize) -> Self {
        let (n_ranks, rank) = (team.n_ranks as usize, team.rank as usize);
        let vectors = count / Vec16::<T>::LANES;
        // SAFETY: a team has at least one rank. (A check here would be the kernel's only call.)
        unsafe { core::hint::assert_unchecked(n_ranks > 0) };
        let each = vectors.div_ceil(n_ranks);
        let begin = (each * rank).min(vectors);
        Self {
            begin,
            end: (begin + each).min(vectors),
            tail: (rank + 1 == n_ranks).then_some(vectors * Vec16::<T>::LANES),
        }
    }
}

/// Sums this rank's share for a team of `N` ranks, with `UNROLL` vectors of each rank in flight in a thread.
///
/// # Safety
///
/// As [`lsa_allreduce`]'s, between barriers.
#[inline(always)]
unsafe fn reduce_slice<T: Accumulate, const N: usize, const UNROLL: usize>(
    team: Team,
    send: Window<T>,
    recv: Window<T>,
    count: usize,
) {
    // Every rank starts with its own part and goes up, so that at any time the ranks read from and write to different peers.
    let peer = |i: usize| ((team.rank as usize + i) % N) as i32;
    let (mut from, mut to) = ([send.local(); N], [recv.local(); N]);
    for i in 1..N {
        from[i] = send.lsa(peer(i));
        to[i] = recv.lsa(peer(i));
    }
    let share = Share::of::<T>(team, count);

    // A row is one vector for each thread of the grid; a thread has UNROLL rows in flight.
    let row = (thread::grid_dim_x() * thread::block_dim_x()) as usize;
    let mut at = share.begin + thread::index_1d() as usize;
    // SAFETY: the vectors lie in this rank's share, so below `count`; the contract gives the rest.
    unsafe {
        let mut loaded = [[Vec16::<T>::from_bits([0; 4]); N]; UNROLL];
        while at + (UNROLL - 1) * row < share.end {
            for (u, parts) in loaded.iter_mut().enumerate() {
                load_each(&from, at + u * row, parts);
            }
            for (u, parts) in loaded.iter().enumerate() {
                store_each(&to, at + u * row, sum_of(parts));
            }
            at += UNROLL * row;
        }
        // The last rows, still all in flight at once.
        for (u, parts) in loaded.iter_mut().enumerate() {
            if at + u * row < share.end {
                load_each(&from, at + u * row, parts);
            }
        }
        for (u, parts) in loaded.iter().enumerate() {
            if at + u * row < share.end {
                store_each(&to, at + u * row, sum_of(parts));
            }
        }
        reduce_tail(team, send, recv, share.tail, count);
    }
}

/// Loads vector `at` of each rank.
///
/// # Safety
///
/// As [`LsaPtr::load_vec`]'s.
#[inline(always)]
unsafe fn load_each<T: Accumulate, const N: usize>(
    from: &[LsaPtr<T>; N],
    at: usize,
    parts: &mut [Vec16<T>; N],
) {
    for (part, from) in parts.iter_mut().zip(from) {
        // SAFETY: the caller's.
        *part = unsafe { from.load_vec(at) };
    }
}

/// The sum of one vector of each rank.
#[inline(always)]
fn sum_of<T: Accumulate, const N: usize>(parts: &[Vec16<T>; N]) -> Vec16<T> {
    let mut sum = T::widen(parts[0]);
    for part in &parts[1..] {
        T::add(&mut sum, *part);
    }
    T::narrow(sum)
}

/// Stores vector `at` of each rank.
///
/// # Safety
///
/// As [`LsaPtr::store_vec`]'s.
#[inline(always)]
unsafe fn store_each<T: Accumulate, const N: usize>(to: &[LsaPtr<T>; N], at: usize, sum: Vec16<T>) {
    for to in to {
        // SAFETY: the caller's.
        unsafe { to.store_vec(at, sum) };
    }
}

/// [`reduce_slice`] for any number of ranks.
///
/// # Safety
///
/// As [`lsa_allreduce`]'s, between barriers.
#[inline(always)]
unsafe fn reduce_slice_of_many<T: Accumulate>(
    team: Team,
    send: Window<T>,
    recv: Window<T>,
    count: usize,
) {
    let peer = |i: i32| {
        let peer = team.rank + i;
        if peer < team.n_ranks { peer } else { peer - team.n_ranks }
    };
    let share = Share::of::<T>(team, count);
    let mut at = share.begin + thread::index_1d() as usize;
    let stride = (thread::grid_dim_x() * thread::block_dim_x()) as usize;
    // SAFETY: the vectors lie in this rank's share, so below `count`; the contract gives the rest.
    unsafe {
        while at < share.end {
            let mut sum = T::widen(send.local().load_vec(at));
            for i in 1..team.n_ranks {
                T::add(&mut sum, send.lsa(peer(i)).load_vec(at));
            }
            let sum = T::narrow(sum);
            for i in 0..team.n_ranks {
                recv.lsa(peer(i)).store_vec(at, sum);
            }
            at += stride;
        }
        reduce_tail(team, send, recv, share.tail, count);
    }
}

/// Sums the elements from `tail` on, fewer than a vector's, one a thread.
///
/// # Safety
///
/// As [`lsa_allreduce`]'s, between barriers.
#[inline(always)]
unsafe fn reduce_tail<T: Accumulate>(
    team: Team,
    send: Window<T>,
    recv: Window<T>,
    tail: Option<usize>,
    count: usize,
) {
    let Some(first) = tail else { return };
    let mut at = first + thread::index_1d() as usize;
    // SAFETY: below `count`; the contract gives the rest.
    unsafe {
        while at < count {
            let mut sum = send.lsa(0).load(at).to_acc();
            for peer in 1..team.n_ranks {
                sum += send.lsa(peer).load(at).to_acc();
            }
            let sum = T::from_acc(sum);
            for peer in 0..team.n_ranks {
                recv.lsa(peer).store(at, sum);
            }
            at += (thread::grid_dim_x() * thread::block_dim_x()) as usize;
        }
    }
}
