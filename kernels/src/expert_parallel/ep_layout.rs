//! Puts the rows that a rank has received in the order of its experts, for a grouped product.

use super::prelude::*;

/// The rows that a block handles at a time.
const BATCH: u32 = 64;

/// Words for a token in [`Grouped::returns`]: a position and a weight for each expert.
pub const RETURN_WORDS: usize = 2 * Shape::TOP_K;

/// The mark after a token's last position.
pub(super) const NONE: u32 = u32::MAX;
/// The position of a row for which there was no room.
pub(super) const DROPPED: u32 = u32::MAX - 1;

/// Rows in the order of the experts. A row appears once for each of its experts in this rank;
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
    /// Copies a part of row `from` of `rows` to the positions that the lanes `to` have, and with
    /// the first part the row's scales, unless `scales` is null, to those of the lanes `all`, which
    /// include `to`. A whole warp calls this, and this warp alone copies the part.
    pub(super) unsafe fn copy(
        &self,
        shape: Shape,
        (rows, scales, from): (*const u32, *const f32, usize),
        part: Part<VECTORS>,
        position: u32,
        [to, mut all]: [u32; 2],
    ) {
        // SAFETY: all lanes are here, and the rows and positions exist, as the caller guarantees.
        unsafe {
            let row = if to != 0 { part.load(rows, from) } else { Payload::ZERO.row };
            while all != 0 {
                let lane = all.trailing_zeros();
                let at = warp::shuffle_idx(position, lane) as usize;
                if to >> lane & 1 == 1 {
                    part.store(self.rows, at, &row);
                }
                if part.is_first && !scales.is_null() {
                    let of_row = scales.wrapping_add(from * 4 * shape.scale_vectors() as usize);
                    for i in Coop::warp().strided((16 * shape.vectors).div_ceil(SCALED as u32)) {
                        let (i, capacity) = (i as usize, self.capacity as usize);
                        let to = self.scales.wrapping_add(i * capacity + at);
                        mem::store(to, mem::load(of_row.wrapping_add(i)));
                    }
                }
                all &= all - 1;
            }
        }
    }
}

/// Returns the lanes whose words of a token's [`returns`](Grouped::returns) are positions of rows
/// for which there is room. A whole warp calls this.
pub(super) unsafe fn positions(entries: u32) -> u32 {
    // SAFETY: the whole warp is here. Words of even lanes are positions.
    unsafe { warp::ballot(warp::lane_id().is_multiple_of(2) && entries < DROPPED) }
}

/// Puts the rows of `received` in the order of the experts.
///
/// A row beyond `grouped.capacity` is left out, and the number of rows that were needed is recorded
/// in `faults`. Rows between those of two experts, for alignment, are not written.
///
/// `ranks` is the number of ranks whose tokens `received` has. Grid: any, best a block for each
/// row. Block: a multiple of 32 threads up to 512. Dependent launch: allowed.
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
    let [totals, next] =
        [shared_array![u32; Shape::EXPERTS], shared_array![u32; Shape::EXPERTS]].map(Words);
    let counters = Counters { totals, next };
    let entries = Words(shared_array![u32; BATCH as usize * RETURN_WORDS]);
    let layout = Layout { shape, ranks, received, grouped, faults, counters, entries };
    // SAFETY: the kernel's caller guarantees what the dispatch has left, and the room.
    unsafe {
        let (block, blocks) = (thread::block_idx_x(), thread::grid_dim_x());
        let tokens = (0..ranks as usize).map(|rank| received.tokens_of(rank)).sum::<u32>();
        let (first, count) = share(tokens as usize, block as usize, blocks as usize);
        let end = (first + count) as u32;
        layout.count(first as u32);
        layout.find_starts(); // `place` reads the starts after the barrier that follows `stage`.
        for at in Strided::new(first as u32, end, BATCH) {
            let batch = BATCH.min(end - at);
            layout.stage(at, batch);
            thread::sync_threads();
            if thread::thread_idx_x() < warp::WARP_SIZE {
                layout.place(at, batch);
            }
            thread::sync_threads();
            layout.copy(at, batch);
            thread::sync_threads(); // The next batch has the same words.
        }
    }
}

/// A launch's arguments, and a block's words in shared memory. The whole block calls the unsafe
/// methods, with barriers between them.
struct Layout {
    shape: Shape,
    ranks: u32,
    received: Received,
    grouped: Grouped,
    faults: *mut u32,
    /// The rows of each expert.
    counters: Counters,
    /// The experts and weights of each row of a batch, and then its [`returns`](Grouped::returns).
    entries: Words,
}

impl Layout {
    /// Returns the index of a token in [`Received`], given its number among those of all ranks.
    unsafe fn index(&self, mut token: u32) -> u32 {
        let mut rank = 0;
        loop {
            // SAFETY: the kernel's caller guarantees the memory; the token is one of a rank.
            let count = unsafe { self.received.tokens_of(rank as usize) };
            if token < count || rank + 1 == self.ranks {
                return rank * self.shape.tokens + token;
            }
            token -= count;
            rank += 1;
        }
    }

