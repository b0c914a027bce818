//! Puts the rows that a rank has received in the order of its experts, for a grouped product.

use cuda_std::prelude::*;
use cuda_std::strided::share;
use cuda_std::{grid, mem};

use super::counters::{UNROLL, WARPS, add_one, store_returns, sum_before, take_next};
use super::parts::Parts;
use super::rows::SCALED;
use super::shape::{Faults, Received, Shape};

/// Vectors of a part that each lane has.
const VECTORS: usize = 4;

/// The rows that a block handles at a time.
const BATCH: u32 = 64;

/// Words for a token in [`Grouped::returns`]: a position and a weight for each expert.
pub const RETURN_WORDS: usize = 2 * Shape::TOP_K;

/// The mark after a token's last position.
pub(super) const NONE: u32 = u32::MAX;

/// The position of a row for which there was no room.
pub(super) const DROPPED: u32 = u32::MAX - 1;

/// Rows in the order of the experts. A row is there once for each of its experts in this rank;
/// within an expert, rows are in the order of the ranks and of their tokens.
#[repr(C)]
#[derive(Clone, Copy, KernelParam)]
pub struct Grouped {
    /// The rows, as words.
    pub rows: *mut u32,
    /// The scales of rows with scales, as a row-major matrix with a column for each row that there
    /// is room for, and a row for each [`SCALED`] elements.
    pub scales: *mut f32,
    /// How many rows there is room for.
    pub capacity: u32,
    /// An expert's rows begin at a multiple of this.
    pub alignment: u32,
    /// The index of each expert's first row, and then the index after the last expert's rows.
    pub offsets: *mut u32,
    /// The number of rows of each expert.
    pub sizes: *mut u32,
    /// The token of each row: its index in [`Received`].
    pub origins: *mut u32,
    /// The rows and weights of the experts here, for each token in [`Received`].
    pub returns: *mut u32,
}

impl Grouped {
    /// Copies the scales of a received row to its position.
    ///
    /// # Safety
    ///
    /// All lanes of a warp call this; rows have scales.
    pub(super) unsafe fn copy_scales(
        &self,
        shape: Shape,
        scales: *const f32,
        from: usize,
        to: usize,
    ) {
        let len = (16 * shape.vectors).div_ceil(SCALED as u32);
        let from = scales.wrapping_add(from * 4 * shape.scale_vectors() as usize);
        let mut i = warp::lane_id();
        while i < len {
            let at = i as usize * self.capacity as usize + to;
            // SAFETY: the rows have scales, as the caller guarantees.
            unsafe {
                let scale = mem::load(from.wrapping_add(i as usize));
                mem::store(self.scales.wrapping_add(at), scale);
            }
            i += warp::WARP_SIZE;
        }
    }
}

/// Puts the rows of `received` in the order of the experts.
///
/// A row beyond `grouped.capacity` is left out, and the number of rows that were needed is recorded
/// in `faults`. Rows between those of two experts, for alignment, are not written. All of it is
/// determined by the routing.
///
/// Grid: any, best a block for each row. Block: a multiple of 32 threads up to 512. May be a
/// dependent launch. `ranks` is the number of ranks whose tokens `received` has.
///
/// # Safety
///
/// `received` is what `ep_dispatch` has left there, `faults` points to [`Faults::WORDS`] words, and
/// `grouped` has room: `capacity` for rows and origins, `shape.experts` for sizes and one more for
/// offsets, [`RETURN_WORDS`] for each token. Nothing else accesses these until the kernel has
/// ended.
#[kernel(
    max_threads = 512,
    requires(shape.experts <= 1024, shape.top_k <= 16, grouped.alignment > 0)
)]
pub unsafe fn ep_layout(
    shape: Shape,
    ranks: u32,
    received: Received,
    grouped: Grouped,
    faults: *mut u32,
) {
    grid::launch_next();
    grid::wait_for_previous();
    let layout = Layout { shape, ranks, received, grouped, faults, shared: Shared::new() };
    // SAFETY: the kernel's caller guarantees what the dispatch has left, and the room.
    unsafe {
        let rows = layout.tokens();
        let own = share(rows as usize, thread::block_idx_x() as usize, blocks() as usize);
        let (first, count) = (own.0 as u32, own.1 as u32);
        layout.count(first);
        layout.sum_up();
        let mut at = first;
        while at < first + count {
            let batch = BATCH.min(first + count - at);
            layout.stage(at, batch);
            thread::sync_threads();
            if thread::thread_idx_x() < warp::WARP_SIZE {
                layout.place(at, batch);
            }
            thread::sync_threads();
            layout.copy(at, batch);
            at += BATCH;
        }
    }
}

fn blocks() -> u32 {
    thread::grid_dim_x()
}

