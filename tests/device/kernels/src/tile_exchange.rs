//! A product fused with the sum over the ranks: a custom kernel on [`TileExchange`], for any number
//! of ranks.
//!
//! A block rounds the sums of a tile to bf16, in the order in which its threads have them, and
//! pushes them to all ranks. While they travel, it adds the ranks' parts of its previous tile. All
//! ranks add the same numbers in the same order, so that they get the same bits.

use cuda_std::prelude::*;
use cuda_std::tile::{Matrix, MmaProduct, TileOrder};
use cuda_std::tma;
use cuda_std::vector::{Accumulate, Vec16};
use nccl_device::{Coop, DevComm, TileExchange, Window};

/// Rows and columns of a tile of C.
pub const TILE: u32 = 128;
/// Threads per block.
pub const THREADS: u32 = 128;
/// Elements of a tile.
pub const ELEMENTS: usize = (TILE * TILE) as usize;
/// Dynamic shared memory in bytes.
pub const SHARED: u32 = Product::BYTES;

type Product = MmaProduct<bf16, TILE, TILE, 3, THREADS>;
/// Rows and columns of a warp.
const PART: u32 = 64;
/// Vectors of a thread: each has sums of 16 rows and 16 columns of the warp's part.
const VECTORS: u32 = 16;

/// Computes `C = sum over the ranks of A x B^T`, of `m x k` and `n x k` elements in each. Every
/// rank's product is rounded, and then their sum. Grid: at most the number of blocks that are
/// resident, the same number in every rank. Block: [`THREADS`] threads, with [`SHARED`] bytes.
///
/// `inbox` has twice [`ELEMENTS`] for each tile of each rank, and `flags` a word. `n` is even, and
/// `k` a multiple of 8; `a` and `b` begin at multiples of 16 bytes.
#[kernel(max_threads = 128)]
pub unsafe fn product_and_sum(
    comm: DevComm,
    a: *const bf16,
    b: *const bf16,
    c: *mut bf16,
    inbox: Window<bf16>,
    flags: Window<u32>,
    state: *mut u32,
    m: u32,
    n: u32,
    k: u32,
) {
    let order = TileOrder::<8> { rows: m.div_ceil(TILE), columns: n.div_ceil(TILE) };
    let product = Product {
        a: Matrix { address: a, rows: m, columns: k },
        b: Matrix { address: b, rows: n, columns: k },
        memory: shared::dynamic_shared_mem(),
    };
    // SAFETY: the test passes matrices, windows and a state of the sizes that the kernel asks for.
    unsafe {
        let exchange = TileExchange::begin(&comm, inbox, flags, state);
        let sum = Sum { exchange: &exchange, comm: &comm, order, c, m, n };
        let (first, blocks) = (thread::block_idx_x(), thread::grid_dim_x());
        let mut tile = first;
        while tile < order.count() {
            sum.push(product, tile);
            if tile > first {
                sum.add(tile - blocks);
            }
            tile += blocks;
        }
        if tile > first {
            sum.add(tile - blocks);
        }
        thread::sync_threads();
        exchange.end(Coop::cta());
    }
}

/// The sum of the ranks' products.
struct Sum<'a> {
    exchange: &'a TileExchange<'a, bf16>,
    comm: &'a DevComm,
    order: TileOrder<8>,
    c: *mut bf16,
    m: u32,
    n: u32,
}

impl Sum<'_> {
    /// Returns the number of a rank's part of a tile.
    fn number(&self, tile: u32, rank: u32) -> u32 {
        tile * self.comm.lsa_team().n_ranks as u32 + rank
    }

    /// Returns the first row and column of a tile.
    fn origin(&self, tile: u32) -> (u32, u32) {
        let (row, column) = self.order.position(tile);
        (row * TILE, column * TILE)
    }

    /// Returns the first row and column of this warp's part of a tile.
    fn part() -> (u32, u32) {
        let warp = thread::thread_idx_x() / warp::WARP_SIZE;
        (warp / 2 * PART, warp % 2 * PART)
    }

    /// Returns the index in a tile of one of this thread's vectors.
    fn index(vector: u32) -> usize {
        (vector * THREADS + thread::thread_idx_x()) as usize * Vec16::<bf16>::LANES
    }

    /// Computes this rank's part of a tile, and pushes it to all ranks.
    unsafe fn push(&self, product: Product, tile: u32) {
        let staged = shared_array![bf16; ELEMENTS];
        // SAFETY: the kernel's contract. `sums` has barriers, after which the previous tile has
        // left the shared memory.
        unsafe {
            let sums = product.sums::<16, 4, 8>(self.origin(tile), Self::part(), || {
                thread::sync_threads();
            });
            let mut vector = 0;
            while vector < VECTORS {
                let (i, j) = (vector as usize / 4, vector as usize % 4);
                let words = sums[i].factor::<bf16>(j);
                mem::store_vec(staged.add(Self::index(vector)), Vec16::from_bits(words));
                vector += 1;
            }
            tma::fence_async_shared();
            thread::sync_threads();
            if thread::thread_idx_x() == 0 {
                let team = self.comm.lsa_team();
                let number = self.number(tile, team.rank as u32);
                let at = number as usize * ELEMENTS;
                self.exchange.push_shared(team.all_from_self(), number, at, staged, ELEMENTS);
            }
        }
    }

    /// Waits for all ranks' parts of a tile, and stores their sum.
    unsafe fn add(&self, tile: u32) {
        let ranks = self.comm.lsa_team().n_ranks as u32;
        for rank in 0..ranks {
            // SAFETY: there is a flag for each part.
            unsafe { self.exchange.wait_for(Coop::cta(), self.number(tile, rank)) };
        }
        let (lane, origin, part) = (warp::lane_id(), self.origin(tile), Self::part());
        for vector in 0..VECTORS {
            // SAFETY: the parts have arrived.
            let load = |rank| unsafe {
                let number = self.number(tile, rank) as usize;
                self.exchange.load_vec(number * ELEMENTS + Self::index(vector))
            };
            let mut sum = bf16::widen(load(0));
            for rank in 1..ranks {
                bf16::add(&mut sum, load(rank));
            }
            let pairs = bf16::narrow(sum).to_bits();
            let mut i = 0;
            while i < 4 {
                let row = origin.0 + part.0 + vector / 4 * 16 + i % 2 * 8 + lane / 4;
                let column = origin.1 + part.1 + vector % 4 * 16 + i / 2 * 8 + lane % 4 * 2;
                if row < self.m && column < self.n {
                    let at = row as usize * self.n as usize + column as usize;
                    // SAFETY: the pair is in C, and only this thread stores it.
                    unsafe { mem::store(self.c.add(at).cast::<u32>(), pairs[i as usize]) };
                }
                i += 1;
            }
        }
    }
}
