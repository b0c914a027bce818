//! All-reduce (sum) over several LSA teams: by load and store within each team, over the network
//! (GIN) between the teams.

use cuda_std::hint;
use cuda_std::prelude::*;
use cuda_std::strided::Strided;
use half::{bf16, f16};
use nccl_device::gin::GinBackend;
use nccl_device::{BarrierIndex, Coop, DevComm, FenceLevel, MemoryOrder, Window};

/// Sums over all ranks: `recv[i]` becomes the sum of `send[i]`, for `i < count`, in every rank.
///
/// Each rank of a team has a slice of the elements, and takes three steps: it sums its slice over
/// its team; exchanges that partial sum with the ranks of its rail, which have the same slice in
/// the other teams; and stores the sum of the partial sums to all ranks of its team. f16 and bf16
/// are summed in f32 and rounded twice: the partial sums, which cross the network, and the result.
/// All ranks get the same bits. `recv` may be `send`.
///
/// Grid: any, up to the signals and hybrid barriers that the host reserved, the same in every rank.
/// Block: any, one-dimensional, the same in every rank. `count` is in elements, the same in every
/// rank. Connections: RAIL or FULL.
///
/// # Safety
///
/// Nothing else accesses the windows until the kernel has ended in every rank. The launch checks
/// their lengths: `partial` must have [`hybrid_allreduce_partials`] elements.
#[kernel(
    T = [f32, f16, bf16],
    B = gin,
    requires(
        count <= send.len(),
        count <= recv.len(),
        hybrid_allreduce_partials(
            count,
            comm.lsa_team().n_ranks as usize,
            comm.rail_team().n_ranks as usize
        ) <= partial.len()
    )
)]
pub unsafe fn hybrid_allreduce<T: Accumulate, B: GinBackend>(
    comm: DevComm,
    send: Window<T>,
    recv: Window<T>,
    partial: Window<T>,
    count: usize,
) {
    let (lsa, rail, coop) = (comm.lsa_team(), comm.rail_team(), Coop::cta());
    let block = thread::block_idx_x();
    let gin = comm.gin::<B>(block % comm.n_gin_contexts().max(1)); // `gin` traps without contexts.
    let arrived = comm.signal(block);
    let Chunk { row, begin, first, len } = Chunk::of_block(&comm, block, count);
    let (partials, own) = (partial.local().as_ptr(), rail.rank as usize * row + begin);

    let mut barrier = gin.hybrid_barrier(coop, BarrierIndex::this_block());
    // After this, every rank's input is complete, and no rank reads an earlier launch's sums.
    barrier.sync(MemoryOrder::Acquire, FenceLevel::None);
    // SAFETY: the kernel's contract; between the barriers each element is accessed by one block of
    // one rank of the team.
    unsafe {
        let from = |i| send.lsa(lsa.rotated(i)).as_ptr().add(first);
        sum(lsa.n_ranks, from, 1, |_| partials.add(own), len);
    }
    coop.sync(); // A put reads what all threads have stored.
    if len > 0 {
        // One thread puts to each peer.
        let others = (rail.n_ranks - 1) as u32;
        for i in coop.strided(others) {
            let team = rail.rotated(1 + i as i32);
            // SAFETY: the kernel's contract; a partial sum is read after its signal.
            let put = unsafe { gin.put(rail, team, partial.at(own), partial.at(own), len) };
            put.signal(arrived.inc().weak()).post(Coop::thread());
        }
        gin.wait_signal_follow_shadow(coop, arrived, others.into(), MemoryOrder::Acquire);
    }
    // SAFETY: the kernel's contract, as above; row `t` holds the partial sum of team `t`.
    unsafe {
        let from = |team| partials.add(team as usize * row + begin);
        let to = |i| recv.lsa(lsa.rotated(i)).as_ptr().add(first);
        sum(rail.n_ranks, from, lsa.n_ranks, to, len);
    }
    // After the flush the puts have read `partial`; after the barrier every rank has its sums.
    gin.flush(coop, MemoryOrder::Relaxed);
    barrier.lsa().sync(MemoryOrder::Release);
}

/// The elements that a block sums: a chunk of its rank's slice.
struct Chunk {
    /// Elements of a slice, and of a row of partial sums. There is one row per team.
    row: usize,
    /// Index of the chunk's first element in its row.
    begin: usize,
    /// Index of the chunk's first element in `send` and `recv`.
    first: usize,
    /// Number of elements.
    len: usize,
}

