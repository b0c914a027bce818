//! RMSNorm fused with the all-reduce before it, within the LSA team: what a tensor-parallel layer does between its two halves, in
//! one kernel and one pass over the data. In two forms: by load and store, and by multicast.

use core::cell::Cell;

use cuda_std::math;
use cuda_std::multimem;
use cuda_std::prelude::*;
use cuda_std::reduce::Sum;
use cuda_std::vector::{Accumulate, Vec16};
use devcomm_types::nccl::MultimemHandle;
use half::{bf16, f16};
use nccl_device::reduce_copy::MultimemReduce;
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Team, Window};

/// `output[t] = sum[t] * weight / sqrt(mean(sum[t]^2) + eps)` for each token `t < tokens`, where `sum[t]` is the sum of row `t` of
/// `input` over the ranks of the LSA team. Every rank gets every row; all get the same bits.
///
/// A row has `hidden` elements. f16 and bf16 are summed and normalised in f32 and rounded once. `output` may be `input`.
///
/// Grid: any, up to the device communicator's LSA barriers, the same in every rank; each block takes a row at a time. Block: a
/// multiple of 32 threads, one-dimensional, the same in every rank.
///
/// # Safety
///
/// Both windows have at least `tokens * hidden` elements in every rank, `weight` has `hidden`, aligned to 16 bytes, and nothing
/// else touches them until the kernel has ended in every rank. `hidden` is a multiple of the elements in 16 bytes, and at most
/// [`VECTORS`] times that many a thread of the block.
#[kernel(T = [f32, f16, bf16])]
pub unsafe fn rmsnorm_allreduce<T: Accumulate<Acc = f32>>(
    comm: DevComm,
    input: Window<T>,
    weight: *const T,
    output: Window<T>,
    tokens: usize,
    hidden: usize,
    eps: f32,
) {
    let team = comm.lsa_team();
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire);
    let rows = Rows { team, tokens, hidden, eps };
    // SAFETY: the kernel's contract; between the barriers a row is one block's of one rank.
    unsafe {
        let store = |at, vector| to_all(team, output, at, vector);
        match team.n_ranks {
            2 => rows.each(weight, |at| sum_of::<T, 2>(team, input, at), store),
            4 => rows.each(weight, |at| sum_of::<T, 4>(team, input, at), store),
            8 => rows.each(weight, |at| sum_of::<T, 8>(team, input, at), store),
            _ => rows.each(weight, |at| sum_of_many(team, input, at), store),
        }
    }
    barrier.sync(MemoryOrder::Release);
}

/// [`rmsnorm_allreduce`] by multicast: the switch sums a row while it is read, and copies it to all ranks while it is written. The
/// sums are the switch's: in f32, rounded to the element's type.
///
/// Grid, block: as there. The device communicator was made with `lsa_multimem`, or the kernel traps.
///
/// # Safety
///
/// As [`rmsnorm_allreduce`]'s.
#[kernel(T = [f32, f16, bf16])]
pub unsafe fn rmsnorm_allreduce_multimem<T: Accumulate<Acc = f32> + MultimemReduce<Sum>>(
    comm: DevComm,
    input: Window<T>,
    weight: *const T,
    output: Window<T>,
    tokens: usize,
    hidden: usize,
    eps: f32,
) {
    let multicast = comm.lsa_multimem();
    assert!(multicast.is_some(), "the device communicator was made without lsa_multimem");
    let multicast = multicast.unwrap_or(MultimemHandle::NULL);
    // SAFETY: the mapping of the LSA team, whose barriers these are.
    let barriers = unsafe { comm.lsa_barriers().over_multimem(multicast) };
    let mut barrier = barriers.barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire);
    let rows = Rows { team: comm.lsa_team(), tokens, hidden, eps };
    let (from, to) = (input.multimem(&comm), output.multimem(&comm));
    let lanes = Vec16::<T>::LANES;
    // SAFETY: the kernel's contract; between the barriers a row is one block's of one rank.
    unsafe {
        rows.each(
            weight,
            |at| T::widen(multimem::load_reduce_vec(Sum, from.add(at * lanes))),
            |at, vector| multimem::store_vec(to.add(at * lanes), vector),
        );
    }
    barrier.sync(MemoryOrder::Release);
}

/// Vectors of a row that a thread holds.
pub const VECTORS: usize = 4;

/// The rows of this rank's share.
#[derive(Clone, Copy)]
struct Rows {
    team: Team,
    tokens: usize,
    /// Elements of a row.
    hidden: usize,
    eps: f32,
}

