//! The portable form: `mma.sync` by warps, on tiles that threads copy by `cp.async`.

use cuda_std::prelude::*;
use cuda_std::{async_copy, mma};
use nccl_device::{DevComm, Window};

use super::exchange::Exchange;
use super::tiles::{STRIPS, TILE_ROWS, Tiles};

/// Columns of a tile of C.
pub(super) const COLUMNS: u32 = 128;
/// Columns of A and B that a stage has.
const TILE_K: u32 = 32;
/// Stages in shared memory.
const STAGES: u32 = 4;
/// Bytes of a stage: tiles of A and B.
const STAGE: u32 = (TILE_ROWS + COLUMNS) * TILE_K * 2;
/// Dynamic shared memory.
pub(super) const SHARED: u32 = STAGES * STAGE;
/// Threads that compute: 128 for each strip.
const COMPUTING: u32 = 128 * STRIPS;
/// Warps that only reduce.
const REDUCING_WARPS: u32 = 4;
pub(super) const THREADS: u32 = COMPUTING + REDUCING_WARPS * warp::WARP_SIZE;
/// Barriers of the block: of all that compute, and of those of each strip.
const COMPUTE_BARRIER: u32 = 1;
const STRIP_BARRIER: u32 = 2;

/// The product and its all-reduce, as [`GemmForm`] says, on every GPU since Ampere.
///
/// With `local_only` each rank stores its own product to its own part of `c`, and nothing is
/// exchanged.
///
/// Grid: at most as many blocks as the device communicator has LSA barriers, the same in every
/// rank. Block: [`GemmForm::threads`] threads, with [`GemmForm::dynamic_shared`] bytes.
///
/// # Safety
///
/// `a` has `m * k` elements and `b` has `n * k`, aligned to 16 bytes; `c` has `m * n` in every
/// rank. `k` is a multiple of 8, and none of the three is 0. The windows of the workspace have
/// [`GemmForm::workspace`]'s elements for this form; no other kernel uses them, and their flags
/// were 0 in every rank before the first launch in any. All ranks launch the same, in the same
/// order.
///
/// [`GemmForm`]: super::GemmForm
/// [`GemmForm::threads`]: super::GemmForm::threads
/// [`GemmForm::dynamic_shared`]: super::GemmForm::dynamic_shared
/// [`GemmForm::workspace`]: super::GemmForm::workspace
#[kernel(max_threads = 384)]
pub unsafe fn gemm_allreduce_mma(
    comm: DevComm,
    a: *const bf16,
    b: *const bf16,
    c: Window<bf16>,
    partials: Window<f32>,
    flags: Window<u32>,
    m: u32,
    n: u32,
    k: u32,
    local_only: bool,
) {
    let tiles = Tiles::<COLUMNS> { m, n };
    // SAFETY: the kernel's contract. All warps come to the end.
    unsafe {
        let exchange = Exchange::new(&comm, tiles, c, partials, flags, local_only);
        thread::sync_threads();
        if thread::thread_idx_x() < COMPUTING {
            compute(&exchange, Operands { a, b, m, n, k }, tiles);
        }
        exchange.reduce();
        exchange.finish();
    }
}

#[derive(Clone, Copy)]
struct Operands {
    a: *const bf16,
    b: *const bf16,
    m: u32,
    n: u32,
    k: u32,
}

/// Computes the tiles of this block and sends them.
///
/// # Safety
///
/// The kernel's contract, and the first [`COMPUTING`] threads of the block call it.
#[inline(always)]
unsafe fn compute(exchange: &Exchange<'_, COLUMNS>, operands: Operands, tiles: Tiles<COLUMNS>) {
    let thread = thread::thread_idx_x();
    let half = thread / 128;
    // Two by two warps have a strip, each 32 rows and 64 columns.
    let warp = thread / warp::WARP_SIZE % 4;
    let (i, j) = (warp / 2 * 2, warp % 2 * 8);
    let mut tile = thread::block_idx_x();
    while tile < tiles.count() {
        let (row, column) = tiles.place(tile);
        // SAFETY: the caller's.
        unsafe {
            let sums = product(operands, row, column, half * 64 + i * 16, j * 8);
            let strip = tiles.strip(STRIPS * tile + half);
            let partial_tile = exchange.partial_tile(strip);
            partial_tile.store::<8>(i, j, |x| sums[0][x]);
            partial_tile.store::<8>(i + 1, j, |x| sums[1][x]);
            exchange.announce(strip, STRIP_BARRIER + half, thread % 128);
        }
        tile += thread::grid_dim_x();
    }
}