impl Chunk {
    fn of_block(comm: &DevComm, block: u32, count: usize) -> Self {
        let lsa = comm.lsa_team();
        let row = slice(count, lsa.n_ranks as usize);
        let max_len = slice(row, thread::grid_dim_x() as usize);
        let begin = (block as usize * max_len).min(row);
        let first = (lsa.rank as usize * row + begin).min(count);
        Self { row, begin, first, len: max_len.min(row - begin).min(count - first) }
    }
}

/// Sums elements by the threads of the block: `to(j)[k] = sum over i < n_from of from(i)[k]` for
/// each `j < n_to`, for `k < len`.
///
/// # Safety
///
/// All pointers point to `len` elements, 16-byte aligned; no other thread writes the inputs or
/// accesses the outputs. `n_from` is at least 1.
unsafe fn sum<T: Accumulate>(
    n_from: i32,
    from: impl Fn(i32) -> *mut T,
    n_to: i32,
    to: impl Fn(i32) -> *mut T,
    len: usize,
) {
    /// Vectors of each input that a thread has in flight.
    const UNROLL: usize = 2;
    let (lanes, threads) = (Vec16::<T>::LANES, thread::block_dim_x() as usize);
    let vectors = len / lanes;
    let mut at = thread::thread_idx_x() as usize;
    // SAFETY: the indices are below `len`, and the caller guarantees `len` aligned elements.
    unsafe {
        while at + (UNROLL - 1) * threads < vectors {
            sum_vectors::<T, UNROLL>(n_from, &from, n_to, &to, at);
            at += UNROLL * threads;
        }
        for at in Strided::new(at, vectors, threads) {
            sum_vectors::<T, 1>(n_from, &from, n_to, &to, at);
        }
        // The elements after the last whole vector.
        for at in Strided::new(vectors * lanes + thread::thread_idx_x() as usize, len, threads) {
            let at = hint::opaque_usize(at);
            let mut sum = mem::load(from(0).add(at)).to_acc();
            for i in 1..n_from {
                sum += mem::load(from(i).add(at)).to_acc();
            }
            for j in 0..n_to {
                mem::store(to(j).add(at), T::from_acc(sum));
            }
        }
    }
}

/// Sums `U` vectors, from vector `at` on with a stride of the block's threads.
///
/// # Safety
///
/// The contract is that of [`sum`].
unsafe fn sum_vectors<T: Accumulate, const U: usize>(
    n_from: i32,
    from: &impl Fn(i32) -> *mut T,
    n_to: i32,
    to: &impl Fn(i32) -> *mut T,
    at: usize,
) {
    // The index is opaque, so that the compiler computes all addresses from it.
    let at = hint::opaque_usize(at);
    let offset = |u: usize| (at + u * thread::block_dim_x() as usize) * Vec16::<T>::LANES;
    // SAFETY: the indices are below `len`, and the caller guarantees `len` aligned elements.
    unsafe {
        let mut loaded = [Vec16::<T>::from_bits([0; 4]); U];
        let mut sums = loaded.map(T::widen);
        for i in 0..n_from {
            for (u, vector) in loaded.iter_mut().enumerate() {
                *vector = mem::load_vec(from(i).add(offset(u)));
            }
            for (sum, vector) in sums.iter_mut().zip(&loaded) {
                T::add(sum, *vector);
            }
        }
        for j in 0..n_to {
            for (u, sum) in sums.iter().enumerate() {
                mem::store_vec(to(j).add(offset(u)), T::narrow(*sum));
            }
        }
    }
}

/// Returns the length of `partial` that [`hybrid_allreduce`](fn@hybrid_allreduce) of `count`
/// elements needs in every rank, with `n_teams` teams of `team_ranks` ranks: one slice per team.
#[must_use]
pub const fn hybrid_allreduce_partials(count: usize, team_ranks: usize, n_teams: usize) -> usize {
    slice(count, team_ranks) * n_teams
}

/// Slices and chunks are multiples of this many elements: whole 16-byte vectors of every type.
const MULTIPLE: usize = 8;

/// Returns the number of elements per part, if `count` elements are divided into `parts`; the last
/// part may be shorter.
const fn slice(count: usize, parts: usize) -> usize {
    let parts = if parts == 0 { 1 } else { parts };
    count.div_ceil(parts).next_multiple_of(MULTIPLE)
}