impl Rows {
    /// Normalises each row: `load` gives the sum of vector `at` over the ranks, `store` takes the result.
    ///
    /// # Safety
    ///
    /// As [`rmsnorm_allreduce`]'s, between barriers.
    #[inline(always)]
    unsafe fn each<T: Accumulate<Acc = f32>>(
        self,
        weight: *const T,
        load: impl Fn(usize) -> T::Wide,
        store: impl Fn(usize, Vec16<T>),
    ) {
        let lanes = Vec16::<T>::LANES;
        let vectors = self.hidden / lanes;
        let mine = |v: usize| thread::thread_idx_x() as usize + v * thread::block_dim_x() as usize;
        // The ranks take the rows in turn.
        let stride = thread::grid_dim_x() as usize * self.team.n_ranks as usize;
        let mut row =
            self.team.rank as usize + thread::block_idx_x() as usize * self.team.n_ranks as usize;
        while row < self.tokens {
            let first = row * vectors;
            let mut held = [T::widen(Vec16::from_bits([0; 4])); VECTORS];
            let squares = Cell::new(0.0);
            let mut v = 0;
            while v < VECTORS {
                if mine(v) < vectors {
                    held[v] = load(first + mine(v));
                    T::map(&mut held[v], |x| {
                        squares.set(squares.get() + x * x);
                        x
                    });
                }
                v += 1;
            }
            let mean = block_sum(squares.get()) / self.hidden as f32;
            let scale = math::rsqrt(mean + self.eps);
            let mut v = 0;
            while v < VECTORS {
                if mine(v) < vectors {
                    // SAFETY: `weight` has a vector for each of a row.
                    let factors = T::widen(unsafe { mem::load_vec(weight.add(mine(v) * lanes)) });
                    T::zip(&mut held[v], factors, |x, w| x * scale * w);
                    store(first + mine(v), T::narrow(held[v]));
                }
                v += 1;
            }
            row += stride;
        }
    }
}

/// The sum of vector `at` over a team of `N` ranks. Every rank starts with its own part and goes up.
///
/// # Safety
///
/// Every part has the vector.
#[inline(always)]
unsafe fn sum_of<T: Accumulate, const N: usize>(
    team: Team,
    input: Window<T>,
    at: usize,
) -> T::Wide {
    let mut parts = [Vec16::from_bits([0; 4]); N];
    let mut i = 0;
    while i < N {
        let peer = (team.rank as usize + i) % N;
        // SAFETY: the caller's.
        parts[i] = unsafe { input.lsa(peer as i32).load_vec(at) };
        i += 1;
    }
    let mut sum = T::widen(parts[0]);
    let mut i = 1;
    while i < N {
        T::add(&mut sum, parts[i]);
        i += 1;
    }
    sum
}

/// [`sum_of`] for any number of ranks.
///
/// # Safety
///
/// Every part has the vector.
#[inline(always)]
unsafe fn sum_of_many<T: Accumulate>(team: Team, input: Window<T>, at: usize) -> T::Wide {
    let mut sum = T::widen(Vec16::from_bits([0; 4]));
    let mut peer = 0;
    while peer < team.n_ranks {
        // SAFETY: the caller's.
        T::add(&mut sum, unsafe { input.lsa(peer).load_vec(at) });
        peer += 1;
    }
    sum
}

/// Stores vector `at` in every rank.
///
/// # Safety
///
/// Every part has the vector, and nobody else touches it.
#[inline(always)]
unsafe fn to_all<T: Accumulate>(team: Team, output: Window<T>, at: usize, vector: Vec16<T>) {
    let mut i = 0;
    while i < team.n_ranks {
        let peer = team.rank + i;
        // SAFETY: the caller's.
        unsafe {
            output
                .lsa(if peer < team.n_ranks { peer } else { peer - team.n_ranks })
                .store_vec(at, vector)
        };
        i += 1;
    }
}

/// The sum over the threads of the block, in every thread, always in the same order.
#[inline(always)]
fn block_sum(mine: f32) -> f32 {
    let of_warps = shared_array![f32; 32];
    let mut sum = mine;
    let mut distance = warp::WARP_SIZE / 2;
    while distance > 0 {
        // SAFETY: every lane is here: blocks are whole warps, and rows are taken by whole blocks.
        sum += unsafe { warp::shuffle_xor(sum, distance) };
        distance /= 2;
    }
    // SAFETY: a place a warp, of which a block has at most 32; barriers separate the writes from the reads, and the reads from the
    // next writes.
    unsafe {
        if warp::lane_id() == 0 {
            mem::store(of_warps.add(warp::warp_id() as usize), sum);
        }
        thread::sync_threads();
        let warps = thread::block_dim_x().div_ceil(warp::WARP_SIZE) as usize;
        let mut total = 0.0;
        let mut i = 0;
        while i < warps {
            total += mem::load(of_warps.add(i));
            i += 1;
        }
        thread::sync_threads();
        total
    }
}
