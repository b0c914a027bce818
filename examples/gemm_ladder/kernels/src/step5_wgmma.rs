//! Step 5: Hopper's tensor cores read shared memory (`wgmma`), which TMA fills.

use cuda_std::mbarrier::{self, MBarrier};
use cuda_std::prelude::*;
use cuda_std::tile::{RegTile, SharedTile, TileMemory};
use cuda_std::wgmma;
use devcomm_types::{GridConstant, TensorMap};

use crate::warpgroup::{ROWS, TERMS, multiply, store};

/// Rows and columns of C of a block.
pub const TILE: u32 = 128;
/// Threads per block: two warpgroups, with 64 rows each.
pub const THREADS: u32 = 256;
/// Dynamic shared memory in bytes.
pub const SHARED: u32 = 2 * Tile::BYTES + TileMemory::PADDING;

type Tile = SharedTile<bf16, TILE>;

/// Computes `C = A x B^T`. `a` and `b` are tensor maps with tiles of [`TILE`] rows.
///
/// Grid: a block for each tile of [`TILE`] x [`TILE`] elements, `x` along columns of C. Block:
/// [`THREADS`] threads, with [`SHARED`] bytes.
#[kernel(arch = "sm_90a", max_threads = 256)]
pub unsafe fn step5_wgmma(
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: *mut bf16,
    n: u32,
    k: u32,
) {
    let memory = TileMemory::dynamic();
    let (tile_a, tile_b): (Tile, Tile) = (memory.tile(0), memory.tile(Tile::BYTES));
    let (row, column) = (TILE * thread::block_idx_x(), TILE * thread::block_idx_y());
    let thread = thread::thread_idx_x();
    let warpgroup_row = ROWS * (thread / 128);
    // SAFETY: the crate's contract. TMA loads a tile after all threads have read the previous one;
    // the threads read it after it has arrived.
    unsafe {
        let full = MBarrier::at(shared_array![u64; 1]);
        if thread == 0 {
            full.init(1); // One thread arrives, and TMA counts the bytes.
            mbarrier::fence_init();
        }
        thread::sync_threads();
        let mut sums = RegTile::<f32, { TILE as usize / 8 }>::filled(0.0);
        let (mut term, mut parity) = (0, 0);
        while term < k {
            if thread == 0 {
                full.arrive_expect_tx(2 * Tile::BYTES);
                tile_a.load(&a, row, term, full);
                tile_b.load(&b, column, term, full);
            }
            full.wait(parity);
            wgmma::fence_operand(&mut sums);
            multiply(&mut sums, tile_a.rows(warpgroup_row), tile_b, term > 0);
            wgmma::wait_groups::<0>();
            wgmma::fence_operand(&mut sums);
            thread::sync_threads();
            (term, parity) = (term + TERMS, parity ^ 1);
        }
        store(&sums, c, n, row + warpgroup_row, column);
    }
}