/// The block's shared memory.
#[derive(Clone, Copy)]
struct Shared {
    /// The number of rows of each expert.
    totals: *mut u32,
    /// The number of each expert's rows before this block's, and later the place of its next row.
    next: *mut u32,
    /// The sums of each warp.
    sums: *mut u32,
    /// The experts and weights of a batch, and then the positions of each row.
    experts: *mut u32,
    weights: *mut f32,
    positions: *mut u32,
    /// The number of positions of each row of a batch.
    lens: *mut u32,
}

impl Shared {
    fn new() -> Self {
        const ENTRIES: usize = BATCH as usize * Shape::TOP_K;
        Self {
            totals: shared_array![u32; Shape::EXPERTS],
            next: shared_array![u32; Shape::EXPERTS],
            sums: shared_array![u32; WARPS],
            experts: shared_array![u32; ENTRIES],
            weights: shared_array![f32; ENTRIES],
            positions: shared_array![u32; ENTRIES],
            lens: shared_array![u32; BATCH as usize],
        }
    }
}

struct Layout {
    shape: Shape,
    ranks: u32,
    received: Received,
    grouped: Grouped,
    faults: *mut u32,
    shared: Shared,
}

impl Layout {
    /// Returns how many tokens a rank has.
    unsafe fn tokens_of(&self, rank: u32) -> u32 {
        // SAFETY: `received` has a count for each rank, as the kernel's caller guarantees.
        unsafe { mem::load(self.received.counts.wrapping_add(rank as usize)) }
    }

    /// Returns how many tokens there are.
    unsafe fn tokens(&self) -> u32 {
        let (mut all, mut rank) = (0, 0);
        while rank < self.ranks {
            // SAFETY: the rank is one of those whose tokens `received` has.
            all += unsafe { self.tokens_of(rank) };
            rank += 1;
        }
        all
    }

    /// Returns the index of a token in [`Received`], given its number among those of all ranks.
    unsafe fn index(&self, mut token: u32) -> usize {
        let mut rank = 0;
        loop {
            // SAFETY: the kernel's caller guarantees the memory; the token is one of a rank.
            let count = unsafe { self.tokens_of(rank) };
            if token < count || rank + 1 == self.ranks {
                return (rank * self.shape.tokens + token) as usize;
            }
            token -= count;
            rank += 1;
        }
    }

    /// Counts the rows of each expert, and those before the token `first`.
    ///
    /// # Safety
    ///
    /// All threads of the block call this.
    unsafe fn count(&self, first: u32) {
        let Shape { tokens, top_k, experts, .. } = self.shape;
        let (thread, threads) = (thread::thread_idx_x(), thread::block_dim_x());
        // SAFETY: all threads of the block are here, and each word is below its array's length.
        unsafe {
            let mut i = thread;
            while i < experts {
                mem::store(self.shared.totals.wrapping_add(i as usize), 0);
                mem::store(self.shared.next.wrapping_add(i as usize), 0);
                i += threads;
            }
            thread::sync_threads();
            let (mut rank, mut before) = (0, first);
            while rank < self.ranks {
                let count = self.tokens_of(rank);
                let of_rank = (rank * tokens * top_k) as usize;
                let mut at = thread;
                while at < count * top_k {
                    // Several are in flight together.
                    let (mut loaded, mut u) = ([0; UNROLL], 0);
                    while u < UNROLL {
                        let i = at + u as u32 * threads;
                        if i < count * top_k {
                            let from = self.received.experts.wrapping_add(of_rank + i as usize);
                            loaded[u] = mem::load(from) as usize;
                        }
                        u += 1;
                    }
                    let mut u = 0;
                    while u < UNROLL {
                        if loaded[u] > 0 {
                            add_one(self.shared.totals.wrapping_add(loaded[u] - 1));
                            if at + (u as u32) * threads < before * top_k {
                                add_one(self.shared.next.wrapping_add(loaded[u] - 1));
                            }
                        }
                        u += 1;
                    }
                    at += UNROLL as u32 * threads;
                }
                before = before.saturating_sub(count);
                rank += 1;
            }
            thread::sync_threads();
        }
    }

    /// Computes where the experts' rows begin. The first block stores it.
    ///
    /// # Safety
    ///
    /// All threads of the block call this.
    unsafe fn sum_up(&self) {
        let (experts, grouped) = (self.shape.experts, &self.grouped);
        let thread = thread::thread_idx_x();
        let each = experts.div_ceil(thread::block_dim_x());
        let (first, end) = (thread * each, (thread * each + each).min(experts));
        // SAFETY: all threads of the block are here, and each word is below its array's length.
        unsafe {
            let mut mine = 0;
            let mut i = first;
            while i < end {
                mine += self.padded(i);
                i += 1;
            }
            let mut at = sum_before(mine, self.shared.sums);
            let stores = thread::block_idx_x() == 0;
            let mut i = first;
            while i < end {
                let next = self.shared.next.wrapping_add(i as usize);
                mem::store(next, at + mem::load(next));
                if stores {
                    let total = mem::load(self.shared.totals.wrapping_add(i as usize));
                    mem::store(grouped.offsets.wrapping_add(i as usize), at);
                    mem::store(grouped.sizes.wrapping_add(i as usize), total);
                }
                at += self.padded(i);
                i += 1;
            }
            if stores && first < end && end == experts {
                mem::store(grouped.offsets.wrapping_add(experts as usize), at);
                if at > grouped.capacity {
                    Faults::record_rows(self.faults, at);
                }
            }
        }
    }

