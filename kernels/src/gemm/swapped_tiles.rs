//! What happens to the sums of a tile of [`gemm_swapped`](super::gemm_swapped): split tiles are
//! added over the blocks of a cluster, and then stored.

use cuda_std::wgmma::Factor;

use super::prelude::*;
use super::shapes::{Division, STORE_EIGHTS, Shape, WARPGROUP_N};
use super::swapped_stores::{Groups, Part, Sums, Target, four};

type BTile<T> = SharedTile<T, WARPGROUP_N>;

/// The state that the threads of a block share.
pub(super) struct Block<T, S, E> {
    pub(super) memory: TileMemory,
    /// Completes when the other blocks' sums of a split tile have arrived.
    pub(super) received: MBarrier,
    /// Completes when the blocks of this tile have read the sums of a split tile, which this block
    /// may then send again. A thread of each of their warpgroups arrives.
    pub(super) drained: MBarrier,
    pub(super) schedule: Schedule,
    /// The rank in the cluster of the first block of this block's tile.
    pub(super) first_split: u32,
    /// Rows of clusters' tiles. Clusters that run at the same time compute tiles of one column,
    /// which need the same rows of B.
    pub(super) rows: u32,
    /// The block's row and column in its cluster's tiles.
    pub(super) row: u32,
    pub(super) column: u32,
    /// Rows and columns of C.
    pub(super) end: (u32, u32),
    pub(super) division: Division,
    pub(super) slices: Option<Slices>,
    pub(super) epilogue: E,
    /// [`Epilogue::is_identity`], asked before the products, while there is time.
    pub(super) is_plain: bool,
    pub(super) shape: PhantomData<(T, S)>,
}

impl<T: Factor, S: Shape, E: Epilogue<Output: Half>> Block<T, S, E> {
    /// Returns the tile of a cluster's work, and the slice of its terms.
    pub(super) fn tile_and_slice(&self, tile: u32) -> (u32, u32) {
        match self.slices {
            Some(Slices { count, .. }) => (tile / count, tile % count),
            None => (tile, 0),
        }
    }

    /// Returns the first row and column of this block's tile of C.
    pub(super) fn origin(&self, tile: u32) -> (u32, u32) {
        let (tile, _) = self.tile_and_slice(tile);
        let (row, column) = match self.rows {
            1 => (0, tile),
            rows => (tile % rows, tile / rows),
        };
        let Division { across, down, .. } = self.division;
        ((row * down + self.row) * S::M, (column * across + self.column) * S::N)
    }

    /// Returns the first row of B that is loaded for a tile that begins with this column, and how
    /// many of the loaded rows are not the tile's.
    ///
    /// TMA takes several times as long for a row beyond the end as for another row. So the last
    /// tile is loaded with rows before its own, whole groups of eight. After the rows of B, the
    /// rows of A that come next in the stage are multiplied, into columns beyond C.
    pub(super) fn loaded_b(&self, column: u32) -> (u32, u32) {
        let n = self.end.1;
        let before = column.saturating_sub(n.saturating_sub(S::N)) / 8 * 8;
        if column >= n {
            (column - before, 0)
        } else if before % WARPGROUP_N <= S::DEPTH * S::M {
            // The last warpgroup reads `before % 64` rows beyond those of B: rows of A, if that
            // many follow in the stage.
            (column - before, before)
        } else {
            (column, 0)
        }
    }

    /// Returns the tile of `height` rows after `skipped` rows, at this depth of a stage.
    pub(super) fn tile(&self, stage: u32, skipped: u32, height: u32, depth: u32) -> BTile<T> {
        let rows = S::DEPTH * skipped + depth * height;
        self.memory.tile(stage * S::STAGE + 128 * rows)
    }

