//! All-reduce of long messages within the LSA team: every rank pushes to each peer the part of its
//! input that the peer reduces, and each pushes its results to all. Stores over NVLink are faster
//! than loads.
//!
//! Half of a block's warps push, the others reduce. A block's chunks go through a ring of slots in
//! each peer, with two flags for each pair of ranks: how many chunks have arrived, and how many
//! results were returned, which also says that the slots are free.

use cuda_std::prelude::*;
use cuda_std::vector::{Accumulate, Vec16};
use cuda_std::{grid, hint, mem};
use half::{bf16, f16};
use nccl_device::{Coop, DevComm, Epoch, Flag, LsaPtr, Window};

use super::elements::Elements;
use super::reduction::Reduction;

/// Warps of a block that push the input; as many reduce.
const PUSHING_WARPS: u32 = 8;
/// Threads per block.
pub const THREADS: u32 = 2 * PUSHING_WARPS * warp::WARP_SIZE;
/// Vectors that a pushing thread has in flight.
const PUSHED: usize = 8;
/// Values of a flag in a launch.
const PER_LAUNCH: u32 = 1 << 16;

/// The workspace, the same in every rank.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, KernelParam)]
pub struct Ring {
    /// Vectors of 16 bytes of a chunk.
    pub chunk: u32,
    /// Chunks of a source rank that a block holds at a time.
    pub slots: u32,
}

impl Ring {
    /// Words of the window that receives chunks.
    #[must_use]
    pub const fn inbox(self, ranks: usize, blocks: u32) -> usize {
        4 * ranks * blocks as usize * self.slots as usize * self.chunk as usize
    }

    /// The number of flags.
    #[must_use]
    pub const fn flags(ranks: usize, blocks: u32) -> usize {
        2 * ranks * blocks as usize
    }

    /// The most bytes of a launch.
    #[must_use]
    pub const fn most(self, ranks: usize, blocks: u32) -> usize {
        16 * ranks * self.chunk as usize * blocks as usize * (PER_LAUNCH as usize - 2)
    }
}

/// `output[first + i]` becomes the reduction over the ranks of `input[i]`, for `i < count`, in
/// every rank of the LSA team, which has 2, 4 or 8.
///
/// f16 and bf16 are reduced in f32 and rounded once. All ranks get the same bits. The elements of
/// `output` may be where `input` is.
///
/// `inbox` has the words, and `flags` the flags, that [`Ring`] says; the flags were 0 before the
/// first launch, as were [`Epoch::WORDS`] words at `state`.
///
/// Grid: the same in all launches with this workspace and in every rank, all blocks resident.
/// Block: [`THREADS`] threads. May be a dependent launch. `count` and `first` are in elements, the
/// same in every rank, and `count` at most [`Ring::most`].
///
/// # Safety
///
/// `input` has `count` elements, which nothing else writes, and nothing else accesses those of
/// `output`, until the kernel has ended in every rank; both begin at a multiple of 16 bytes. One
/// launch at a time uses the windows and the state, all ranks with the same arguments. The launch
/// checks the length of `output`.
#[kernel(
    T = [f32, f16, bf16],
    max_threads = 512,
    requires(first <= output.len(), count <= output.len() - first)
)]
pub unsafe fn push_allreduce<T: Accumulate<Acc = f32>>(
    comm: DevComm,
    input: *const T,
    output: Window<T>,
    first: usize,
    count: usize,
    inbox: Window<u32>,
    flags: Window<u32>,
    state: *mut u32,
    ring: Ring,
    reduction: Reduction,
) {
    let n_ranks = comm.lsa_team().n_ranks as usize;
    let vectors = count.div_ceil(Vec16::<T>::LANES);
    let block = Block {
        comm: &comm,
        input,
        output,
        output_first: first,
        count,
        part: (vectors + n_ranks - 1) >> n_ranks.trailing_zeros(),
        inbox,
        flags,
        ring,
        reduction,
    };
    // SAFETY: the kernel's contract.
    unsafe {
        match n_ranks {
            2 => block.reduce::<2, 4>(state),
            4 => block.reduce::<4, 2>(state),
            8 => block.reduce::<8, 1>(state),
            _ => panic!("the LSA team has 2, 4 or 8 ranks"),
        }
    }
}

