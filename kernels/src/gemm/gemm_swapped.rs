//! The product of few rows of A and many of B on Hopper.
//!
//! With few rows of A, the time is that of reading B. So the factors change places: rows of B are
//! the 64 rows of a `wgmma`, those of A its columns, and a tile of C is as tall as A. Two warps
//! load, one each factor, so that the loads of B begin before the previous kernel has ended; one or
//! two warpgroups multiply. Tiles of the last round are split over the blocks of a cluster, which
//! add their sums through distributed shared memory. Blocks of a cluster that compute neighbouring
//! tiles may load the rows that they share once, each a part for all.

use core::marker::PhantomData;

use cuda_std::convert::Half;
use cuda_std::mbarrier::MBarrier;
use cuda_std::prelude::*;
use cuda_std::tile::{
    EmptyStage, IdleWarp, MAX_STAGES, Mainloop, RegisterSplit, Schedule, Scheduler, SharedTile,
    TileMemory, Warpgroup, Work,
};
use cuda_std::vector::Vec16;
use cuda_std::wgmma::Factor;
use cuda_std::{cluster, grid, tma, wgmma};
use devcomm_types::{GridConstant, TensorMap};

use super::epilogue::{Epilogue, Fragment, Fused, Identity};
use super::slices::Slices;

/// Columns of C of a warpgroup: rows of B in one of its tiles.
pub const WARPGROUP_N: u32 = 64;
/// Terms of the sums that a tile in shared memory has.
const TILE_K: u32 = SharedTile::<bf16, WARPGROUP_N>::COLUMNS;
/// Rows of C that one instruction stores.
pub const STORE_M: u32 = 8;
/// Groups of eight rows that a warpgroup stores together.
pub(super) const STORE_EIGHTS: u32 = 4;
/// The sums of a split tile in bytes above which they lie over the stages if they can.
const LARGE_SUMS: u32 = 32 << 10;
/// Threads that do not multiply: a warpgroup, of which two warps load.
const LOADING: u32 = 128;
/// The named barrier of the first warpgroup.
pub(super) const WARPGROUP_BARRIER: u32 = 1;

type BTile<T> = SharedTile<T, WARPGROUP_N>;
type Eight<O> = SharedTile<O, 8>;

/// The shape of a tile of C.
pub trait Shape {
    /// A thread's sums: for each eight rows of C, four.
    type Sums: wgmma::Sums + AsRef<[f32]> + AsMut<[f32]>;
    /// No sums yet.
    const ZERO: Self::Sums;
    /// Rows of C.
    const M: u32;
    /// Columns of C: [`WARPGROUP_N`] for each warpgroup.
    const N: u32;
    /// Tiles of 64 terms in a stage: more for small tiles, of which a barrier is a large
    /// part of the time.
    const DEPTH: u32;
    /// Whether blocks of a cluster may share what they load. The code for it makes every launch
    /// longer.
    const SHARES: bool;
    /// Terms of a stage.
    const K: u32 = Self::DEPTH * TILE_K;
    /// Bytes of a stage.
    const STAGE: u32 = Self::DEPTH * (Self::M + Self::N) * 128;
    /// Bytes of the buffers for stores: two for each warpgroup.
    const STORE: u32 = Self::N / WARPGROUP_N * 2 * STORE_EIGHTS * Eight::<bf16>::BYTES;
    /// Threads per block.
    const THREADS: u32 = 2 * Self::N + LOADING;

    /// Bytes of the sums of a split tile that a block receives, its own among them.
    fn received(splits: u32) -> u32 {
        splits * (Self::M / 8).div_ceil(splits) * Self::N * 32
    }
}

macro_rules! shapes {
    ($($name:ident: $m:literal x $n:literal, $depth:literal, $shares:literal;)*) => {
        /// Rows and columns of the shapes that there are.
        pub const SHAPES: [(u32, u32); [$($m),*].len()] = [$(($m, $n)),*];

        /// [`Shape::SHARES`] of the shape with these rows and columns.
        #[must_use]
        pub fn shares(tile: (u32, u32)) -> bool {
            $($shares && tile == ($m, $n))||*
        }

        $(
        #[doc = concat!(stringify!($m), " rows and ", stringify!($n), " columns.")]
        pub struct $name;

        impl Shape for $name {
            type Sums = [f32; $m / 2];
            const ZERO: Self::Sums = [0.0; $m / 2];
            const M: u32 = $m;
            const N: u32 = $n;
            const DEPTH: u32 = $depth;
            const SHARES: bool = $shares;
        }
        )*
    };
}

