//! RMSNorm fused with the all-reduce that precedes it in a tensor-parallel layer, within the LSA
//! team: one kernel that makes one pass over the data. There are two forms: by load and store, and
//! by multicast.

use core::cell::Cell;

use cuda_std::math;
use cuda_std::multimem;
use cuda_std::prelude::*;
use cuda_std::reduce::Sum;
use cuda_std::strided::Strided;
use cuda_std::vector::{Accumulate, Vec16};
use devcomm_types::nccl::MultimemHandle;
use half::{bf16, f16};
use nccl_device::reduce_copy::MultimemReduce;
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Team, Window};

/// Normalises sums of rows: `output[t] = sum[t] * weight / sqrt(mean(sum[t]^2) + eps)` for each
/// token `t < tokens`, where `sum[t]` is the sum of row `t` of `input` over the ranks of the LSA
/// team. Every rank gets every row; all get the same bits.
///
/// A row has `hidden` elements. f16 and bf16 are summed and normalised in f32 and rounded once.
/// `output` may be `input`.
///
/// Grid: any, up to the device communicator's LSA barriers, the same in every rank; a block
/// processes one row at a time. Block: a multiple of 32 threads, one-dimensional, the same in every
/// rank.
///
/// # Safety
///
/// `weight` has `hidden` elements, aligned to 16 bytes, and nothing else accesses it or the windows
/// until the kernel has ended in every rank. A row has at most [`VECTORS`] 16-byte vectors per
/// thread of the block. The launch checks the windows' lengths.
#[kernel(
    T = [f32, f16, bf16],
    requires(
        tokens.saturating_mul(hidden) <= input.len(),
        tokens.saturating_mul(hidden) <= output.len(),
        hidden.is_multiple_of(Vec16::<T>::LANES)
    )
)]
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
    // SAFETY: the kernel's contract; each row is accessed by one block of one rank between the
    // barriers.
    unsafe {
        let store = |at, vector| output.store_vec_to_all(team, at, vector);
        match team.n_ranks {
            2 => rows.each(weight, |at| input.sum_vec_of::<2>(team, at), store),
            4 => rows.each(weight, |at| input.sum_vec_of::<4>(team, at), store),
            8 => rows.each(weight, |at| input.sum_vec_of::<8>(team, at), store),
            _ => rows.each(weight, |at| input.sum_vec(team, at), store),
        }
    }
    barrier.sync(MemoryOrder::Release);
}

/// Normalises as [`rmsnorm_allreduce`](fn@rmsnorm_allreduce) does, by multicast: the switch sums a
/// row over the ranks on load, and copies it to all ranks on store. The switch sums in f32 and
/// rounds to the element type.
///
/// Grid and block: the same as for that kernel. The kernel traps if the device communicator was
/// created without `lsa_multimem`.
///
/// # Safety
///
/// The contract is that of [`rmsnorm_allreduce`](fn@rmsnorm_allreduce).
#[kernel(
    T = [f32, f16, bf16],
    requires(
        tokens.saturating_mul(hidden) <= input.len(),
        tokens.saturating_mul(hidden) <= output.len(),
        hidden.is_multiple_of(Vec16::<T>::LANES)
    )
)]
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
    assert!(multicast.is_some(), "the device communicator was created without lsa_multimem");
    let multicast = multicast.unwrap_or(MultimemHandle::NULL); // Always a handle here.
    // SAFETY: the multicast mapping and the barriers are both of the LSA team.
    let barriers = unsafe { comm.lsa_barriers().over_multimem(multicast) };
    let mut barrier = barriers.barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire);
    let rows = Rows { team: comm.lsa_team(), tokens, hidden, eps };
    let (from, to) = (input.multimem(&comm), output.multimem(&comm));
    // SAFETY: the kernel's contract; each row is accessed by one block of one rank between the
    // barriers.
    unsafe {
        rows.each(
            weight,
            |at| T::widen(multimem::load_reduce_vec(Sum, from.add(at))),
            |at, vector| multimem::store_vec(to.add(at), vector),
        );
    }
    barrier.sync(MemoryOrder::Release);
}

/// Maximum number of 16-byte vectors of a row per thread; they stay in registers.
pub const VECTORS: usize = 4;

/// The shape of the input, and how to normalise it.
#[derive(Clone, Copy)]
struct Rows {
    team: Team,
    tokens: usize,
    /// Elements of a row.
    hidden: usize,
    eps: f32,
}

impl Rows {
    /// Normalises this rank's share of the rows: `load` returns the sum over the ranks of the
    /// vector from element `at` on, and `store` stores the result.
    ///
    /// # Safety
    ///
    /// The contract is that of [`rmsnorm_allreduce`](fn@rmsnorm_allreduce), between barriers.
    unsafe fn each<T: Accumulate<Acc = f32>>(
        self,
        weight: *const T,
        load: impl Fn(usize) -> T::Wide,
        store: impl Fn(usize, Vec16<T>),
    ) {
        let lanes = Vec16::<T>::LANES;
        let vectors = self.hidden / lanes;
        // The thread's vector `v` of a row.
        let mine = |v: usize| thread::thread_idx_x() as usize + v * thread::block_dim_x() as usize;
        // The ranks take the rows round-robin.
        let (rank, n_ranks) = (self.team.rank as usize, self.team.n_ranks as usize);
        let first = rank + thread::block_idx_x() as usize * n_ranks;
        for row in Strided::new(first, self.tokens, thread::grid_dim_x() as usize * n_ranks) {
            let first = row * self.hidden;
            let mut held = [T::widen(Vec16::from_bits([0; 4])); VECTORS];
            let squares = Cell::new(0.0);
            let mut v = 0;
            while v < VECTORS {
                if mine(v) < vectors {
                    held[v] = load(first + mine(v) * lanes);
                    T::map(&mut held[v], |x| {
                        squares.set(squares.get() + x * x);
                        x
                    });
                }
                v += 1;
            }
            // SAFETY: all threads of the block call this, and they are whole warps.
            let mean = unsafe { block_sum(squares.get()) } / self.hidden as f32;
            let scale = math::rsqrt(mean + self.eps);
            let mut v = 0;
            while v < VECTORS {
                if mine(v) < vectors {
                    // SAFETY: `weight` has a vector for each vector of a row.
                    let factors = T::widen(unsafe { mem::load_vec(weight.add(mine(v) * lanes)) });
                    T::zip(&mut held[v], factors, |x, w| x * scale * w);
                    store(first + mine(v) * lanes, T::narrow(held[v]));
                }
                v += 1;
            }
        }
    }
}