/// What the threads of a block share.
struct Block<'a, T> {
    comm: &'a DevComm,
    input: *const T,
    output: Window<T>,
    output_first: usize,
    count: usize,
    /// Vectors that a rank reduces; the last rank may have fewer.
    part: usize,
    inbox: Window<u32>,
    flags: Window<u32>,
    ring: Ring,
    reduction: Reduction,
}

/// A chunk of a message.
#[derive(Clone, Copy)]
struct Chunk {
    /// Its first vector.
    first: usize,
    /// Its whole vectors.
    len: u32,
    /// The index of the partial vector at the end of the message, if it is here.
    tail: Option<usize>,
}

impl<T: Accumulate<Acc = f32>> Block<'_, T> {
    /// # Safety
    ///
    /// The kernel's contract; the team has `N` ranks. A thread reduces `ROWS` vectors at a time.
    #[inline(always)]
    unsafe fn reduce<const N: usize, const ROWS: usize>(&self, state: *mut u32) {
        let pushes = thread::thread_idx_x() < THREADS / 2;
        grid::launch_next();
        grid::wait_for_previous();
        // SAFETY: the caller's contract.
        unsafe {
            let epoch = Epoch::begin(state);
            // The values of flags grow from launch to launch.
            let base = epoch.get().wrapping_mul(PER_LAUNCH);
            if pushes {
                self.push::<N>(Coop::warp_span(0, PUSHING_WARPS, 0), base);
            } else {
                self.receive::<N, ROWS>(Coop::warp_span(PUSHING_WARPS, PUSHING_WARPS, 1), base);
            }
            thread::sync_threads();
            epoch.end(Coop::cta());
        }
    }

    /// This rank.
    #[inline(always)]
    fn me(&self) -> usize {
        self.comm.lsa_team().rank as usize
    }

    /// The number of this block's chunks of each part.
    #[inline(always)]
    fn chunks(&self) -> u32 {
        let chunks = self.part.div_ceil(self.ring.chunk as usize) as u32;
        let (block, blocks) = (thread::block_idx_x(), thread::grid_dim_x());
        if block < chunks { (chunks - block).div_ceil(blocks) } else { 0 }
    }

    /// This block's chunk `number` of the part of `rank`.
    #[inline(always)]
    fn chunk(&self, rank: usize, number: u32) -> Chunk {
        let whole = self.count / Vec16::<T>::LANES;
        let size = self.ring.chunk as usize;
        let place = (thread::block_idx_x() + number * thread::grid_dim_x()) as usize * size;
        let left = self.part - place;
        let (first, size) = (rank * self.part + place, if left < size { left } else { size });
        let left = whole.saturating_sub(first);
        let is_here = first <= whole && whole < first + size;
        let is_partial = !self.count.is_multiple_of(Vec16::<T>::LANES);
        let len = if left < size { left } else { size };
        Chunk { first, len: len as u32, tail: (is_here && is_partial).then_some(whole) }
    }

    /// The slot of an inbox for chunk `number` of source rank `source`.
    #[inline(always)]
    fn slot(&self, inbox: LsaPtr<u32>, source: usize, number: u32) -> *mut u32 {
        let block = source * thread::grid_dim_x() as usize + thread::block_idx_x() as usize;
        let slot = block * self.ring.slots as usize + (number % self.ring.slots) as usize;
        inbox.as_ptr().wrapping_add(4 * slot * self.ring.chunk as usize)
    }

    /// The flag for how many chunks of rank `source` have arrived.
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn arrived(&self, source: usize) -> Flag<'_> {
        let index = source * thread::grid_dim_x() as usize + thread::block_idx_x() as usize;
        // SAFETY: the caller's contract.
        unsafe { Flag::new(self.comm, self.flags, index) }
    }

    /// The flag for how many chunks rank `source` has reduced and stored the results of.
    ///
    /// # Safety
    ///
    /// The kernel's contract; the team has `N` ranks.
    #[inline(always)]
    unsafe fn returned<const N: usize>(&self, source: usize) -> Flag<'_> {
        // SAFETY: the caller's contract.
        unsafe { self.arrived(N + source) }
    }

    /// Pushes this block's chunks of the input to the ranks that reduce them.
    ///
    /// # Safety
    ///
    /// The kernel's contract; the threads of the coop call this together.
    #[inline(always)]
    unsafe fn push<const N: usize>(&self, coop: Coop, base: u32) {
        // The loops over ranks are not unrolled.
        let (team, ranks) = (self.comm.lsa_team(), hint::opaque_usize(N));
        let mut number = 0;
        while number < self.chunks() {
            let mut distance = 1;
            while distance < ranks {
                let peer = team.rotated(distance as i32);
                // SAFETY: the caller's contract; the peer has reduced what was in the slot.
                unsafe {
                    if number >= self.ring.slots {
                        let reduced = base.wrapping_add(number + 1 - self.ring.slots);
                        self.returned::<N>(peer as usize).wait_at_least(coop, reduced);
                    }
                    let to = self.slot(self.inbox.lsa(peer), self.me(), number);
                    self.push_chunk(coop, self.chunk(peer as usize, number), to);
                    self.arrived(self.me()).post(coop, peer, base.wrapping_add(number + 1));
                }
                distance += 1;
            }
            number += 1;
        }
        // So that no flag is from many launches ago.
        let mut distance = 1;
        while distance < ranks {
            // SAFETY: the caller's contract.
            let flag = unsafe { self.arrived(self.me()) };
            flag.post(coop, team.rotated(distance as i32), base.wrapping_add(PER_LAUNCH - 1));
            distance += 1;
        }
    }

    /// Copies a chunk of the input.
    ///
    /// # Safety
    ///
    /// As [`push`](Self::push); only this coop accesses the memory at `to`.
    #[inline(always)]
    unsafe fn push_chunk(&self, coop: Coop, chunk: Chunk, to: *mut u32) {
        // SAFETY: the caller's contract.
        unsafe {
            let store = |at: usize, vector: Vec16<T>| {
                let words = Vec16::<u32>::from_bits(self.reduction.scale(vector).to_bits());
                mem::store_vec(to.wrapping_add(4 * (at - chunk.first)), words);
            };
            in_rows(coop, chunk, |rows: [Option<usize>; PUSHED]| {
                let loaded = rows.map(|row| row.map(|at| mem::load_vec(vector(self.input, at))));
                let mut u = 0;
                while u < PUSHED {
                    if let (Some(at), Some(vector)) = (rows[u], loaded[u]) {
                        store(at, vector);
                    }
                    u += 1;
                }
            });
            if let Some(at) = chunk.tail.filter(|_| coop.thread_rank() == 0) {
                store(at, Elements::new(self.input.cast_mut(), self.count).load(at));
            }
        }
    }

    /// Reduces this block's chunks of this rank's part, and stores the results to all ranks.
    ///
    /// # Safety
    ///
    /// As [`push`](Self::push).
    #[inline(always)]
    unsafe fn receive<const N: usize, const ROWS: usize>(&self, coop: Coop, base: u32) {
        let (team, me) = (self.comm.lsa_team(), self.me());
        let mut outputs = [self.output.local().as_ptr().wrapping_add(self.output_first); N];
        let mut distance = 1;
        while distance < N {
            let output = self.output.lsa(team.rotated(distance as i32)).as_ptr();
            outputs[distance] = output.wrapping_add(self.output_first);
            distance += 1;
        }
        let (mut number, ranks) = (0, hint::opaque_usize(N));
        while number < self.chunks() {
            // SAFETY: the caller's contract.
            unsafe {
                let mut source = 0;
                while source < ranks {
                    if source != me {
                        let arrived = base.wrapping_add(number + 1);
                        self.arrived(source).wait_at_least(coop, arrived);
                    }
                    source += 1;
                }
                self.reduce_chunk::<N, ROWS>(coop, number, &outputs);
                self.post_returned::<N>(coop, base.wrapping_add(number + 1));
            }
            number += 1;
        }
        // SAFETY: the caller's contract.
        unsafe {
            self.post_returned::<N>(coop, base.wrapping_add(PER_LAUNCH - 1));
            let mut source = 0;
            while source < ranks {
                if source != me {
                    // Then no peer stores to this rank before the next launch.
                    let all = base.wrapping_add(PER_LAUNCH - 1);
                    self.returned::<N>(source).wait_at_least(coop, all);
                    self.arrived(source).wait_at_least(coop, all);
                }
                source += 1;
            }
        }
    }

    /// Tells all peers how many chunks were reduced.
    ///
    /// # Safety
    ///
    /// As [`push`](Self::push).
    #[inline(always)]
    unsafe fn post_returned<const N: usize>(&self, coop: Coop, value: u32) {
        let (mut distance, ranks) = (1, hint::opaque_usize(N));
        while distance < ranks {
            let peer = self.comm.lsa_team().rotated(distance as i32);
            // SAFETY: the caller's contract.
            unsafe { self.returned::<N>(self.me()) }.post(coop, peer, value);
            distance += 1;
        }
    }

    /// Reduces a chunk, which has arrived.
    ///
    /// # Safety
    ///
    /// As [`push`](Self::push); `outputs` are the addresses of the output in this rank and those
    /// after it.
    #[inline(always)]
    unsafe fn reduce_chunk<const N: usize, const ROWS: usize>(
        &self,
        coop: Coop,
        number: u32,
        outputs: &[*mut T; N],
    ) {
        let me = self.me();
        let (chunk, inbox) = (self.chunk(me, number), self.inbox.local());
        let mut slots = [core::ptr::null_mut(); N];
        let mut source = 0;
        while source < N {
            slots[source] = self.slot(inbox, source, number);
            source += 1;
        }
        // SAFETY: the caller's contract.
        unsafe {
            let all = |at: usize, mine: Vec16<T>| {
                let mut all = [self.reduction.scale(mine); N];
                let mut source = 0;
                while source < N {
                    if source != me {
                        let from = slots[source].wrapping_add(4 * (at - chunk.first));
                        all[source] = Vec16::from_bits(mem::load_vec(from).to_bits());
                    }
                    source += 1;
                }
                all
            };
            in_rows(coop, chunk, |rows: [Option<usize>; ROWS]| {
                let load = |at| all(at, mem::load_vec(vector(self.input, at)));
                let loaded = rows.map(|row| row.map(load));
                let mut u = 0;
                while u < ROWS {
                    if let (Some(at), Some(all)) = (rows[u], loaded[u]) {
                        let result = self.reduction.reduce(all);
                        let mut distance = 0;
                        while distance < N {
                            mem::store_vec(vector(outputs[distance], at).cast_mut(), result);
                            distance += 1;
                        }
                    }
                    u += 1;
                }
            });
            if let Some(at) = chunk.tail.filter(|_| coop.thread_rank() == 0) {
                let mine = Elements::new(self.input.cast_mut(), self.count).load(at);
                let result = self.reduction.reduce(all(at, mine));
                let mut distance = 0;
                while distance < N {
                    Elements::new(outputs[distance], self.count).store(at, result);
                    distance += 1;
                }
            }
        }
    }
}

/// Divides the whole vectors of a chunk among the threads of a coop: calls `each` with up to `ROWS`
/// of this thread's at a time.
#[inline(always)]
fn in_rows<const ROWS: usize>(coop: Coop, chunk: Chunk, each: impl Fn([Option<usize>; ROWS])) {
    let (mut first, row) = (coop.thread_rank(), coop.size());
    while first < chunk.len {
        let mut rows = [None; ROWS];
        let mut u = 0;
        while u < ROWS {
            let at = first + u as u32 * row;
            rows[u] = (at < chunk.len).then_some(chunk.first + at as usize);
            u += 1;
        }
        each(rows);
        first += ROWS as u32 * row;
    }
}

/// The address of a vector.
#[inline(always)]
fn vector<T: Accumulate>(elements: *const T, index: usize) -> *const T {
    elements.wrapping_add(index * Vec16::<T>::LANES)
}