shapes! {
    M8N64: 8 x 64, 2, false;
    M16N64: 16 x 64, 2, false;
    M32N64: 32 x 64, 2, false;
    M64N64: 64 x 64, 2, false;
    M96N64: 96 x 64, 1, true;
    M112N64: 112 x 64, 1, true;
    M128N64: 128 x 64, 1, false;
    M256N64: 256 x 64, 1, false;
    M8N128: 8 x 128, 1, false;
    M16N128: 16 x 128, 1, false;
    M32N128: 32 x 128, 1, false;
    M48N128: 48 x 128, 1, false;
    M64N128: 64 x 128, 1, false;
    M80N128: 80 x 128, 1, true;
    M96N128: 96 x 128, 1, true;
    M112N128: 112 x 128, 1, true;
    M128N128: 128 x 128, 1, true;
    M144N128: 144 x 128, 1, true;
    M160N128: 160 x 128, 1, true;
    M176N128: 176 x 128, 1, true;
    M192N128: 192 x 128, 1, true;
    M208N128: 208 x 128, 1, true;
    M224N128: 224 x 128, 1, true;
    M256N128: 256 x 128, 1, true;
}

/// The blocks of a cluster: `splits * across * down`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cluster {
    /// Blocks over which a tile is split.
    pub splits: u32,
    /// Tiles side by side, which share rows of A. Divides [`Shape::M`] / 8.
    pub across: u32,
    /// Tiles one below the other, which share rows of B. Divides [`Shape::N`] / 8.
    pub down: u32,
}

impl Cluster {
    /// Its number of blocks.
    #[must_use]
    pub const fn blocks(self) -> u32 {
        self.splits * self.across * self.down
    }
}

/// How a launch divides the work.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, KernelParam)]
pub struct Division {
    /// See [`Cluster::across`].
    pub across: u32,
    /// See [`Cluster::down`].
    pub down: u32,
    /// Stages of the pipeline, from 2 to [`MAX_STAGES`].
    pub stages: u32,
    /// Tiles that one block computes, as [`Schedule::whole`].
    pub whole: u32,
    /// Where the sums of split tiles lie in the dynamic shared memory, in bytes: behind the stages
    /// and the buffers for stores. Or 0, over the stages, if no cluster splits more than one tile.
    pub sums: u32,
    /// Whether no earlier kernel of the stream that may still run writes A. It is then read before
    /// a dependent launch has waited for them.
    pub constant_a: bool,
    /// The same of B.
    pub constant_b: bool,
}

impl Division {
    /// The division of a product among clusters, of which `clusters` are resident, and the number
    /// of clusters and the dynamic shared memory to launch with, of at most `shared` bytes. `None`
    /// if that is too little, the shape shares no loads, or there is not a cluster for each slice
    /// of each tile.
    #[must_use]
    pub fn of<S: Shape>(
        [m, n, k]: [u32; 3],
        Cluster { splits, across, down }: Cluster,
        slices: u32,
        clusters: u32,
        shared: u32,
    ) -> Option<(Self, u32, u32)> {
        if across * down > 1 && !S::SHARES {
            return None;
        }
        let rows = m.div_ceil(S::M).div_ceil(down);
        let tiles = rows.checked_mul(n.div_ceil(S::N).div_ceil(across))?.checked_mul(slices)?;
        if slices > 1 && (splits > 1 || tiles > clusters) {
            return None;
        }
        let clusters = clusters.min(tiles);
        if clusters == 0 {
            return None;
        }
        let whole =
            if splits == 1 { tiles } else { Schedule::whole_tiles(tiles, clusters, splits) };
        let clusters = if whole == tiles { clusters.min(tiles.div_ceil(splits)) } else { clusters };
        let sums = if whole == tiles { 0 } else { S::received(splits) };
        // Behind the stages, a tile's sums do not delay the loads for the next one.
        let one_round = tiles - whole <= clusters;
        let behind = if one_round && sums > LARGE_SUMS { 0 } else { sums };
        let room = shared.checked_sub(S::STORE + TileMemory::PADDING + behind)?;
        let steps = k.div_ceil(S::K).div_ceil(slices);
        let needed = tiles.div_ceil(clusters).saturating_mul(steps).max(2);
        let stages = (room / S::STAGE).min(MAX_STAGES).min(needed);
        let stages = stages.max((sums - behind).div_ceil(S::STAGE));
        if stages < 2 || stages * S::STAGE > room {
            return None;
        }
        let end = stages * S::STAGE + S::STORE;
        let sums = if behind == sums { end } else { 0 };
        let (constant_a, constant_b) = (false, false);
        let division = Self { across, down, stages, whole, sums, constant_a, constant_b };
        Some((division, clusters, end + behind + TileMemory::PADDING))
    }
}

