//! A product fused with an all-reduce, on tiles that ranks push to each other.
//!
//! The shapes are those of the [unfused products](crate::products).

// ANCHOR: kernel
use cuda_std::convert::f32_to_bf16x2;
use cuda_std::prelude::*;
use cuda_std::tma;
use cuda_std::vector::{Accumulate, Vec16};
use nccl_device::{Coop, DevComm, TileExchange, Window};

use crate::products::{Factors, Sums, TILE, for_each_pair};

/// Elements of a tile.
pub const ELEMENTS: usize = (TILE * TILE) as usize;
/// Elements of a vector of 16 bytes.
const LANES: u32 = Vec16::<bf16>::LANES as u32;

/// Pushes this rank's tiles, rounded to bf16, to all ranks, which add them up (step 4).
///
/// `inbox` has twice [`ELEMENTS`] for each tile of each rank, `flags` a word for each, and `state`
/// points to [`TileExchange::STATE`] words. All were 0 before the first launch. Grid: at most the
/// number of blocks that can run at once, the same in every rank.
#[kernel(max_threads = 128)]
pub unsafe fn product_exchange(
    comm: DevComm,
    a: *const bf16,
    b: *const bf16,
    inbox: Window<bf16>,
    flags: Window<u32>,
    state: *mut u32,
    c: *mut bf16,
    m: u32,
    n: u32,
    k: u32,
) {
    let factors = Factors::new(a, b, (m, n, k));
    // SAFETY: the caller passes memory of these sizes, and all threads of the block are here.
    unsafe {
        let exchange = TileExchange::begin(&comm, inbox, flags, state);
        FusedProduct { comm: &comm, exchange: &exchange, factors, c }.compute_tiles(|_, sum| sum);
        exchange.end(Coop::cta());
    }
}
// ANCHOR_END: kernel

// ANCHOR: loop
/// The product of a rank's factors, whose tiles the ranks exchange and add.
struct FusedProduct<'a> {
    comm: &'a DevComm,
    exchange: &'a TileExchange<'a, bf16>,
    factors: Factors,
    c: *mut bf16,
}

impl FusedProduct<'_> {
    /// Computes all tiles of this block. `epilogue` returns an element of C for a column and a sum.
    ///
    /// # Safety
    ///
    /// The memory has the sizes that the kernel asks for; all threads of the block call this.
    unsafe fn compute_tiles(&self, epilogue: impl Fn(u32, f32) -> f32 + Copy) {
        let (mut tile, blocks) = (thread::block_idx_x(), thread::grid_dim_x());
        let mut previous = None;
        while tile < self.factors.tiles() {
            // SAFETY: all threads of the block are here, and the tile is one of this block's.
            unsafe {
                self.push(tile, &self.factors.sums(tile));
                // The parts of the previous tile have had the time of a tile to arrive.
                if let Some(previous) = previous {
                    self.add(previous, epilogue);
                }
            }
            (previous, tile) = (Some(tile), tile + blocks);
        }
        if let Some(previous) = previous {
            // SAFETY: all threads of the block are here, and this block has pushed the tile.
            unsafe { self.add(previous, epilogue) };
        }
        // No thread of the block uses the exchange any more.
        thread::sync_threads();
    }

    /// Returns the number of a rank's part of a tile, among all parts that a rank receives.
    fn part_number(&self, tile: u32, rank: u32) -> u32 {
        tile * self.comm.lsa_team().n_ranks as u32 + rank
    }
}
// ANCHOR_END: loop

// ANCHOR: push
impl FusedProduct<'_> {
    /// Rounds a tile's sums, and pushes them to all ranks, this one among them.
    ///
    /// # Safety
    ///
    /// The memory has the sizes that the kernel asks for; all threads of the block call this.
    unsafe fn push(&self, tile: u32, sums: &Sums) {
        let staged = shared_array![bf16; ELEMENTS];
        for_each_pair(sums, |row, column, pair| {
            let to = staged.wrapping_add((row * TILE + column) as usize).cast();
            // SAFETY: each thread has elements of its own. The previous push has read the memory
            // when thread 0 returns from it, before the barriers of this tile's product.
            unsafe { mem::store(to, f32_to_bf16x2(pair)) };
        });
        // The copy uses the asynchronous proxy, which needs a fence to see the stores.
        tma::fence_async_shared();
        thread::sync_threads();
        if thread::thread_idx_x() == 0 {
            let team = self.comm.lsa_team();
            let part = self.part_number(tile, team.rank as u32);
            let first = part as usize * ELEMENTS;
            // SAFETY: the place is that of this rank's part of the tile, and the tile is staged.
            unsafe {
                self.exchange.push_shared(team.all_from_self(), part, first, staged, ELEMENTS);
            }
        }
    }
}
// ANCHOR_END: push

// ANCHOR: add
impl FusedProduct<'_> {
    /// Waits for all ranks' parts of a tile, and stores `epilogue` of their sum.
    ///
    /// # Safety
    ///
    /// The contract of [`push`](Self::push), which this block has called for the tile.
    unsafe fn add(&self, tile: u32, epilogue: impl Fn(u32, f32) -> f32) {
        let (ranks, coop) = (self.comm.lsa_team().n_ranks as u32, Coop::cta());
        for rank in 0..ranks {
            // SAFETY: there is a flag for each part.
            unsafe { self.exchange.wait_for(coop, self.part_number(tile, rank)) };
        }
        for vector in coop.strided(TILE * TILE / LANES) {
            let (row, column) = (vector * LANES / TILE, vector * LANES % TILE);
            let at = self.factors.index(tile, row, column);
            let mut sum = [0.0; LANES as usize];
            for rank in 0..ranks {
                let first = self.part_number(tile, rank) as usize * ELEMENTS;
                // SAFETY: the part has arrived.
                let part = unsafe { self.exchange.load_vec(first + (vector * LANES) as usize) };
                // All ranks add in f32 and in the same order, so they get the same bits.
                bf16::add(&mut sum, part);
            }
            let column = self.factors.origin(tile).1 + column; // Of C.
            let mut lane = 0;
            while lane < LANES {
                sum[lane as usize] = epilogue(column + lane, sum[lane as usize]);
                lane += 1;
            }
            // SAFETY: the vector is in C, and only this thread stores it.
            unsafe { mem::store_vec(self.c.add(at), bf16::narrow(sum)) };
        }
    }
}
// ANCHOR_END: add

// ANCHOR: after
/// Does the same as [`product_exchange()`], then adds a bias to each column and replaces negative
/// numbers by 0 (step 5).
#[kernel(max_threads = 128)]
pub unsafe fn product_exchange_relu(
    comm: DevComm,
    a: *const bf16,
    b: *const bf16,
    inbox: Window<bf16>,
    flags: Window<u32>,
    state: *mut u32,
    bias: *const f32,
    c: *mut bf16,
    m: u32,
    n: u32,
    k: u32,
) {
    let factors = Factors::new(a, b, (m, n, k));
    // SAFETY: the caller passes memory of these sizes, and `n` numbers in `bias`.
    unsafe {
        let exchange = TileExchange::begin(&comm, inbox, flags, state);
        let fused = FusedProduct { comm: &comm, exchange: &exchange, factors, c };
        fused.compute_tiles(|column, sum| (sum + mem::load(bias.add(column as usize))).max(0.0));
        exchange.end(Coop::cta());
    }
}
// ANCHOR_END: after
