//! Reduce-scatter of long messages within the LSA team: every rank loads its part of the peers'
//! inputs, between two barriers.

use super::prelude::*;

/// Reduces this rank's part: `output[i]` becomes the reduction over the ranks of `input[first +
/// rank * count + i]`, where `rank` is this rank and `count` is `len` divided by the number of
/// ranks, for `i < count`, in every rank of the LSA team, which has 2, 4 or 8 ranks.
///
/// f16 and bf16 are reduced in f32 and rounded once. The output may be this rank's part of the
/// input.
///
/// Grid: any, up to the device communicator's LSA barriers, the same in every rank. Block: a
/// multiple of 32 threads up to 512, one-dimensional. Dependent launch: allowed. `first` and `len`
/// are in elements, the same in every rank.
///
/// # Safety
///
/// `output` has `count` elements. It begins at a multiple of 16 bytes, as does the input, and
/// `count` elements are a multiple of 16 bytes. Nothing else accesses the output or writes the
/// input until the kernel has ended in every rank.
#[kernel(
    T = [f32, f16, bf16],
    max_threads = 512,
    min_blocks = 2,
    requires(block.x.is_multiple_of(32), first <= input.len(), len <= input.len() - first)
)]
pub unsafe fn pull_reduce_scatter<T: Accumulate<Acc = f32>>(
    comm: DevComm,
    input: Window<T>,
    first: usize,
    len: usize,
    output: *mut T,
    reduction: Reduction,
) {
    let team = comm.lsa_team();
    let first = first / Vec16::<T>::LANES;
    let part = Part { team, input, first, len, output, reduction };
    // SAFETY: the kernel's caller guarantees the alignment and the elements of the output.
    unsafe {
        match team.n_ranks {
            2 => part.reduce::<2, 4>(&comm),
            4 => part.reduce::<4, 2>(&comm),
            8 => part.reduce::<8, 1>(&comm),
            _ => panic!("the LSA team has 2, 4 or 8 ranks"),
        }
    }
}

struct Part<T> {
    team: Team,
    input: Window<T>,
    /// The index in the window of the input's first vector.
    first: usize,
    /// Elements of the input.
    len: usize,
    output: *mut T,
    reduction: Reduction,
}

impl<T: Accumulate<Acc = f32>> Part<T> {
    /// Reduces this thread's vectors, with `UNROLL` of each rank in flight. The team has `N` ranks.
    /// The whole grid calls this.
    unsafe fn reduce<const N: usize, const UNROLL: usize>(&self, comm: &DevComm) {
        let Self { team, input, .. } = *self;
        let vectors = self.len / Vec16::<T>::LANES / N;
        let first = self.first + team.rank as usize * vectors;
        // The loads of the windows' addresses take their time during the wait and the barrier.
        let mut parts = [input.local(); N];
        for distance in 1..N {
            parts[distance] = input.lsa(team.rotated(distance as i32));
        }
        grid::wait_for_previous();
        grid::launch_next();
        let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
        barrier.sync(MemoryOrder::Acquire); // Now the inputs of all ranks are complete.
        for at in strip::of_grid::<UNROLL>(vectors) {
            let mut loaded = [[Vec16::<T>::from_bits([0; 4]); N]; UNROLL];
            // SAFETY: the kernel's caller guarantees the memory; one thread reduces each vector.
            unsafe {
                for u in 0..UNROLL {
                    // This rank's own vector is the last one, as it is nearest.
                    if at + u * ROW < vectors {
                        for i in 1..N + 1 {
                            let distance = i % N;
                            let from = (first + at + u * ROW) * Vec16::<T>::LANES;
                            loaded[u][distance] = parts[distance].load_vec(from);
                        }
                    }
                }
                for u in 0..UNROLL {
                    if at + u * ROW < vectors {
                        let scaled = loaded[u].map(|vector| self.reduction.scale(vector));
                        let to = self.output.wrapping_add((at + u * ROW) * Vec16::<T>::LANES);
                        mem::store_vec(to, self.reduction.reduce(scaled));
                    }
                }
            }
        }
        barrier.sync(MemoryOrder::Release);
    }
}