/// `C = A x B^T` in bf16 or f16, with an epilogue, for few rows of A, for Hopper.
///
/// `a` is a tensor map with tiles of [`Shape::M`] / [`Cluster::across`] rows, `b` of [`Shape::N`] /
/// [`Cluster::down`], `c` of [`STORE_M`].
///
/// Grid: clusters of 1, 2, 4 or 8 blocks, all resident. Block: [`Shape::THREADS`] threads, with
/// dynamic shared memory for the stages ([`Shape::STAGE`] each), the stores ([`Shape::STORE`]), the
/// sums of split tiles ([`Shape::received`] with [`Division::sums`]) and [`TileMemory::PADDING`].
/// May be a dependent launch.
///
/// # Safety
///
/// The matrices of the maps are allocated, and have `m x k`, `n x k` and `m x n` elements. No other
/// kernel writes A, B or what the epilogue reads, or accesses C, but those before a dependent
/// launch, for A and B as far as [`Division::constant_a`] and [`Division::constant_b`] say.
#[kernel(arch = "sm_90a", max_threads = 384, T = [bf16, f16], S = [
    M8N64, M16N64, M32N64, M64N64, M96N64, M112N64, M128N64, M256N64, M8N128, M16N128, M32N128,
    M48N128, M64N128, M80N128, M96N128, M112N128, M128N128, M144N128, M160N128, M176N128,
    M192N128, M208N128, M224N128, M256N128
])]
pub unsafe fn gemm_swapped<T: Half + Factor, S: Shape>(
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: GridConstant<TensorMap>,
    m: u32,
    n: u32,
    k: u32,
    division: Division,
    epilogue: Fused<T>,
) {
    // SAFETY: the kernel's contract.
    unsafe { product::<T, S, _>([&a, &b, &c], [m, n, k], division, epilogue) }
}

/// [`gemm_swapped()`] whose terms are divided among clusters. Taller tiles leave it too few
/// registers.
///
/// # Safety
///
/// As for [`gemm_swapped()`]. The memory of the slices is as [`Slices`] says.
#[kernel(arch = "sm_90a", max_threads = 384, T = [bf16, f16], S = [
    M96N64, M112N64, M80N128, M96N128, M112N128, M128N128, M144N128, M160N128
])]
pub unsafe fn gemm_swapped_sliced<T: Half + Factor, S: Shape>(
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: GridConstant<TensorMap>,
    m: u32,
    n: u32,
    k: u32,
    division: Division,
    slices: Slices,
    epilogue: Fused<T>,
) {
    // SAFETY: the kernel's contract.
    unsafe { compute::<T, S, _, _>([&a, &b], &*c, [m, n, k], division, Some(slices), epilogue) }
}

/// The body of [`gemm_swapped()`] with any epilogue, for kernels with its grid and its block. The
/// attribute is `#[kernel(arch = "sm_90a", max_threads = 384)]`.
///
/// # Safety
///
/// As for [`gemm_swapped()`], and what the epilogue needs.
pub unsafe fn product<T: Factor, S: Shape, E: Epilogue<Output: Half>>(
    [a, b, c]: [&TensorMap; 3],
    shape: [u32; 3],
    division: Division,
    epilogue: E,
) {
    // SAFETY: the caller's contract.
    unsafe { compute::<T, S, E, _>([a, b], c, shape, division, None, epilogue) }
}

/// The body of [`product()`] with any target, and perhaps with slices.
///
/// # Safety
///
/// As for [`gemm_swapped()`], and what the epilogue needs.
pub(super) unsafe fn compute<T: Factor, S: Shape, E: Epilogue<Output: Half>, C: Target>(
    [a, b]: [&TensorMap; 2],
    target: C,
    [m, n, k]: [u32; 3],
    division: Division,
    slices: Option<Slices>,
    epilogue: E,
) {
    let division = match S::SHARES {
        true => division,
        false => Division { across: 1, down: 1, ..division },
    };
    let Division { across, down, .. } = division;
    let mates = across * down;
    let splits = quotient(cluster::size(), mates);
    let place = quotient(cluster::rank(), splits);
    let (row, column) = (quotient(place, across), remainder(place, across));
    let rows = quotient(m.div_ceil(S::M) + down - 1, down);
    let columns = quotient(n.div_ceil(S::N) + across - 1, across);
    // SAFETY: the kernel's contract. Only this block's barriers use the words.
    unsafe {
        let block = Block::<T, S, E> {
            memory: TileMemory::dynamic(),
            received: MBarrier::at(shared_array![u64; 1]),
            drained: MBarrier::at(shared_array![u64; 1]),
            schedule: Schedule {
                tiles: rows * columns * slices.map_or(1, |slices| slices.count),
                whole: division.whole,
                steps: k.div_ceil(S::K),
                cluster: quotient(thread::block_idx_x(), cluster::size()),
                clusters: quotient(thread::grid_dim_x(), cluster::size()),
                rank: remainder(cluster::rank(), splits),
                splits,
            },
            first_split: place * splits,
            rows,
            end: (m, n),
            row,
            column,
            division,
            slices,
            epilogue,
            is_plain: epilogue.is_identity(),
            shape: PhantomData,
        };
        Product { block, maps: [b, a], target }.run();
    }
}

/// A quotient by a power of two.
fn quotient(number: u32, power: u32) -> u32 {
    number >> power.trailing_zeros()
}

/// The remainder.
fn remainder(number: u32, power: u32) -> u32 {
    number & (power - 1)
}