/// This warp's sums of a tile: 2 x 8 fragments, from row `m` and column `n` of the tile on.
///
/// # Safety
///
/// As [`compute`].
#[inline(always)]
unsafe fn product(operands: Operands, row: u32, column: u32, m: u32, n: u32) -> [[[f32; 4]; 8]; 2] {
    let mut sums = [[[0.0; 4]; 8]; 2];
    let steps = operands.k.div_ceil(TILE_K);
    // SAFETY: the caller's. A stage is filled again when all have passed the barrier after they had
    // read it.
    unsafe {
        let mut step = 0;
        while step < STAGES - 1 {
            if step < steps {
                load(operands, row, column, step);
            }
            async_copy::commit_group();
            step += 1;
        }
        let mut step = 0;
        while step < steps {
            async_copy::wait_groups::<{ STAGES - 2 }>();
            thread::named_barrier_sync(COMPUTE_BARRIER, COMPUTING);
            if step + STAGES - 1 < steps {
                load(operands, row, column, step + STAGES - 1);
            }
            async_copy::commit_group();
            multiply(&mut sums, step, m, n);
            step += 1;
        }
        thread::named_barrier_sync(COMPUTE_BARRIER, COMPUTING);
    }
    sums
}

/// The place of 16 bytes in a stage's tile: row `row`, columns from `8 * piece`. Swizzled, so that
/// eight rows that are read at once lie in different banks.
#[inline(always)]
fn place(row: u32, piece: u32) -> usize {
    (row * TILE_K * 2 + (piece ^ (row / 2 % 4)) * 16) as usize
}

/// The tiles of A and B of a step.
#[inline(always)]
fn stage(step: u32) -> (*mut u8, *mut u8) {
    let a = shared::dynamic_shared_mem::<u8>().wrapping_add((step % STAGES * STAGE) as usize);
    (a, a.wrapping_add((TILE_ROWS * TILE_K * 2) as usize))
}

/// Starts the copies of a step.
///
/// # Safety
///
/// As [`compute`], and nobody reads the stage.
#[inline(always)]
unsafe fn load(operands: Operands, row: u32, column: u32, step: u32) {
    const PIECES: u32 = TILE_K / 8;
    let Operands { a, b, m, n, k } = operands;
    let (to_a, to_b) = stage(step);
    let mut at = thread::thread_idx_x();
    while at < TILE_ROWS * PIECES {
        let (r, piece) = (at / PIECES, at % PIECES);
        let from = step * TILE_K + 8 * piece;
        // SAFETY: the places lie in the stage, and what is taken in the matrices.
        unsafe {
            copy(to_a.add(place(r, piece)), a, row + r, m, from, k);
            copy(to_b.add(place(r, piece)), b, column + r, n, from, k);
        }
        at += COMPUTING;
    }
}

const _: () = assert!(TILE_ROWS == COLUMNS, "one loop copies both tiles");

/// Starts the copy of eight elements of a matrix, or of zeros where there are none.
///
/// # Safety
///
/// There is room for them.
#[inline(always)]
unsafe fn copy(to: *mut u8, matrix: *const bf16, row: u32, rows: u32, column: u32, columns: u32) {
    let take = row < rows && column < columns;
    let at = if take { row as usize * columns as usize + column as usize } else { 0 };
    // SAFETY: the caller's; the elements lie in the matrix when they are taken.
    unsafe { async_copy::copy_16(to, matrix.add(at).cast(), take) }
}

/// Adds a step's products to this warp's sums.
///
/// # Safety
///
/// As [`product`]; the stage is filled.
#[inline(always)]
unsafe fn multiply(sums: &mut [[[f32; 4]; 8]; 2], step: u32, m: u32, n: u32) {
    let (a, b) = stage(step);
    let lane = warp::lane_id();
    let mut piece = 0;
    while piece < TILE_K / 8 {
        // SAFETY: the caller's; rows and pieces lie in the tiles.
        unsafe {
            // Rows 0 to 15 of the first eight columns, then of the second.
            let at = |row: u32| a.add(place(m + row + lane % 16, piece + lane / 16)).cast();
            let a = [mma::load_matrices(at(0)), mma::load_matrices(at(16))];
            let mut j = 0;
            while j < 4 {
                // Eight rows of B, of the first eight columns and the second, then the next eight
                // rows.
                let row = n + 16 * j as u32 + lane / 16 * 8 + lane % 8;
                let b = mma::load_matrices(b.add(place(row, piece + lane / 8 % 2)).cast());
                let mut i = 0;
                while i < 2 {
                    mma::m16n8k16_bf16(&mut sums[i][2 * j], a[i], [b[0], b[1]]);
                    mma::m16n8k16_bf16(&mut sums[i][2 * j + 1], a[i], [b[2], b[3]]);
                    i += 1;
                }
                j += 1;
            }
        }
        piece += 2;
    }
}
