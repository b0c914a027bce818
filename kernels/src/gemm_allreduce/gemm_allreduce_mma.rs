//! The portable form: `mma.sync` by warps, on tiles that threads copy by `cp.async`.

use cuda_std::prelude::*;
use cuda_std::tile::{Matrix, MmaProduct};
use devcomm_types::F8E4M3;
use nccl_device::{DevComm, Window};

use super::exchange::Exchange;
use super::partial::Partial;
use super::tiles::{STRIPS, TILE_ROWS, Tiles};

/// Columns of a tile of C.
pub(super) const COLUMNS: u32 = 128;
/// Stages of the pipeline.
const STAGES: u32 = 4;
/// Dynamic shared memory.
pub(super) const SHARED: u32 = Product::BYTES;
/// Computing threads: 128 for each strip.
const COMPUTING: u32 = 128 * STRIPS;
/// Warps that only reduce.
const REDUCING_WARPS: u32 = 4;
pub(super) const THREADS: u32 = COMPUTING + REDUCING_WARPS * warp::WARP_SIZE;
/// Named barriers: of all computing threads, and the first of one for each strip's threads.
const COMPUTE_BARRIER: u32 = 1;
const STRIP_BARRIER: u32 = 2;

type Product = MmaProduct<bf16, TILE_ROWS, COLUMNS, STAGES, COMPUTING>;

/// The product and its all-reduce, as [`GemmForm`] describes, on every GPU since Ampere. Partial
/// sums are sent as `W`.
///
/// Grid: at most as many blocks as the device communicator has LSA barriers, the same in every
/// rank. Block: [`GemmForm::threads`] threads, with [`GemmForm::dynamic_shared`] bytes.
///
/// # Safety
///
/// `a` has `m * k` elements and `b` has `n * k`, aligned to 16 bytes; `c` has `m * n` in every
/// rank. `k` is a multiple of 8, and `m`, `n` and `k` are not 0. The windows of the workspace have
/// [`GemmForm::workspace`]'s words for this form and `W`; no other kernel uses them, and their
/// flags were 0 in every rank before the first launch in any. All ranks launch with the same
/// arguments, in the same order.
///
/// [`GemmForm`]: super::GemmForm
/// [`GemmForm::threads`]: super::GemmForm::threads
/// [`GemmForm::dynamic_shared`]: super::GemmForm::dynamic_shared
/// [`GemmForm::workspace`]: super::GemmForm::workspace
#[kernel(max_threads = 384, W = [f32, bf16, F8E4M3])]
pub unsafe fn gemm_allreduce_mma<W: Partial>(
    comm: DevComm,
    a: *const bf16,
    b: *const bf16,
    c: Window<bf16>,
    partials: Window<u32>,
    flags: Window<u32>,
    m: u32,
    n: u32,
    k: u32,
) {
    let tiles = Tiles::<COLUMNS> { m, n };
    // SAFETY: the kernel's contract. All warps reach `reduce` and `finish`.
    unsafe {
        let exchange = Exchange::<W, COLUMNS>::new(&comm, tiles, c, partials, flags);
        thread::sync_threads();
        if thread::thread_idx_x() < COMPUTING {
            let product = Product {
                a: Matrix { address: a, rows: m, columns: k },
                b: Matrix { address: b, rows: n, columns: k },
                memory: shared::dynamic_shared_mem(),
            };
            compute(&exchange, product, tiles);
        }
        exchange.reduce();
        exchange.finish();
    }
}

/// Computes the tiles of this block and stores the sums to the owners.
///
/// # Safety
///
/// The kernel's contract, and the first [`COMPUTING`] threads of the block call it.
unsafe fn compute<W: Partial>(
    exchange: &Exchange<'_, W, COLUMNS>,
    product: Product,
    tiles: Tiles<COLUMNS>,
) {
    let thread = thread::thread_idx_x();
    let half = thread / 128;
    // A strip is divided among 2 x 2 warps, each with 32 rows and 64 columns.
    let warp = thread / warp::WARP_SIZE % 4;
    let (i, j) = (warp / 2 * 2, warp % 2 * 8);
    let mut tile = thread::block_idx_x();
    while tile < tiles.count() {
        // SAFETY: the caller's contract.
        unsafe {
            let sums =
                product.sums::<16, 2, 8>(tiles.origin(tile), (half * 64 + i * 16, j * 8), || {
                    thread::named_barrier_sync(COMPUTE_BARRIER, COMPUTING);
                });
            let strip = tiles.strip(STRIPS * tile + half);
            let partial_tile = exchange.partial_tile(strip);
            partial_tile.store::<8>(i, j, |x| sums[0].blocks()[x]);
            partial_tile.store::<8>(i + 1, j, |x| sums[1].blocks()[x]);
            exchange.announce(strip, STRIP_BARRIER + half, thread % 128);
        }
        tile += thread::grid_dim_x();
    }
}