/// The blocks of a cluster that share rows of a factor.
#[derive(Clone, Copy)]
struct Share {
    blocks: u32,
    /// This block's place among them.
    index: u32,
    /// Their ranks, as bits.
    ranks: u16,
}

impl Share {
    /// This block's place is `index`, and their ranks are `distance` apart, a power of two.
    fn of(blocks: u32, index: u32, distance: u32) -> Self {
        // A `match` would be a table in global memory, which delays the first load.
        let every = 0x01_11_55_ff_u32 >> (8 * distance.trailing_zeros()) & 0xff;
        let first = cluster::rank() - index * distance;
        let ranks = ((every & ((1 << (blocks * distance)) - 1)) << first) as u16;
        Self { blocks, index, ranks }
    }
}

/// What the threads of a block share.
pub(super) struct Block<T, S, E> {
    memory: TileMemory,
    /// Completes when the other blocks' sums of a split tile have arrived.
    received: MBarrier,
    /// Completes when all blocks of the cluster have read them.
    drained: MBarrier,
    schedule: Schedule,
    /// The rank in the cluster of the first block of this block's tile.
    first_split: u32,
    /// Rows of clusters' tiles. Clusters that run at the same time compute tiles of one column,
    /// which need the same rows of B.
    rows: u32,
    /// The block's row and column in its cluster's tiles.
    row: u32,
    column: u32,
    /// Rows and columns of C.
    pub(super) end: (u32, u32),
    division: Division,
    slices: Option<Slices>,
    epilogue: E,
    /// [`Epilogue::is_identity`], asked before the products, while there is time.
    is_plain: bool,
    shape: PhantomData<(T, S)>,
}

/// Where the sums of a tile go.
pub(super) trait Target: Copy {
    /// Prefetches what a store needs.
    fn prefetch(self);

    /// Applies the epilogue to up to [`STORE_EIGHTS`] of `count` groups of eight rows, from the
    /// `first` on, and stores them. `sums` are a thread's of these. The group 0 begins at `row` and
    /// `column`, and rows from `end` on are not stored.
    ///
    /// # Safety
    ///
    /// The kernel's contract, and a warpgroup calls it.
    unsafe fn store<T: Factor, S: Shape, E: Epilogue<Output: Half>, P: Epilogue<Output: Half>>(
        self,
        block: &Block<T, S, E>,
        groups: (u32, u32),
        origin: (u32, u32),
        end: u32,
        sums: Sums,
        epilogue: P,
    );
}

impl<T: Factor, S: Shape, E: Epilogue<Output: Half>> Block<T, S, E> {
    /// The tile of a cluster's work, and the slice of its terms.
    fn tile_and_slice(&self, tile: u32) -> (u32, u32) {
        match self.slices {
            Some(Slices { count, .. }) => (tile / count, tile % count),
            None => (tile, 0),
        }
    }

    /// The first row and column of this block's tile of C.
    fn origin(&self, tile: u32) -> (u32, u32) {
        let (tile, _) = self.tile_and_slice(tile);
        let (row, column) = match self.rows {
            1 => (0, tile),
            rows => (tile % rows, tile / rows),
        };
        let Division { across, down, .. } = self.division;
        ((row * down + self.row) * S::M, (column * across + self.column) * S::N)
    }

    /// The first row of B that is loaded for a tile that begins with this column, and how many of
    /// them are not the tile's.
    ///
    /// TMA takes several times as long for a row beyond the end as for another. So the last tile is
    /// loaded with rows before its own, whole groups of eight. What is multiplied behind them, to
    /// columns beyond C's, are the rows of A that follow in the stage.
    fn loaded_b(&self, column: u32) -> (u32, u32) {
        let n = self.end.1;
        let before = column.saturating_sub(n.saturating_sub(S::N)) / 8 * 8;
        if column >= n {
            (column - before, 0)
        } else if before % WARPGROUP_N <= S::DEPTH * S::M {
            (column - before, before)
        } else {
            (column, 0)
        }
    }

    /// The first row of A that is loaded for a tile that begins with this row: a tile beyond C is
    /// multiplied as well, but by rows that there are.
    fn loaded_a(&self, row: u32) -> u32 {
        if row < self.end.0 { row } else { 0 }
    }

    /// The tile of `height` rows behind `skipped` rows, at this depth of a stage.
    fn tile(&self, stage: u32, skipped: u32, height: u32, depth: u32) -> BTile<T> {
        let rows = S::DEPTH * skipped + depth * height;
        self.memory.tile(stage * S::STAGE + 128 * rows)
    }

    /// Whether these are a warpgroup's sums of all terms: the last block of a tile's slices gets
    /// them.
    ///
    /// # Safety
    ///
    /// As [`Slices::add`].
    unsafe fn has_all(&self, tile: u32, sums: &mut S::Sums) -> bool {
        let Some(slices) = self.slices else { return true };
        let (tile, slice) = self.tile_and_slice(tile);
        let Division { across, down, .. } = self.division;
        let tile = (tile * down + self.row) * across + self.column;
        // SAFETY: the caller's contract.
        unsafe { slices.add::<S>(tile, slice, sums) }
    }

