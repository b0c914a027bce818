//! Matrix products: of one rank, followed by an all-reduce, and fused with it.
//!
//! `C = sum over the ranks of A x B^T`: each rank's A has `m x k` elements and its B `n x k`, which
//! are a slice of the columns of the whole factors. `m` and `n` are multiples of 64 and `k` of 8;
//! A and B are aligned to 16 bytes.

// ANCHOR: tile
use cuda_std::prelude::*;
use cuda_std::tile::{Matrix, MmaProduct, RegTile};
use nccl_device::{BarrierIndex, Coop, DevComm, Epoch, Flag, MemoryOrder, Window};

/// Rows and columns of a tile of C.
pub const TILE: u32 = 64;
/// Threads of a block.
pub const THREADS: u32 = 128;
/// The product of a tile, with three stages in shared memory.
type Product = MmaProduct<bf16, TILE, TILE, 3, THREADS>;

/// A and B of a rank.
#[derive(Clone, Copy)]
pub(crate) struct Factors {
    a: Matrix<bf16>,
    b: Matrix<bf16>,
}

/// A warp's sums: 32 x 32 elements of the tile, as two register tiles of 16 rows and 4 x 8 columns.
pub(crate) type Sums = [RegTile<f32, 4>; 2];

impl Factors {
    pub(crate) fn new(a: *const bf16, b: *const bf16, (m, n, k): (u32, u32, u32)) -> Self {
        let matrix = |address, rows| Matrix { address, rows, columns: k };
        Self { a: matrix(a, m), b: matrix(b, n) }
    }

    pub(crate) fn tiles(&self) -> u32 {
        self.a.rows / TILE * (self.b.rows / TILE)
    }

    /// Returns the first row and column of a tile.
    pub(crate) fn origin(&self, tile: u32) -> (u32, u32) {
        let columns = self.b.rows / TILE;
        (tile / columns * TILE, tile % columns * TILE)
    }

    /// Returns the index in C of an element of a tile.
    pub(crate) fn index(&self, tile: u32, row: u32, column: u32) -> usize {
        let (first_row, first_column) = self.origin(tile);
        (first_row + row) as usize * self.b.rows as usize + (first_column + column) as usize
    }

    /// Returns the sums of a tile.
    ///
    /// # Safety
    ///
    /// All threads of the block call it; the matrices are allocated.
    pub(crate) unsafe fn sums(&self, tile: u32) -> Sums {
        let memory = shared_array![u8; Product::BYTES as usize];
        let product = Product { a: self.a, b: self.b, memory };
        // SAFETY: all threads of the block are here; rows are aligned to 16 bytes, those of a copy.
        unsafe { product.sums::<16, 2, 4>(self.origin(tile), warps_part(), thread::sync_threads) }
    }
}

/// Returns the first row and column of this warp's part of a tile.
pub(crate) fn warps_part() -> (u32, u32) {
    (warp::warp_id() / 2 * 32, warp::warp_id() % 2 * 32)
}

/// Calls `f` for each pair of neighbouring elements that a thread has: with the row and the column
/// of the first one in the block's tile, and both values.
pub(crate) fn for_each_pair(sums: &Sums, mut f: impl FnMut(u32, u32, [f32; 2])) {
    let (first_row, first_column) = warps_part();
    for (i, sums) in sums.iter().enumerate() {
        let first_row = first_row + 16 * i as u32;
        sums.for_each_pair(|row, column, pair| f(first_row + row, first_column + column, pair));
    }
}

/// Calls `f` for each element that a thread has, with its row, column and value.
fn for_each(sums: &Sums, mut f: impl FnMut(u32, u32, f32)) {
    for_each_pair(sums, |row, column, [left, right]| {
        f(row, column, left);
        f(row, column + 1, right);
    });
}
// ANCHOR_END: tile

// ANCHOR: local
/// Computes this rank's product (step 1). Grid: a block for each tile.
#[kernel(max_threads = 128)]
pub unsafe fn product(a: *const bf16, b: *const bf16, c: *mut f32, m: u32, n: u32, k: u32) {
    let (factors, tile) = (Factors::new(a, b, (m, n, k)), thread::block_idx_x());
    // SAFETY: the caller passes whole matrices; each thread has elements of its own.
    unsafe {
        let sums = factors.sums(tile);
        for_each(&sums, |row, column, sum| {
            mem::store(c.add(factors.index(tile, row, column)), sum)
        });
    }
}
// ANCHOR_END: local

// ANCHOR: then
/// Computes the product of all ranks, by an all-reduce after the last tile (step 2). Grid: any.
#[kernel(
    max_threads = 128,
    requires(m as usize * n as usize <= part.len(), m as usize * n as usize <= c.len())
)]
pub unsafe fn product_then_reduce(
    comm: DevComm,
    a: *const bf16,
    b: *const bf16,
    part: Window<f32>,
    c: Window<f32>,
    m: u32,
    n: u32,
    k: u32,
) {
    let (factors, team, coop) = (Factors::new(a, b, (m, n, k)), comm.lsa_team(), Coop::cta());
    let mut barrier = comm.lsa_barrier(coop, BarrierIndex::this_block());
    // A block computes the same tiles in every rank.
    let mut tile = thread::block_idx_x();
    while tile < factors.tiles() {
        // SAFETY: the caller passes whole matrices; each thread has elements of its own.
        unsafe {
            let sums = factors.sums(tile);
            for_each(&sums, |row, column, sum| {
                part.local().store(factors.index(tile, row, column), sum);
            });
        }
        tile += thread::grid_dim_x();
    }
    // The same block of every rank has stored the same tiles.
    barrier.sync(MemoryOrder::AcqRel);
    let (rank, ranks) = (team.rank as u32, team.n_ranks as u32);
    let (first, end) = (TILE * rank / ranks, TILE * (rank + 1) / ranks);
    let mut tile = thread::block_idx_x();
    while tile < factors.tiles() {
        // This rank's rows of the tile, summed and stored to all ranks.
        for i in coop.strided((end - first) * TILE) {
            let at = factors.index(tile, first + i / TILE, i % TILE);
            let mut sum = 0.0;
            for peer in 0..team.n_ranks {
                // SAFETY: the launch has checked the lengths; the barriers order the accesses.
                sum += unsafe { part.lsa(peer).load(at) };
            }
            for peer in team.all_from_self() {
                // SAFETY: `at` is below the length of C; one thread of one rank writes the element.
                unsafe { c.lsa(peer).store(at, sum) };
            }
        }
        tile += thread::grid_dim_x();
    }
    barrier.sync(MemoryOrder::Release);
}
// ANCHOR_END: then