    /// Returns the rows of an expert, with those left free after them for alignment.
    ///
    /// # Safety
    ///
    /// The rows have been counted.
    unsafe fn padded(&self, expert: u32) -> u32 {
        // SAFETY: the rows have been counted, as the caller guarantees.
        let rows = unsafe { mem::load(self.shared.totals.wrapping_add(expert as usize)) };
        rows.div_ceil(self.grouped.alignment) * self.grouped.alignment
    }

    /// Loads the experts and weights of a batch.
    ///
    /// # Safety
    ///
    /// All threads of the block call this.
    unsafe fn stage(&self, first: u32, batch: u32) {
        let top_k = self.shape.top_k;
        let mut i = thread::thread_idx_x();
        while i < batch * top_k {
            let (row, k) = (i / top_k, (i % top_k) as usize);
            let to = row as usize * Shape::TOP_K + k;
            // SAFETY: the batch has the row, and the shared memory room for it.
            unsafe {
                let from = self.index(first + row) * top_k as usize + k;
                let expert = mem::load(self.received.experts.wrapping_add(from));
                let weight = mem::load(self.received.weights.wrapping_add(from));
                mem::store(self.shared.experts.wrapping_add(to), expert);
                mem::store(self.shared.weights.wrapping_add(to), weight);
            }
            i += thread::block_dim_x();
        }
    }

    /// Gives the rows of a batch their positions, in their order.
    ///
    /// # Safety
    ///
    /// The first warp of the block calls this.
    unsafe fn place(&self, first: u32, batch: u32) {
        let (lane, Shared { next, .. }) = (warp::lane_id(), self.shared);
        let Grouped { origins, returns, capacity, .. } = self.grouped;
        let mut row = 0;
        while row < batch {
            let staged = row as usize * Shape::TOP_K;
            // SAFETY: the batch has been staged, and only the first warp is here, with all lanes.
            unsafe {
                let index = self.index(first + row);
                let (mut expert, mut weight) = (0, 0.0);
                if lane < self.shape.top_k {
                    expert = mem::load(self.shared.experts.wrapping_add(staged + lane as usize));
                    weight = mem::load(self.shared.weights.wrapping_add(staged + lane as usize));
                }
                let is_here = expert > 0;
                let mut position = take_next(next, is_here.then(|| expert - 1));
                if position >= capacity {
                    position = DROPPED;
                } else if is_here {
                    mem::store(origins.wrapping_add(position as usize), index as u32);
                }
                let entries = returns.wrapping_add(index * RETURN_WORDS);
                let at = store_returns(entries, is_here, position, weight);
                if is_here {
                    mem::store(self.shared.positions.wrapping_add(staged + at), position);
                }
                let len = warp::ballot(is_here).count_ones();
                if lane == 0 {
                    mem::store(self.shared.lens.wrapping_add(row as usize), len);
                }
            }
            row += 1;
        }
    }

    /// Copies the rows of a batch to their positions.
    ///
    /// # Safety
    ///
    /// All threads of the block call this.
    unsafe fn copy(&self, first: u32, batch: u32) {
        let parts = Parts::<VECTORS>::new(self.shape.vectors);
        let mut index = warp::warp_id();
        while index < parts.count(batch) {
            let part = parts.at(index);
            // SAFETY: the batch has its positions, and this warp alone copies the part.
            unsafe {
                let len = mem::load(self.shared.lens.wrapping_add(part.row as usize));
                if len > 0 {
                    let from = self.index(first + part.row);
                    let mut vectors = [Vec16::<u32>::from_bits([0; 4]); VECTORS];
                    let mut i = 0;
                    while i < VECTORS {
                        if let Some(at) = part.vector_of(from, i) {
                            vectors[i] = mem::load_vec(self.received.rows.wrapping_add(4 * at));
                        }
                        i += 1;
                    }
                    let mut k = 0;
                    while k < len {
                        let of = part.row as usize * Shape::TOP_K + k as usize;
                        let to = mem::load(self.shared.positions.wrapping_add(of));
                        if to != DROPPED {
                            part.store(self.grouped.rows, to as usize, &vectors);
                        }
                        if part.is_first && to != DROPPED && !self.received.scales.is_null() {
                            let scales = self.received.scales;
                            self.grouped.copy_scales(self.shape, scales, from, to as usize);
                        }
                        k += 1;
                    }
                }
            }
            index += thread::block_dim_x() / warp::WARP_SIZE;
        }
    }
}