    /// The groups of eight rows of a split tile of which each block adds the sums, at most.
    fn share(&self) -> u32 {
        (S::M / 8).div_ceil(self.schedule.splits)
    }

    /// The offset of the four sums for this thread that block `from` sends of its `eight`-th group.
    fn slot(&self, from: u32, eight: u32) -> u32 {
        let group = from * self.share() + eight;
        self.division.sums + 16 * (group * 2 * S::N + thread::thread_idx_x())
    }

    /// Sends the sums of the `split`-th split tile, to each block of the cluster its share.
    ///
    /// # Safety
    ///
    /// The multiplying warpgroups of all blocks of the cluster call it, and then
    /// [`store_received`](Self::store_received).
    unsafe fn send(&self, sums: &[f32], split: u32) {
        if self.division.sums == 0 {
            // All stages of all blocks have been read.
            // SAFETY: the loading warps call it too.
            unsafe { cluster::sync_relaxed() };
        } else if split > 0 {
            self.drained.wait((split - 1) % 2);
        }
        let (mut block, mut eight) = (0, 0);
        let mut i = 0;
        while i < S::M / 8 {
            let value = Vec16::<f32>::from_bits(four(sums, i).map(f32::to_bits));
            let slot = self.slot(self.schedule.rank, eight);
            // SAFETY: each thread has slots of its own in each block, which no thread reads.
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
            i += 1;
        }
    }