    /// Returns whether `sums` become a warpgroup's sums of all terms, as they do in the block that
    /// is the last one to have the sums of its slice. The conditions are those of [`Slices::add`].
    pub(super) unsafe fn has_all(&self, tile: u32, sums: &mut S::Sums) -> bool {
        let Some(slices) = self.slices else { return true };
        let (tile, slice) = self.tile_and_slice(tile);
        let Division { across, down, .. } = self.division;
        let tile = (tile * down + self.row) * across + self.column;
        // SAFETY: the warpgroups come here once for the tile; the caller guarantees the memory.
        unsafe { slices.add::<S>(tile, slice, sums) }
    }

    /// Returns the largest number of groups of eight rows of a split tile that one block adds.
    pub(super) fn share(&self) -> u32 {
        (S::M / 8).div_ceil(self.schedule.splits)
    }

    /// Returns the offset of the four sums from block `from` for this thread's `eight`-th group.
    pub(super) fn slot(&self, from: u32, eight: u32) -> u32 {
        let group = from * self.share() + eight;
        self.division.sums + 16 * (group * 2 * S::N + thread::thread_idx_x())
    }

    /// Sends the sums of the `split`-th split tile, to each block of the cluster its share. The
    /// multiplying warpgroups of all blocks of the cluster call it, and then
    /// [`store_received`](Self::store_received).
    pub(super) unsafe fn send(&self, sums: &[f32], split: u32) {
        if self.division.sums == 0 {
            // After this, all stages of all blocks have been read.
            // SAFETY: all threads of the cluster call this, those that load in `Product::loaded`.
            unsafe { cluster::sync_relaxed() };
        } else if split > 0 {
            self.drained.wait((split - 1) % 2);
        }
        let (mut block, mut eight) = (0, 0);
        for i in 0..S::M / 8 {
            let value = Vec16::<f32>::from_bits(four(sums, i).map(f32::to_bits));
            let slot = self.slot(self.schedule.rank, eight);
            // SAFETY: each thread has slots of its own in each block, whose last sums were read.
            unsafe {
                if block == self.schedule.rank {
                    self.memory.write(slot, value);
                } else {
                    self.memory.send(slot, self.first_split + block, value, self.received);
                }
            }
            eight += 1;
            if eight == self.share() {
                (block, eight) = (block + 1, 0);
            }
        }
    }

    /// Applies the epilogue to a tile of this origin, and stores it: its `sums`, or the block's
    /// share of the `split`-th split tile. The conditions are those of [`Target::store`], and for a
    /// split tile [`store_received`](Self::store_received).
    pub(super) unsafe fn store_tile<C: Target, P: Epilogue<Output: Half>>(
        &self,
        target: C,
        sums: &S::Sums,
        split: Option<u32>,
        origin: (u32, u32),
        epilogue: P,
    ) {
        // SAFETY: the caller is a whole warpgroup, and a split tile's sums were sent before.
        unsafe {
            if let Some(split) = split {
                return self.store_received(target, split, origin, epilogue);
            }
            if P::SENDS_EARLY {
                for first in Strided::new(0, S::M / 8, STORE_EIGHTS) {
                    epilogue.send_early(&mut self.whole_groups(sums, first, origin).part);
                }
            }
            // The calls are written out, as a loop of this length would not be unrolled.
            self.store_whole::<0, C>(target, sums, origin, epilogue);
            self.store_whole::<4, C>(target, sums, origin, epilogue);
            self.store_whole::<8, C>(target, sums, origin, epilogue);
            self.store_whole::<12, C>(target, sums, origin, epilogue);
            self.store_whole::<16, C>(target, sums, origin, epilogue);
            self.store_whole::<20, C>(target, sums, origin, epilogue);
            self.store_whole::<24, C>(target, sums, origin, epilogue);
            self.store_whole::<28, C>(target, sums, origin, epilogue);
        }
    }

