//! All-reduce of long messages within the LSA team by stores alone, which NVLink carries faster
//! than loads.
//!
//! A block works in rounds: it pushes a chunk of its input to each peer that reduces it, reduces
//! the chunks that it received in the round before, and stores the results to all ranks. A barrier
//! with the same block of every peer ends the round, so a chunk has two slots. The barrier waits
//! until all stores of the block have arrived; long chunks make that rare.

use super::prelude::*;

/// Vectors that a thread pushes at a time.
const PUSHED: usize = 4;
/// Slots for the chunks that a block receives from a rank.
const SLOTS: usize = 2;

/// Returns how many words the window has that receives chunks of up to `chunk` vectors of 16 bytes.
#[must_use]
pub const fn inbox(ranks: usize, blocks: u32, chunk: usize) -> usize {
    4 * (ranks - 1) * blocks as usize * SLOTS * chunk // A vector has 4 words.
}

/// Reduces `input` over the ranks: `output[first + i]` becomes the reduction of `input[i]`, for `i
/// < count`, in every rank of the LSA team, which has 2, 4 or 8 ranks.
///
/// f16 and bf16 are reduced in f32 and rounded once. All ranks get the same bits. The elements of
/// `output` may be those of `input`.
///
/// `chunk` is in vectors of 16 bytes, and `inbox` has the number of words that [`inbox()`] returns.
///
/// Grid: up to the device communicator's LSA barriers, all blocks resident, the same in every rank.
/// Block: a multiple of 32 threads up to 512, one-dimensional. Dependent launch: allowed.
/// `count` and `first` are in elements, the same in every rank.
///
/// # Safety
///
/// `input` has `count` elements, which nothing else writes, and nothing else accesses those of
/// `output`, until the kernel has ended in every rank; both begin at a multiple of 16 bytes. One
/// launch at a time uses `inbox`, all ranks with the same arguments. The launch checks the length
/// of `output`.
#[kernel(
    T = [f32, f16, bf16],
    max_threads = 512,
    min_blocks = 2,
    requires(
        block.x.is_multiple_of(32),
        first <= output.len(),
        count <= output.len() - first,
        chunk > 0
    )
)]
pub unsafe fn push_allreduce<T: Accumulate<Acc = f32>>(
    comm: DevComm,
    input: *const T,
    output: Window<T>,
    first: usize,
    count: usize,
    inbox: Window<u32>,
    chunk: u32,
    reduction: Reduction,
) {
    let n_ranks = comm.lsa_team().n_ranks as usize;
    let vectors = count.div_ceil(Vec16::<T>::LANES);
    let part = (vectors + n_ranks - 1) >> n_ranks.trailing_zeros(); // There are 2, 4 or 8 ranks.
    let (comm, size) = (&comm, chunk as usize);
    let input = Elements::new(input.cast_mut(), count);
    let block = Block { comm, input, output, first, count, part, inbox, size, reduction };
    // SAFETY: the kernel's caller guarantees the elements, their alignment and the inbox.
    unsafe {
        match n_ranks {
            2 => block.run::<2, 4>(),
            4 => block.run::<4, 2>(),
            8 => block.run::<8, 1>(),
            _ => panic!("the LSA team has 2, 4 or 8 ranks"),
        }
    }
}

/// What the threads of a block share.
struct Block<'a, T> {
    comm: &'a DevComm,
    input: Elements<T>,
    output: Window<T>,
    first: usize,
    count: usize,
    /// Vectors that a rank reduces; the last rank may have fewer.
    part: usize,
    inbox: Window<u32>,
    /// Vectors of a chunk.
    size: usize,
    reduction: Reduction,
}

#[derive(Clone, Copy)]
struct Chunk {
    first: usize,
    /// How many whole vectors the chunk has.
    len: u32,
    /// The index of the partial vector at the end of the message, if the chunk has it.
    tail: Option<usize>,
}

