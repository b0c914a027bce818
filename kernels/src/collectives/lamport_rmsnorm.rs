//! All-reduce, addition of the residual and RMSNorm in one kernel, by messages without separate
//! flags (`Lamport`): what a tensor-parallel layer computes between its matrix products.

use super::rmsnorm::{Place, Quantised, Rows, vector};
use crate::prelude::*;

/// Sums rows over the ranks, adds the residuals and normalises: for each token `t < tokens`, `sum`
/// is `residual[t]` plus the sum of row `t` of `input` over the ranks of the LSA team, which has 2,
/// 4 or 8 ranks; `residual[t]` becomes the sum, rounded, and `output[t]` becomes `sum * weight /
/// sqrt(mean(sum^2) + eps)`.
///
/// A row has `hidden` elements. f16 and bf16 are summed in f32, and each result is rounded once.
/// All ranks get the same bits if their residuals are the same. `output` may be `input`. Without a
/// `residual` (null), the sum is that over the ranks, and is not stored.
///
/// With [`Quantised`] results, `output` is not used.
///
/// Grid: clusters of 1, 2, 4 or 8 blocks, all resident; for two ranks any number of them, and
/// otherwise one for each token. Block: a multiple of 32 threads up to 256, one-dimensional. A
/// cluster has at least as many threads as a row has vectors of 16 bytes.
/// Dependent launch: allowed. `tokens` and `hidden` are the same in every rank.
///
/// # Safety
///
/// `input`, `residual` and the output in use have `tokens * hidden` elements, and `weight` has
/// `hidden`, all aligned to 16 bytes. Nothing else accesses them or the scale until the kernel has
/// ended. `memory` is as [`LamportSlots`] needs it.
#[kernel(
    T = [f32, f16, bf16],
    max_threads = 256,
    min_blocks = 4,
    requires(hidden.is_multiple_of(16 / size_of::<T>() as u32))
)]
pub unsafe fn lamport_rmsnorm<T: Accumulate<Acc = f32>>(
    comm: DevComm,
    memory: LamportMemory,
    input: *const T,
    residual: *mut T,
    weight: *const T,
    output: *mut T,
    quantised: Quantised,
    tokens: u32,
    hidden: u32,
    eps: f32,
) {
    let rows = Rows { input, residual, weight, output, quantised, tokens, hidden, eps };
    // SAFETY: the kernel's caller guarantees the rows and the memory of the slots.
    unsafe {
        match comm.lsa_team().n_ranks {
            2 => reduce(&rows, LamportSlots::<2>::new(&comm, &memory)),
            4 => reduce(&rows, LamportSlots::<4>::new(&comm, &memory)),
            8 => reduce(&rows, LamportSlots::<8>::new(&comm, &memory)),
            _ => panic!("the LSA team has 2, 4 or 8 ranks"),
        }
    }
}

/// Computes this block's part of its cluster's rows.
unsafe fn reduce<T: Accumulate<Acc = f32>, const N: usize>(
    rows: &Rows<T>,
    slots: LamportSlots<'_, N>,
) {
    // SAFETY: the kernel's caller guarantees the memory. Each slot is used by one thread.
    unsafe {
        let (mut place, mut cluster) = (rows.first(), ClusterSum::new());
        let load = |place: Place| match rows.has(place) {
            true => rows.load(rows.index(place)),
            false => Vec16::from_bits([0; 4]),
        };
        // Prefetched before the wait, so that the address is computed there too.
        if rows.has(place) {
            mem::prefetch(vector(rows.input, rows.index(place)));
        }
        grid::wait_for_previous();
        let mine = load(place);
        // Threads without a vector wait in the cluster's sum for those that wait for a peer.
        let session = slots.begin(rows.tokens * rows.vectors()).continue_after_abort();
        let send = |place: Place, vector| {
            if rows.has(place) {
                for distance in 1..N {
                    session.send(distance, rows.index(place), vector);
                }
            }
        };
        send(place, mine);
        let mut ahead = 1;
        while N == 2 && ahead < AHEAD && rows.after(place, ahead).row < rows.tokens {
            let next = rows.after(place, ahead);
            send(next, load(next));
            ahead += 1;
        }
        // The session ends while the messages are on their way, so that the next launch may begin.
        grid::launch_next();
        thread::sync_threads();
        session.end(Coop::cta());
        // The only row has code of its own: as the last one after the loop, it would wait for its
        // residual and weights before it polls. (One closure for both places spills registers.)
        if N == 2 && place.row < rows.tokens && rows.after(place, 1).row >= rows.tokens {
            let load = |[at]: [u32; 1]| [receive(&session, rows, at)];
            return rows.normalise::<1, true>([place], &mut cluster, load);
        }
        while N == 2 && rows.after(place, 1).row < rows.tokens {
            let second = rows.after(place, 1);
            let mut upcoming = [Vec16::from_bits([0; 4]); 2];
            rows.normalise::<2, false>([place, second], &mut cluster, |at| {
                let sums = at.map(|at| receive(&session, rows, at));
                // Loaded only now, while the cluster adds up: earlier they would take registers.
                upcoming = [0, 1].map(|i| load(rows.after(place, AHEAD + i)));
                sums
            });
            send(rows.after(place, AHEAD), upcoming[0]);
            send(rows.after(place, AHEAD + 1), upcoming[1]);
            place = rows.after(second, 1);
        }
        if place.row < rows.tokens {
            let load = |[at]: [u32; 1]| [receive(&session, rows, at)];
            // The vectors of eight ranks leave no registers for the weights.
            match N {
                4 => rows.normalise::<1, true>([place], &mut cluster, load),
                _ => rows.normalise::<1, false>([place], &mut cluster, load),
            }
        }
    }
}

/// Waits for the peers' vectors, and adds them to this rank's vector, which is loaded a second
/// time: it would take registers from the first time on.
unsafe fn receive<T: Accumulate<Acc = f32>, const N: usize>(
    session: &Lamport<'_, N, false>,
    rows: &Rows<T>,
    at: u32,
) -> T::Wide {
    let mut sum = T::widen(Vec16::from_bits([0; 4])); // Rank 0's vector, the first, replaces it.
    // SAFETY: the kernel's caller guarantees the memory. Each slot is used by one thread.
    unsafe {
        let mine = message(rows.load(at));
        // A message has no such word: the branch lets the first poll wait for this rank's vector.
        // An earlier poll comes too early for the peer's, and the next one a poll later.
        if N == 2 && hint::opaque(mine.to_bits()[0]) == nccl_device::EMPTY {
            return sum;
        }
        session.receive_in_order(at, mine, |rank, vector| match rank {
            0 => sum = T::widen(vector),
            _ => T::add(&mut sum, vector),
        });
    }
    sum
}

/// The number of rows by which a cluster's sends are ahead of its receives.
const AHEAD: u32 = 4;
