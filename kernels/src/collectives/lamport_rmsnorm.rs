//! All-reduce, addition of the residual and RMSNorm of few tokens in one kernel, by messages that
//! are their own flags: what a tensor-parallel layer does between its products.

use cuda_std::grid;
use cuda_std::prelude::*;
use cuda_std::vector::Accumulate;
use half::{bf16, f16};
use nccl_device::{Coop, DevComm, LamportSlots, Window, message};

use super::rmsnorm::{Quantised, Row};

/// For each token `t < tokens`: `sum = residual[t] + ` the sum of row `t` of `input` over the ranks
/// of the LSA team, which has 2, 4 or 8; `residual[t]` becomes the sum, rounded, and `output[t]`
/// `sum * weight / sqrt(mean(sum^2) + eps)`.
///
/// A row has `hidden` elements. f16 and bf16 are summed in f32, and each result is rounded once.
/// All ranks get the same bits if their residuals are the same. `output` may be `input`. Without a
/// `residual` (null), the sum is that over the ranks, and is not stored.
///
/// With [`Quantised`] results, `output` is not used.
///
/// `slots` and `state` are the memory of [`Lamport`](nccl_device::Lamport) messages, with
/// `capacity` slots for vectors from each rank.
///
/// Grid: a cluster of 1, 2, 4 or 8 blocks for each token. Block: a multiple of 32 threads up to
/// 256, one-dimensional. A cluster has at least as many threads as a row has vectors of 16 bytes.
/// May be a dependent launch. `tokens` and `hidden` are the same in every rank.
///
/// # Safety
///
/// `input`, `residual` and the output in use have `tokens * hidden` elements, and `weight` has
/// `hidden`, all aligned to 16 bytes. Nothing else accesses them or the scale until the kernel has
/// ended. `slots` and `state` are as [`LamportSlots`] needs them.
#[kernel(
    T = [f32, f16, bf16],
    max_threads = 256,
    requires(hidden.is_multiple_of(16 / size_of::<T>() as u32))
)]
pub unsafe fn lamport_rmsnorm<T: Accumulate<Acc = f32>>(
    comm: DevComm,
    slots: Window<u32>,
    state: *mut u32,
    capacity: u32,
    input: *const T,
    residual: *mut T,
    weight: *const T,
    output: *mut T,
    quantised: Quantised,
    tokens: u32,
    hidden: u32,
    eps: f32,
) {
    let row = Row { input, residual, weight, output, quantised, tokens, hidden, eps };
    // SAFETY: the kernel's contract.
    unsafe {
        match comm.lsa_team().n_ranks {
            2 => reduce(&row, LamportSlots::<2>::new(&comm, slots, capacity), state),
            4 => reduce(&row, LamportSlots::<4>::new(&comm, slots, capacity), state),
            8 => reduce(&row, LamportSlots::<8>::new(&comm, slots, capacity), state),
            _ => panic!("the LSA team has 2, 4 or 8 ranks"),
        }
    }
}

/// Computes this block's part of a row.
///
/// # Safety
///
/// The kernel's contract.
#[inline(always)]
unsafe fn reduce<T: Accumulate<Acc = f32>, const N: usize>(
    row: &Row<T>,
    slots: LamportSlots<'_, N>,
    state: *mut u32,
) {
    grid::launch_next();
    // SAFETY: the caller's contract. Each slot is used by one thread.
    unsafe {
        let (place, cluster) = (row.place(), ClusterSum::new());
        grid::wait_for_previous();
        let mine = place.map(|place| (place.at, row.load(place.at)));
        let session = slots.begin(state, row.tokens * row.vectors());
        if let Some((at, mine)) = mine {
            let mut distance = 1;
            while distance < N {
                session.send(distance, at, mine);
                distance += 1;
            }
        }
        // While the messages are on their way.
        thread::sync_threads();
        session.end(Coop::cta());
        row.normalise(place, cluster, |at| {
            // Loaded again: it would take registers during the wait.
            let all = session.receive_all(at, message(row.load(at)));
            let mut sum = T::widen(all[0]);
            let mut rank = 1;
            while rank < N {
                T::add(&mut sum, all[rank]);
                rank += 1;
            }
            sum
        });
    }
}