    /// Adds and stores the block's share of the `split`-th split tile. The conditions are those of
    /// [`send`](Self::send), which was called before.
    pub(super) unsafe fn store_received<C: Target, P: Epilogue<Output: Half>>(
        &self,
        target: C,
        split: u32,
        (row, column): (u32, u32),
        epilogue: P,
    ) {
        let Schedule { rank, splits, .. } = self.schedule;
        let begin = rank * self.share();
        let left = (S::M / 8).saturating_sub(begin);
        let count = if left < self.share() { left } else { self.share() };
        if count > 0 {
            if thread::thread_idx_x() == 0 {
                self.received.arrive_expect_tx((splits - 1) * count * S::N * 32); // 8 rows of f32.
            }
            // The next phase ends after all have waited: blocks send again only after `drained`.
            self.received.wait(split % 2);
        }
        let row = row + 8 * begin;
        // The other blocks store the rows after these.
        let end = self.end.0.min(row + 8 * count);
        for first in Strided::new(0, if P::SENDS_EARLY { count } else { 0 }, STORE_EIGHTS) {
            // SAFETY: the slots were received.
            let sums = unsafe { self.add_received(first, count) };
            epilogue.send_early(&mut self.groups((first, count), (row, column), end, sums).part);
        }
        for first in Strided::new(0, count, STORE_EIGHTS) {
            // SAFETY: the caller is a whole warpgroup; the slots from `first` on were received.
            unsafe {
                let sums = self.add_received(first, count);
                let groups = self.groups((first, count), (row, column), end, sums);
                target.store(self, groups, epilogue);
            }
        }
    }

    /// Returns this thread's sums of up to [`STORE_EIGHTS`] of `count` groups of eight rows of the
    /// block's share, from the `first` on, over all blocks of the cluster. The sums of all blocks
    /// for these groups were received.
    unsafe fn add_received(&self, first: u32, count: u32) -> Sums {
        let mut sums: Sums = [0.0; _];
        for eight in 0..STORE_EIGHTS {
            let mut from = 0;
            while from < self.schedule.splits && first + eight < count {
                // SAFETY: the slots are this thread's, and were received.
                let sent = unsafe { self.memory.read::<f32>(self.slot(from, first + eight)) };
                for i in 0..4 {
                    sums[4 * eight as usize + i] += f32::from_bits(sent.to_bits()[i]);
                }
                from += 1;
            }
        }
        sums
    }

    /// Stores [`STORE_EIGHTS`] groups of eight rows of a whole tile of this origin, from the
    /// `FIRST` on, if it has them. The conditions are those of [`Target::store`].
    unsafe fn store_whole<const FIRST: u32, C: Target>(
        &self,
        target: C,
        all: &S::Sums,
        origin: (u32, u32),
        epilogue: impl Epilogue<Output: Half>,
    ) {
        if FIRST < S::M / 8 {
            // SAFETY: the caller is a whole warpgroup, and the target's memory is C.
            unsafe { target.store(self, self.whole_groups(all, FIRST, origin), epilogue) };
        }
    }

    /// Returns groups of a whole tile of this origin, from the `first` on.
    fn whole_groups(&self, all: &S::Sums, first: u32, origin: (u32, u32)) -> Groups<S> {
        let (all, from) = (all.as_ref(), 4 * first as usize);
        let mut sums: Sums = [0.0; _];
        for i in 0..sums.len() {
            if from + i < all.len() {
                sums[i] = all[from + i];
            }
        }
        // Some of the last rows that are stored together may belong to other blocks: an epilogue
        // must not read or send them.
        let ends_with_part = S::M < 8 * STORE_EIGHTS || S::M.is_multiple_of(8 * STORE_EIGHTS);
        let end = if ends_with_part { self.end.0 } else { self.end.0.min(origin.0 + S::M) };
        self.groups((first, S::M / 8), origin, end, sums)
    }

    /// Returns groups of eight rows with these sums.
    fn groups(
        &self,
        (first, count): (u32, u32),
        (row, column): (u32, u32),
        end: u32,
        sums: Sums,
    ) -> Groups<S> {
        let part = Part::of_thread(sums, first, (row, column), (end, self.end.1));
        Groups { first, count, origin: (row, column), part }
    }
}