    /// Counts the rows of each expert, and those before the token `first`.
    unsafe fn count(&self, first: u32) {
        let (Shape { tokens, top_k, experts, .. }, threads) = (self.shape, thread::block_dim_x());
        // SAFETY: the whole block is here, and each word is below its array's length.
        unsafe {
            self.counters.clear(experts);
            thread::sync_threads();
            let mut before = first;
            for rank in 0..self.ranks {
                let (count, of_rank) =
                    (self.received.tokens_of(rank as usize), rank * tokens * top_k);
                let ids = Words(self.received.experts.wrapping_add(of_rank as usize));
                for at in Strided::new(thread::thread_idx_x(), count * top_k, UNROLL * threads) {
                    let places = UNROLLED.map(|u| at + u * threads);
                    let loaded = places.map(|i| if i < count * top_k { ids.load(i) } else { 0 });
                    for u in 0..UNROLL as usize {
                        if loaded[u] > 0 {
                            self.counters.count(loaded[u] - 1, places[u] < before * top_k);
                        }
                    }
                }
                before = before.saturating_sub(count);
            }
            thread::sync_threads();
        }
    }

    /// Computes where the experts' rows begin. The first block stores it.
    unsafe fn find_starts(&self) {
        let (experts, Grouped { capacity, .. }) = (self.shape.experts, self.grouped);
        let (offsets, sizes) = (Words(self.grouped.offsets), Words(self.grouped.sizes));
        let (Counters { totals, next }, stores) = (self.counters, thread::block_idx_x() == 0);
        // SAFETY: the whole block is here, and each word is below its array's length.
        unsafe {
            self.counters.each_start(experts, self.grouped.alignment, |expert, start| {
                if expert < experts {
                    next.store(expert, start + next.load(expert));
                }
                if stores {
                    offsets.store(expert, start);
                    if expert < experts {
                        sizes.store(expert, totals.load(expert));
                    } else if start > capacity {
                        Faults::record_rows(self.faults, start, None);
                    }
                }
            });
        }
    }

    /// Loads the experts and weights of a batch.
    unsafe fn stage(&self, first: u32, batch: u32) {
        let (top_k, Received { experts, weights, .. }) = (self.shape.top_k, self.received);
        for i in Coop::cta().strided(batch * top_k) {
            let (row, k) = (i / top_k, i % top_k);
            let to = self.entries(row);
            // SAFETY: the batch has the row, and the shared memory room for it.
            unsafe {
                let from = self.index(first + row) * top_k + k;
                to.store(2 * k, Words(experts).load(from));
                to.store(2 * k + 1, Words(weights.cast()).load(from));
            }
        }
    }

    /// Gives the rows of a batch their positions, in their order. The first warp calls this.
    unsafe fn place(&self, first: u32, batch: u32) {
        let (lane, Grouped { origins, returns, capacity, .. }) = (warp::lane_id(), self.grouped);
        for row in 0..batch {
            let entries = self.entries(row);
            // SAFETY: the batch has been staged, and only the first warp is here, with all lanes.
            unsafe {
                let index = self.index(first + row);
                let has_expert = lane < self.shape.top_k;
                let [expert, weight] =
                    [0, 1].map(|at| if has_expert { entries.load(2 * lane + at) } else { 0 });
                let is_here = expert > 0;
                let mut position = self.counters.take_next(is_here.then(|| expert - 1));
                if position >= capacity {
                    position = DROPPED;
                } else if is_here {
                    Words(origins).store(position, index);
                }
                store_returns(entries, is_here, position, weight);
                warp::sync();
                let to = returns.wrapping_add(index as usize * RETURN_WORDS);
                Words(to).store(lane, entries.load(lane));
            }
        }
    }

    /// Copies the rows of a batch to their positions.
    unsafe fn copy(&self, first: u32, batch: u32) {
        let Received { rows, scales, .. } = self.received;
        for part in Parts::new(self.shape.vectors).of_block(0, batch) {
            // SAFETY: the batch has its positions, and this warp alone copies the part.
            unsafe {
                let entry = self.entries(part.row).load(warp::lane_id());
                let to = positions(entry);
                if to != 0 {
                    let from = self.index(first + part.row) as usize;
                    let from = (rows.cast_const(), scales.cast_const(), from);
                    self.grouped.copy(self.shape, from, part, entry, [to; 2]);
                }
            }
        }
    }

    /// Returns the words of a row of the batch, in the form of [`Grouped::returns`].
    fn entries(&self, row: u32) -> Words {
        Words(self.entries.0.wrapping_add(row as usize * RETURN_WORDS))
    }
}