    /// Applies the epilogue to a tile of this origin, and stores it: its `sums`, or the block's
    /// share of it if it is a split tile, the `received`-th one.
    ///
    /// # Safety
    ///
    /// As [`Target::store`], and for a split tile as [`store_received`](Self::store_received).
    unsafe fn store_tile<C: Target, P: Epilogue<Output: Half>>(
        &self,
        target: C,
        sums: &S::Sums,
        received: Option<u32>,
        origin: (u32, u32),
        epilogue: P,
    ) {
        // SAFETY: the caller's contract.
        unsafe {
            if let Some(split) = received {
                return self.store_received(target, split, origin, epilogue);
            }
            if P::AHEAD {
                let mut first = 0;
                while first < S::M / 8 {
                    let sums = from::<S>(sums, first);
                    epilogue.ahead(&mut self.part(first, origin, self.end_of_tile(origin), sums));
                    first += STORE_EIGHTS;
                }
            }
            // Written out: a loop of this length would not be unrolled.
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

    /// Adds and stores the block's share of the `split`-th split tile. Ends with a barrier of the
    /// warpgroup after its last read, if the block has a share.
    ///
    /// # Safety
    ///
    /// As [`send`](Self::send), which was called before.
    unsafe fn store_received<C: Target, P: Epilogue<Output: Half>>(
        &self,
        target: C,
        split: u32,
        (row, column): (u32, u32),
        epilogue: P,
    ) {
        let thread = thread::thread_idx_x();
        let Schedule { rank, splits, .. } = self.schedule;
        let begin = rank * self.share();
        let left = (S::M / 8).saturating_sub(begin);
        let count = if left < self.share() { left } else { self.share() };
        if count > 0 {
            if thread == 0 {
                self.received.arrive_expect_tx((splits - 1) * count * S::N * 32);
            }
            self.received.wait(split % 2);
        }
        let row = row + 8 * begin;
        // The other blocks store the rows behind.
        let end = self.end.0.min(row + 8 * count);
        let mut first = 0;
        while P::AHEAD && first < count {
            // SAFETY: the slots were received.
            let sums = unsafe { self.received(first, count) };
            epilogue.ahead(&mut self.part(first, (row, column), end, sums));
            first += STORE_EIGHTS;
        }
        let mut first = 0;
        while first < count {
            // SAFETY: the caller's contract.
            unsafe {
                let sums = self.received(first, count);
                target.store(self, (first, count), (row, column), end, sums, epilogue);
            }
            first += STORE_EIGHTS;
        }
    }

    /// This thread's sums of up to [`STORE_EIGHTS`] of `count` groups of eight rows of the block's
    /// share, from the `first` on, over all blocks of the cluster.
    ///
    /// # Safety
    ///
    /// They were received.
    unsafe fn received(&self, first: u32, count: u32) -> Sums {
        let mut sums = [0.0; 4 * STORE_EIGHTS as usize];
        let mut eight = 0;
        while eight < STORE_EIGHTS {
            let mut from = 0;
            while from < self.schedule.splits && first + eight < count {
                // SAFETY: the slots are this thread's, and were received.
                let sent = unsafe { self.memory.read::<f32>(self.slot(from, first + eight)) };
                let mut i = 0;
                while i < 4 {
                    sums[4 * eight as usize + i] += f32::from_bits(sent.to_bits()[i]);
                    i += 1;
                }
                from += 1;
            }
            eight += 1;
        }
        sums
    }

    /// Stores [`STORE_EIGHTS`] groups of eight rows of a whole tile of this origin, from the
    /// `FIRST` on, if it has them.
    ///
    /// # Safety
    ///
    /// As [`Target::store`].
    unsafe fn store_whole<const FIRST: u32, C: Target>(
        &self,
        target: C,
        all: &S::Sums,
        origin: (u32, u32),
        epilogue: impl Epilogue<Output: Half>,
    ) {
        if FIRST < S::M / 8 {
            let (sums, end) = (from::<S>(all, FIRST), self.end_of_tile(origin));
            // SAFETY: the caller's contract.
            unsafe { target.store(self, (FIRST, S::M / 8), origin, end, sums, epilogue) };
        }
    }

    /// Where the rows of a whole tile of this origin end that an epilogue may read or send: those
    /// behind it belong to other blocks.
    fn end_of_tile(&self, (row, _): (u32, u32)) -> u32 {
        let in_wholes = S::M < 8 * STORE_EIGHTS || S::M.is_multiple_of(8 * STORE_EIGHTS);
        if in_wholes { self.end.0 } else { self.end.0.min(row + S::M) }
    }

    /// A thread's sums of groups of eight rows from the `first` on; the group 0 begins at `row` and
    /// `column`, and rows from `end` on are not stored.
    fn part(&self, first: u32, (row, column): (u32, u32), end: u32, sums: Sums) -> Part<S> {
        let (warp, lane) = (thread::thread_idx_x() / warp::WARP_SIZE % 4, warp::lane_id());
        Part {
            sums,
            row: row + 8 * first + lane % 4 * 2,
            column: column + 16 * warp + lane / 4,
            end: (end, self.end.1),
            shape: PhantomData,
        }
    }
}

/// What is this product's own in the main loop.
struct Product<'a, T, S, E, C> {
    block: Block<T, S, E>,
    /// Those of B and A.
    maps: [&'a TensorMap; 2],
    target: C,
}

/// The tiles of a [`Schedule`], or slices of their terms.
#[derive(Clone, Copy)]
struct Sliced {
    schedule: Schedule,
    slices: Option<Slices>,
}

impl Scheduler for Sliced {
    type Work = Work;

    fn first(&self) -> Option<Work> {
        self.schedule.first()
    }

    fn next(&self, work: Work) -> Option<Work> {
        self.schedule.next(work)
    }

    fn steps(&self, work: Work) -> (u32, u32) {
        match self.slices {
            Some(Slices { count, .. }) => {
                let first = |slice| slice * self.schedule.steps / count;
                let slice = work.tile % count;
                (first(slice), first(slice + 1))
            }
            None => self.schedule.steps(work),
        }
    }
}

/// More registers for the sums of tall tiles.
struct Raised<S>(PhantomData<S>);

impl<S: Shape> RegisterSplit for Raised<S> {
    const REGISTERS: Option<[u32; 2]> = if S::M > 128 { Some([232, 40]) } else { None };

    unsafe fn raise() {
        if S::M > 128 {
            // SAFETY: the caller's contract.
            unsafe { wgmma::raise_registers::<232>() }
        }
    }

    unsafe fn lower() {
        if S::M > 128 {
            // SAFETY: the caller's contract.
            unsafe { wgmma::lower_registers::<40>() }
        }
    }
}

/// Where a loading warp finds its factor's rows, and where they go.
struct Source {
    row: u32,
    /// The rows that another factor has before it in each stage, and its own.
    skipped: u32,
    height: u32,
    share: Share,
    /// Whether no other block needs the rows.
    once: bool,
}

/// What a thread keeps that multiplies.
struct State<E> {
    epilogue: E,
    /// The first threads of a warpgroup release a stage, each to one of the blocks that load for
    /// it: those in its row, then the others in its column.
    releasing: bool,
    releases: u32,
    /// The first row of B in a stage that is the warpgroup's.
    first: u32,
    /// The row and the column of the block's tile.
    origin: (u32, u32),
    /// Split tiles before this one.
    split: u32,
    /// Whether the previous kernels have ended, which may read C.
    waited: bool,
}

// SAFETY: the tiles are a stage's, and as many bytes are expected. `compute` only multiplies.
unsafe impl<T: Factor, S: Shape, E: Epilogue<Output: Half>, C: Target> Mainloop
    for Product<'_, T, S, E, C>
{
    type Schedule = Sliced;
    type Registers = Raised<S>;
    type Sums = S::Sums;
    type Source = Source;
    type State = State<E>;

    const COMPUTING: u32 = S::N / WARPGROUP_N;
    const LOADING: u32 = 2;

    fn stages(&self) -> u32 {
        self.block.division.stages
    }

    fn schedule(&self) -> Sliced {
        Sliced { schedule: self.block.schedule, slices: self.block.slices }
    }

    fn arrivals(&self) -> u32 {
        let Division { across, down, .. } = self.block.division;
        (across + down - 1) * Self::COMPUTING
    }

    #[track_caller]
    fn release(&self, _: &Warpgroup, state: &State<E>, empty: MBarrier) {
        let Division { across, down, .. } = self.block.division;
        if state.releasing {
            if across + down == 2 { empty.arrive() } else { empty.arrive_in(state.releases) }
        }
    }

    fn init(&self) {
        // SAFETY: thread 0 calls this, before a barrier.
        unsafe {
            self.block.received.init(1);
            self.block.drained.init(self.block.schedule.splits * Self::COMPUTING);
        }
    }

    #[track_caller]
    fn sync(&self) {
        if cluster::size() > 1 {
            // SAFETY: all threads of the cluster call it.
            unsafe { cluster::sync_relaxed() };
        } else {
            thread::sync_threads();
        }
    }

    fn prepare(&self, loader: u32) {
        tma::prefetch_map(self.maps[loader as usize]);
        let Division { constant_a, constant_b, .. } = self.block.division;
        if ![constant_b, constant_a][loader as usize] {
            grid::wait_for_previous();
        }
    }

    fn source(&self, loader: u32, work: Work) -> Source {
        let Block { division, schedule, row, column, end, .. } = self.block;
        let Division { across, down, .. } = division;
        let origin = self.block.origin(work.tile);
        if loader == 0 {
            let share = Share::of(down, row, schedule.splits * across);
            let (row, _) = self.block.loaded_b(origin.1);
            Source { row, skipped: 0, height: S::N, share, once: end.0 <= S::M }
        } else {
            let share = Share::of(across, column, schedule.splits);
            let row = self.block.loaded_a(origin.0);
            Source { row, skipped: S::N, height: S::M, share, once: false }
        }
    }

    fn load(&self, source: &Source, step: u32, stage: &EmptyStage) {
        let &Source { row, skipped, height, share, once } = source;
        let factor = self.maps[stage.loader() as usize];
        let part = share.index * quotient(height, share.blocks);
        stage.expect(S::DEPTH * height * 128);
        let mut depth = 0;
        while depth < S::DEPTH {
            let to = self.block.tile(stage.number(), skipped, height, depth);
            let term = step * S::K + depth * TILE_K;
            if share.blocks > 1 {
                let to = to.rows::<8>(part);
                stage.load_multicast(to, factor, row + part, term, share.ranks);
            } else if once {
                stage.load_once(to, factor, row, term);
            } else {
                stage.load(to, factor, row, term);
            }
            depth += 1;
        }
    }

    fn state(&self, group: &Warpgroup) -> State<E> {
        let Block { division, schedule, row, column, epilogue, .. } = &self.block;
        let (across, thread) = (division.across, group.thread());
        let above = thread.wrapping_sub(across);
        let place = if thread < across {
            row * across + thread
        } else {
            (above + u32::from(above >= *row)) * across + column
        };
        State {
            epilogue: epilogue.begin(),
            releasing: thread < across + division.down - 1,
            releases: place * schedule.splits + schedule.rank,
            first: 0,
            origin: (0, 0),
            split: 0,
            waited: false,
        }
    }

    fn start(&self, group: &Warpgroup, state: &mut State<E>, work: Work) {
        let (row, column) = self.block.origin(work.tile);
        let (_, before) = self.block.loaded_b(column);
        let warpgroup = group.index() * WARPGROUP_N;
        // A warpgroup beyond C multiplies by any rows.
        state.first = (before + warpgroup) % S::N;
        state.origin = (row, column + warpgroup);
    }

    fn compute(
        &self,
        _: &Warpgroup,
        state: &mut State<E>,
        sums: &mut S::Sums,
        stage: u32,
        first: bool,
    ) {
        // SAFETY: the kernel's contract.
        unsafe {
            wgmma::fence();
            let mut term = 0;
            while term < S::K {
                let (depth, column) = (term / TILE_K, term % TILE_K);
                let a = self.block.tile(stage, S::N, S::M, depth).factor();
                let b = self.block.tile(stage, 0, S::N, depth);
                let b = b.rows::<WARPGROUP_N>(state.first).factor();
                let (a, b) = (a.columns_from(column), b.columns_from(column));
                wgmma::multiply(sums, b, a, !first || term > 0);
                term += 16;
            }
            wgmma::commit_group();
        }
    }

    fn finish(&self, group: &Warpgroup, state: &mut State<E>, work: Work, sums: &mut S::Sums) {
        let Self { block, target, .. } = self;
        if !state.waited {
            grid::wait_for_previous();
            state.waited = true;
        }
        let split = work.split.then_some(state.split);
        // SAFETY: the kernel's contract.
        unsafe {
            if work.split {
                block.send(sums.as_ref(), state.split);
            }
            if !block.has_all(work.tile, sums) {
                // Another block stores the tile.
            } else if block.is_plain {
                let plain = Identity::<E::Output>::new();
                block.store_tile(*target, sums, split, state.origin, plain);
            } else {
                block.store_tile(*target, sums, split, state.origin, state.epilogue);
            }
        }
        if work.split {
            state.split += 1;
            let thread = group.thread();
            // Nothing is sent to a block that may have ended.
            if block.schedule.next(work).is_some() && thread < block.schedule.splits {
                block.drained.arrive_in(block.first_split + thread);
            }
        }
    }

    fn end(&self, _: &Warpgroup, state: &mut State<E>) {
        state.epilogue.end(2 * S::N);
        tma::wait_stores::<0>();
    }

    fn idle(&self, warp: &IdleWarp) {
        if warp.index() == 0 && warp::lane_id() == 0 {
            self.target.prefetch();
        }
    }

    fn loaded(&self) {
        // SAFETY: all warps that load or idle call it; those that multiply do so in `send`.
        unsafe {
            warp::sync();
            if self.block.division.sums == 0 && self.block.schedule.splits_any() {
                cluster::sync_relaxed();
            }
        }
    }

    /// The block has received all sums that others send to it: it may end before them, if no other
    /// block loads for it or releases its stages.
    fn leave(&self) {
        let Division { across, down, .. } = self.block.division;
        if across * down > 1 {
            // SAFETY: the kernel's contract.
            unsafe { cluster::sync() };
        }
    }
}

/// Rows of C by TMA.
impl Target for &TensorMap {
    fn prefetch(self) {
        tma::prefetch_map(self);
    }

    unsafe fn store<T: Factor, S: Shape, E: Epilogue<Output: Half>, P: Epilogue<Output: Half>>(
        self,
        block: &Block<T, S, E>,
        (first, count): (u32, u32),
        (row, column): (u32, u32),
        end: u32,
        sums: Sums,
        epilogue: P,
    ) {
        let thread = thread::thread_idx_x();
        let (warpgroup, warp, lane) = (thread / 128, thread / warp::WARP_SIZE % 4, warp::lane_id());
        let buffer = 2 * warpgroup + first / STORE_EIGHTS % 2;
        let place = |eight: u32| -> Eight<P::Output> {
            let index = buffer * STORE_EIGHTS + eight;
            block.memory.tile(block.division.stages * S::STAGE + index * Eight::<P::Output>::BYTES)
        };
        let mut part = block.part(first, (row, column), end, sums);
        epilogue.apply(&mut part);
        // SAFETY: the caller's contract. The buffer is written after its previous stores have read
        // it, and read after it is written. The previous tile's last part may be in this buffer,
        // the previous part of this tile is in the other one.
        unsafe {
            if lane == 0 && first == 0 {
                tma::wait_stores_read::<0>();
            } else if lane == 0 {
                tma::wait_stores_read::<1>();
            }
            thread::named_barrier_sync(WARPGROUP_BARRIER + warpgroup, 128);
            let mut eight = 0;
            while eight < STORE_EIGHTS {
                if first + eight < count {
                    place(eight).store_transposed(warp, lane, four(&part.sums, eight));
                }
                eight += 1;
            }
            tma::fence_async_shared();
            thread::named_barrier_sync(WARPGROUP_BARRIER + warpgroup, 128);
            // Each warp stores one of them.
            if lane == 0 {
                if first + warp < count {
                    place(warp).store(self, row + 8 * (first + warp), column);
                }
                tma::commit_stores();
            }
        }
    }
}

/// A thread's sums of a group of eight rows.
pub(super) fn four(sums: &[f32], eight: u32) -> [f32; 4] {
    let first = 4 * eight as usize;
    [sums[first], sums[first + 1], sums[first + 2], sums[first + 3]]
}

/// A thread's sums that are stored together.
pub(super) type Sums = [f32; 4 * STORE_EIGHTS as usize];

/// A thread's sums of a whole tile that are stored together, of groups of eight rows from the
/// `first` on.
fn from<S: Shape>(all: &S::Sums, first: u32) -> Sums {
    let (all, first) = (all.as_ref(), 4 * first as usize);
    let mut sums = [0.0; 4 * STORE_EIGHTS as usize];
    let mut i = 0;
    while i < sums.len() && first + i < all.len() {
        sums[i] = all[first + i];
        i += 1;
    }
    sums
}

/// These sums, from `row` and `column` on.
struct Part<S> {
    sums: Sums,
    row: u32,
    column: u32,
    end: (u32, u32),
    shape: PhantomData<S>,
}

impl<S: Shape> Fragment for Part<S> {
    const ROWS: u32 = if S::M < 8 * STORE_EIGHTS { S::M / 4 } else { 2 * STORE_EIGHTS };
    const COLUMNS: u32 = 2;
    const PAIRS: bool = false;

    fn row(&self, i: u32) -> u32 {
        self.row + 8 * (i / 2) + i % 2
    }

    fn column(&self, j: u32) -> u32 {
        self.column + 8 * j
    }

    fn end(&self) -> (u32, u32) {
        self.end
    }

    fn sum(&mut self, i: u32, j: u32) -> &mut f32 {
        &mut self.sums[(4 * (i / 2) + 2 * j + i % 2) as usize]
    }
}