impl<T: Accumulate<Acc = f32>> Block<'_, T> {
    /// Reduces this block's chunks, among `N` ranks. A thread reduces `ROWS` vectors at a time.
    unsafe fn run<const N: usize, const ROWS: usize>(&self) {
        let rounds = self.part.div_ceil(self.size * thread::grid_dim_x() as usize);
        grid::wait_for_previous();
        grid::launch_next();
        let mut barrier = self.comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
        let mut round = 0;
        while round <= rounds {
            // SAFETY: the kernel's caller guarantees the memory. The barriers separate the stores
            // to a slot from its loads, and these from the stores two rounds later; the first one
            // comes after the ranks' previous kernels, and before any store to an output.
            unsafe {
                if round < rounds {
                    self.push::<N>(round);
                }
                if round > 0 {
                    self.reduce_chunk::<N, ROWS>(round - 1);
                }
            }
            barrier.sync(MemoryOrder::AcqRel);
            round += 1;
        }
    }

    /// Returns this block's chunk of a round, of the part of `rank`.
    fn chunk(&self, rank: usize, round: usize) -> Chunk {
        let whole = self.count / Vec16::<T>::LANES; // Also the index of a partial vector.
        let index = round * thread::grid_dim_x() as usize + thread::block_idx_x() as usize;
        let place = index * self.size;
        let left = self.part.saturating_sub(place);
        let (first, size) =
            (rank * self.part + place, if left < self.size { left } else { self.size });
        let left = whole.saturating_sub(first);
        let is_here = first <= whole && whole < first + size;
        let is_partial = !self.count.is_multiple_of(Vec16::<T>::LANES);
        let len = if left < size { left } else { size };
        Chunk { first, len: len as u32, tail: (is_here && is_partial).then_some(whole) }
    }

    /// Returns the slot for this block's chunk of a round, from the rank `distance` before.
    fn slot(&self, inbox: LsaPtr<u32>, distance: usize, round: usize) -> *mut u32 {
        let source = (distance - 1) * thread::grid_dim_x() as usize;
        let slot = (source + thread::block_idx_x() as usize) * SLOTS + round % SLOTS;
        inbox.as_ptr().wrapping_add(4 * slot * self.size)
    }

    /// Pushes this block's chunks of a round to the ranks that reduce them. The kernel's contract
    /// holds, and nothing else accesses the slots of the round.
    unsafe fn push<const N: usize>(&self, round: usize) {
        // The loop over ranks is not unrolled.
        let (mut distance, ranks) = (1, hint::opaque_usize(N));
        while distance < ranks {
            let peer = self.comm.lsa_team().rotated(distance as i32);
            let chunk = self.chunk(peer as usize, round);
            let to = self.slot(self.inbox.lsa(peer), distance, round);
            let store = |at: usize, vector: Vec16<T>| {
                let words = Vec16::<u32>::from_bits(self.reduction.scale(vector).to_bits());
                // SAFETY: the slot has room for the chunk, and nothing else accesses it now.
                unsafe { mem::store_vec(to.wrapping_add(4 * (at - chunk.first)), words) };
            };
            in_rows(chunk, |rows: [Option<usize>; PUSHED]| {
                // SAFETY: the kernel's caller guarantees the input's vector and its alignment.
                let load = |at| unsafe { mem::load_vec(self.input.address(at)) };
                let loaded = rows.map(|row| row.map(load));
                for u in 0..PUSHED {
                    if let (Some(at), Some(vector)) = (rows[u], loaded[u]) {
                        store(at, vector);
                    }
                }
            });
            if let Some(at) = chunk.tail.filter(|_| thread::thread_idx_x() == 0) {
                // SAFETY: the kernel's caller guarantees the input's vector and its alignment.
                let tail = unsafe { self.input.load(at) };
                store(at, tail);
            }
            distance += 1;
        }
    }

    /// Reduces this block's chunks of a round, which have arrived, and stores the results to all
    /// ranks. The kernel's contract holds, and nothing else accesses the slots of the round.
    unsafe fn reduce_chunk<const N: usize, const ROWS: usize>(&self, round: usize) {
        let me = self.comm.lsa_team().rank as usize;
        let (chunk, inbox) = (self.chunk(me, round), self.inbox.local());
        // SAFETY: the slots have arrived, and nothing else accesses them until the barrier.
        let result = |at: usize, mine: Vec16<T>| unsafe {
            let mut result = T::widen(mine); // Rank 0's vector is the first, and replaces it.
            for source in 0..N {
                let mut vector = self.reduction.scale(mine);
                if source != me {
                    // Opaque, as the addresses of all slots would take registers in the loop.
                    let distance = (hint::opaque_usize(me) + N - source) % N;
                    let slot = self.slot(inbox, distance, round);
                    let from = slot.wrapping_add(4 * (at - chunk.first));
                    vector = Vec16::from_bits(mem::load_vec(from).to_bits());
                }
                match source {
                    0 => result = T::widen(vector),
                    _ => self.reduction.combine(&mut result, vector),
                }
            }
            self.reduction.finish(result)
        };
        // SAFETY: the kernel's caller guarantees the elements; one thread reduces each vector.
        unsafe {
            in_rows(chunk, |rows: [Option<usize>; ROWS]| {
                let mine = rows.map(|row| row.map(|at| mem::load_vec(self.input.address(at))));
                let mut results = [None; ROWS];
                for u in 0..ROWS {
                    if let (Some(at), Some(mine)) = (rows[u], mine[u]) {
                        results[u] = Some(result(at, mine));
                    }
                }
                self.each_output::<N>(|output| {
                    for u in 0..ROWS {
                        if let (Some(at), Some(result)) = (rows[u], results[u]) {
                            mem::store_vec(output.address(at), result);
                        }
                    }
                });
            });
            if let Some(at) = chunk.tail.filter(|_| thread::thread_idx_x() == 0) {
                let mine = self.input.load(at);
                let result = result(at, mine);
                self.each_output::<N>(|output| output.store(at, result));
            }
        }
    }

    /// Calls `store` with each rank's output, this rank's first.
    fn each_output<const N: usize>(&self, store: impl Fn(Elements<T>)) {
        // The loop is not unrolled: the addresses would take registers.
        let (mut distance, ranks) = (0, hint::opaque_usize(N));
        while distance < ranks {
            let peer = self.comm.lsa_team().rotated(distance as i32);
            let output = self.output.lsa(peer).as_ptr().wrapping_add(self.first);
            store(Elements::new(output, self.count));
            distance += 1;
        }
    }
}

/// Divides the whole vectors of a chunk among the threads of a block: calls `each` with the indices
/// of up to `ROWS` vectors of this thread at a time.
fn in_rows<const ROWS: usize>(chunk: Chunk, each: impl Fn([Option<usize>; ROWS])) {
    let mine = strip::first::<ROWS>(thread::thread_idx_x()) as u32;
    for first in Strided::new(mine, chunk.len, ROWS as u32 * thread::block_dim_x()) {
        let mut rows = [None; ROWS];
        for u in 0..ROWS {
            let at = first + (u * ROW) as u32;
            rows[u] = (at < chunk.len).then_some(chunk.first + at as usize);
        }
        each(rows);
    }
}