// ANCHOR: fused
/// Computes the product of all ranks tile by tile (step 3). A block sends a tile's sums to the
/// tile's owner as soon as it has them; the owner reduces them while the next tile is multiplied.
///
/// `inbox` has [`TILE`] x [`TILE`] elements for each rank and each tile that this rank owns, and
/// `flags` a word for each; `epoch` points to [`Epoch::WORDS`] words. `flags` and `epoch` were 0
/// before the first launch. Grid: any, the same in all launches.
#[kernel(max_threads = 128, requires(m as usize * n as usize <= c.len()))]
pub unsafe fn product_all_reduce(
    comm: DevComm,
    a: *const bf16,
    b: *const bf16,
    inbox: Window<f32>,
    flags: Window<u32>,
    epoch: *mut u32,
    c: Window<f32>,
    m: u32,
    n: u32,
    k: u32,
) {
    let (factors, coop) = (Factors::new(a, b, (m, n, k)), Coop::cta());
    // SAFETY: the caller passes words that were 0 before the first launch, for this kernel alone.
    let epoch = unsafe { Epoch::begin(epoch) };
    let exchange = Exchange { comm: &comm, factors, inbox, flags, c, epoch: epoch.get() };
    let mut barrier = comm.lsa_barrier(coop, BarrierIndex::this_block());
    // Every rank has begun: its inbox and its C are free.
    barrier.sync(MemoryOrder::Acquire);
    let (mut tile, mut previous) = (thread::block_idx_x(), None);
    while tile < factors.tiles() {
        // SAFETY: all threads of the block are here, and the tile is one of this block's.
        unsafe {
            exchange.send(tile, &factors.sums(tile));
            // The sums of the previous tile have had the time of a tile to arrive.
            if let Some(previous) = previous {
                exchange.reduce(previous);
            }
        }
        (previous, tile) = (Some(tile), tile + thread::grid_dim_x());
    }
    // SAFETY: all threads of the block are here, and each block ends the epoch once.
    unsafe {
        if let Some(previous) = previous {
            exchange.reduce(previous);
        }
        epoch.end(coop);
    }
    barrier.sync(MemoryOrder::Release);
}

struct Exchange<'a> {
    comm: &'a DevComm,
    factors: Factors,
    inbox: Window<f32>,
    flags: Window<u32>,
    c: Window<f32>,
    epoch: u32,
}

impl Exchange<'_> {
    /// Returns the rank that reduces a tile.
    fn owner(&self, tile: u32) -> i32 {
        (tile % self.comm.lsa_team().n_ranks as u32) as i32
    }

    /// Returns the slot of the owner's inbox that receives a rank's sums of a tile.
    fn slot(&self, tile: u32, source: i32) -> usize {
        let ranks = self.comm.lsa_team().n_ranks as u32;
        (source as u32 * self.factors.tiles().div_ceil(ranks) + tile / ranks) as usize
    }

    /// Sends this rank's sums of a tile to its owner.
    ///
    /// # Safety
    ///
    /// `inbox`, `flags` and C have the sizes that the kernel asks for; all threads of the block
    /// call this.
    unsafe fn send(&self, tile: u32, sums: &Sums) {
        let (owner, slot) = (self.owner(tile), self.slot(tile, self.comm.lsa_team().rank));
        let to = self.inbox.lsa(owner);
        // SAFETY: the slot is this rank's alone, and `flags` has a word for it.
        unsafe {
            for_each(sums, |row, column, sum| {
                to.store(slot * (TILE * TILE) as usize + (row * TILE + column) as usize, sum);
            });
            Flag::new(self.comm, self.flags, slot).post(Coop::cta(), owner, self.epoch);
        }
    }

    /// Adds up all ranks' sums of a tile, if this rank owns it, and stores the result to all ranks.
    ///
    /// # Safety
    ///
    /// The contract of [`send`](Self::send).
    unsafe fn reduce(&self, tile: u32) {
        let (team, coop) = (self.comm.lsa_team(), Coop::cta());
        if self.owner(tile) != team.rank {
            return;
        }
        for source in 0..team.n_ranks {
            // SAFETY: `flags` has a word for each slot of the inbox.
            let flag = unsafe { Flag::new(self.comm, self.flags, self.slot(tile, source)) };
            flag.wait_at_least(coop, self.epoch);
        }
        for i in coop.strided(TILE * TILE) {
            let mut sum = 0.0;
            for source in 0..team.n_ranks {
                let at = self.slot(tile, source) * (TILE * TILE) as usize + i as usize;
                // SAFETY: the flag says that the sums are there.
                sum += unsafe { self.inbox.local().load(at) };
            }
            for peer in team.all_from_self() {
                let at = self.factors.index(tile, i / TILE, i % TILE);
                // SAFETY: only the owner writes the tile.
                unsafe { self.c.lsa(peer).store(at, sum) };
            }
        }
    }
}
// ANCHOR_END: fused
