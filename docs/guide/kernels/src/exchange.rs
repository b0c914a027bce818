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

/// Elements of a tile, and of a vector of 16 bytes.
pub const ELEMENTS: usize = (TILE * TILE) as usize;
const LANES: u32 = Vec16::<bf16>::LANES as u32;

/// Step 4: every rank pushes its tiles, rounded to bf16, to all ranks, and all add them up.
///
/// `inbox` has twice [`ELEMENTS`] for each tile of each rank, `flags` a word, and `state` points to
/// [`TileExchange::STATE`] words. All were 0 before the first launch. Grid: as many blocks as are
/// resident at most, the same in every rank.
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
    // SAFETY: the contract.
    unsafe {
        let exchange = TileExchange::begin(&comm, inbox, flags, state);
        Parts { comm: &comm, exchange: &exchange, factors, c }.all(|_, sum| sum);
        exchange.end(Coop::cta());
    }
}
// ANCHOR_END: kernel

// ANCHOR: loop
struct Parts<'a> {
    comm: &'a DevComm,
    exchange: &'a TileExchange<'a, bf16>,
    factors: Factors,
    c: *mut bf16,
}

impl Parts<'_> {
    /// All tiles of this block. `last` makes an element of C of a column and a sum.
    ///
    /// # Safety
    ///
    /// The kernel's contract; all threads of the block call it.
    unsafe fn all(&self, last: impl Fn(u32, f32) -> f32 + Copy) {
        let (mut tile, blocks) = (thread::block_idx_x(), thread::grid_dim_x());
        let mut before = None;
        while tile < self.factors.tiles() {
            // SAFETY: the caller's contract.
            unsafe {
                self.push(tile, &self.factors.sums(tile));
                // The one before: its parts have had the time of a tile to arrive.
                if let Some(before) = before {
                    self.add(before, last);
                }
            }
            (before, tile) = (Some(tile), tile + blocks);
        }
        if let Some(before) = before {
            // SAFETY: as above.
            unsafe { self.add(before, last) };
        }
        // No thread of the block uses the exchange any more.
        thread::sync_threads();
    }

    /// The number of a rank's part of a tile, among all parts that a rank receives.
    fn number(&self, tile: u32, rank: u32) -> u32 {
        tile * self.comm.lsa_team().n_ranks as u32 + rank
    }
}
// ANCHOR_END: loop

// ANCHOR: push
impl Parts<'_> {
    /// Rounds a tile's sums, and pushes them to all ranks, this one among them.
    ///
    /// # Safety
    ///
    /// The kernel's contract; all threads of the block call it.
    unsafe fn push(&self, tile: u32, sums: &Sums) {
        let staged = shared_array![bf16; ELEMENTS];
        for_each_pair(sums, |row, column, pair| {
            let to = staged.wrapping_add((row * TILE + column) as usize).cast();
            // SAFETY: each thread has elements of its own. The previous push has read the memory:
            // its thread has waited since, at the barriers of this tile's product.
            unsafe { mem::store(to, f32_to_bf16x2(pair)) };
        });
        // The copy is by the asynchronous proxy, which sees what is fenced for it.
        tma::fence_async_shared();
        thread::sync_threads();
        if thread::thread_idx_x() == 0 {
            let team = self.comm.lsa_team();
            let number = self.number(tile, team.rank as u32);
            let at = number as usize * ELEMENTS;
            // SAFETY: the place is this rank's part of the tile, and the tile is staged.
            unsafe {
                self.exchange.push_shared(team.all_from_self(), number, at, staged, ELEMENTS);
            }
        }
    }
}
// ANCHOR_END: push

// ANCHOR: add
impl Parts<'_> {
    /// Waits for all ranks' parts of a tile, and stores what `last` makes of their sum.
    ///
    /// # Safety
    ///
    /// As for [`push`](Self::push), which this block has called for the tile.
    unsafe fn add(&self, tile: u32, last: impl Fn(u32, f32) -> f32) {
        let (ranks, coop) = (self.comm.lsa_team().n_ranks as u32, Coop::cta());
        for rank in 0..ranks {
            self.exchange.wait_for(coop, self.number(tile, rank));
        }
        for vector in coop.strided(TILE * TILE / LANES) {
            let (row, column) = (vector * LANES / TILE, vector * LANES % TILE);
            let at = self.factors.index(tile, row, column);
            let mut sum = [0.0; LANES as usize];
            for rank in 0..ranks {
                let part = self.number(tile, rank) as usize * ELEMENTS;
                // SAFETY: the part has arrived.
                let part = unsafe { self.exchange.load_vec(part + (vector * LANES) as usize) };
                // In f32, and in the same order in all ranks: so all get the same bits.
                bf16::add(&mut sum, part);
            }
            let column = at as u32 % self.factors.columns_of_c();
            let mut lane = 0;
            while lane < LANES {
                sum[lane as usize] = last(column + lane, sum[lane as usize]);
                lane += 1;
            }
            // SAFETY: the vector is in C, and only this thread stores it.
            unsafe { mem::store_vec(self.c.add(at), bf16::narrow(sum)) };
        }
    }
}
// ANCHOR_END: add

// ANCHOR: behind
/// Step 5: the same, and behind the sum a bias for each column and the positive part.
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
    // SAFETY: the contract; `bias` has `n` numbers.
    unsafe {
        let exchange = TileExchange::begin(&comm, inbox, flags, state);
        let parts = Parts { comm: &comm, exchange: &exchange, factors, c };
        parts.all(|column, sum| (sum + mem::load(bias.add(column as usize))).max(0.0));
        exchange.end(Coop::cta());
    }
}
// ANCHOR_END: behind
