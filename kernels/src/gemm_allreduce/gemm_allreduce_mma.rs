//! The portable form: `mma.sync` by warps, on tiles that threads copy by `cp.async`.

use cuda_std::prelude::*;
use cuda_std::{async_copy, mma};
use nccl_device::{DevComm, Window};

use super::exchange::Exchange;
use super::tiles::{STRIPS, TILE_ROWS, Tiles};

/// Columns of a tile of C.
pub(super) const COLUMNS: u32 = 128;
/// Columns of A and B in a stage of the pipeline.
const TILE_K: u32 = 32;
/// Stages in shared memory.
const STAGES: u32 = 4;
/// Bytes of a stage: tiles of A and B.
const STAGE: u32 = (TILE_ROWS + COLUMNS) * TILE_K * 2;
/// Dynamic shared memory.
pub(super) const SHARED: u32 = STAGES * STAGE;
/// Computing threads: 128 for each strip.
const COMPUTING: u32 = 128 * STRIPS;
/// Warps that only reduce.
const REDUCING_WARPS: u32 = 4;
pub(super) const THREADS: u32 = COMPUTING + REDUCING_WARPS * warp::WARP_SIZE;
/// Named barriers: of all computing threads, and the first of one for each strip's threads.
const COMPUTE_BARRIER: u32 = 1;
const STRIP_BARRIER: u32 = 2;

/// The product and its all-reduce, as [`GemmForm`] describes, on every GPU since Ampere.
///
/// With `local_only` each rank stores its own product to its own memory of `c`, without an
/// exchange.
///
/// Grid: at most as many blocks as the device communicator has LSA barriers, the same in every
/// rank. Block: [`GemmForm::threads`] threads, with [`GemmForm::dynamic_shared`] bytes.
///
/// # Safety
///
/// `a` has `m * k` elements and `b` has `n * k`, aligned to 16 bytes; `c` has `m * n` in every
/// rank. `k` is a multiple of 8, and `m`, `n` and `k` are not 0. The windows of the workspace have
/// [`GemmForm::workspace`]'s elements for this form; no other kernel uses them, and their flags
/// were 0 in every rank before the first launch in any. All ranks launch with the same arguments,
/// in the same order.
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
    // SAFETY: the kernel's contract. All warps reach `reduce` and `finish`.
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

/// Computes the tiles of this block and stores the sums to the owners.
///
/// # Safety
///
/// The kernel's contract, and the first [`COMPUTING`] threads of the block call it.
#[inline(always)]
unsafe fn compute(exchange: &Exchange<'_, COLUMNS>, operands: Operands, tiles: Tiles<COLUMNS>) {
    let thread = thread::thread_idx_x();
    let half = thread / 128;
    // A strip is divided among 2 x 2 warps, each with 32 rows and 64 columns.
    let warp = thread / warp::WARP_SIZE % 4;
    let (i, j) = (warp / 2 * 2, warp % 2 * 8);
    let mut tile = thread::block_idx_x();
    while tile < tiles.count() {
        let (row, column) = tiles.origin(tile);
        // SAFETY: the caller's contract.
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
/// As for [`compute`].
#[inline(always)]
unsafe fn product(operands: Operands, row: u32, column: u32, m: u32, n: u32) -> [[[f32; 4]; 8]; 2] {
    let mut sums = [[[0.0; 4]; 8]; 2];
    let steps = operands.k.div_ceil(TILE_K);
    // SAFETY: the caller's contract. A stage is refilled after a barrier that follows all threads'
    // reads.
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

/// The byte offset in a stage's tile of row `row`, columns from `8 * piece` on. Swizzled, so that
/// eight rows that are read at once are in different banks.
#[inline(always)]
fn offset(row: u32, piece: u32) -> usize {
    (row * TILE_K * 2 + (piece ^ (row / 2 % 4)) * 16) as usize
}

/// The tiles of A and B for a step along `k`.
#[inline(always)]
fn stage(step: u32) -> (*mut u8, *mut u8) {
    let a = shared::dynamic_shared_mem::<u8>().wrapping_add((step % STAGES * STAGE) as usize);
    (a, a.wrapping_add((TILE_ROWS * TILE_K * 2) as usize))
}

/// Starts the copies of a step.
///
/// # Safety
///
/// As for [`compute`]; no thread reads the stage.
#[inline(always)]
unsafe fn load(operands: Operands, row: u32, column: u32, step: u32) {
    const PIECES: u32 = TILE_K / 8;
    let Operands { a, b, m, n, k } = operands;
    let (to_a, to_b) = stage(step);
    let mut at = thread::thread_idx_x();
    while at < TILE_ROWS * PIECES {
        let (r, piece) = (at / PIECES, at % PIECES);
        let from = step * TILE_K + 8 * piece;
        // SAFETY: the offsets are in the stage.
        unsafe {
            copy(to_a.add(offset(r, piece)), a, row + r, m, from, k);
            copy(to_b.add(offset(r, piece)), b, column + r, n, from, k);
        }
        at += COMPUTING;
    }
}

const _: () = assert!(TILE_ROWS == COLUMNS, "one loop copies both tiles");

/// Starts the copy of eight elements of a matrix, or of zeros outside the matrix.
///
/// # Safety
///
/// `to` has room for them.
#[inline(always)]
unsafe fn copy(to: *mut u8, matrix: *const bf16, row: u32, rows: u32, column: u32, columns: u32) {
    let inside = row < rows && column < columns;
    let at = if inside { row as usize * columns as usize + column as usize } else { 0 };
    // SAFETY: the caller's contract; if `inside`, the elements are in the matrix; else none is
    // read.
    unsafe { async_copy::copy_16(to, matrix.add(at).cast(), inside) }
}

/// Adds a step's products to this warp's sums.
///
/// # Safety
///
/// As for [`product`]; the stage is filled.
#[inline(always)]
unsafe fn multiply(sums: &mut [[[f32; 4]; 8]; 2], step: u32, m: u32, n: u32) {
    let (a, b) = stage(step);
    let lane = warp::lane_id();
    let mut piece = 0;
    while piece < TILE_K / 8 {
        // SAFETY: the caller's contract; rows and pieces are in the tiles.
        unsafe {
            // Rows 0 to 15 of the first eight columns, then of the next eight.
            let at = |row: u32| a.add(offset(m + row + lane % 16, piece + lane / 16)).cast();
            let a = [mma::load_matrices(at(0)), mma::load_matrices(at(16))];
            let mut j = 0;
            while j < 4 {
                // Eight rows of B, first and next eight columns; then the next eight rows.
                let row = n + 16 * j as u32 + lane / 16 * 8 + lane % 8;
                let b = mma::load_matrices(b.add(offset(row, piece + lane / 8 % 2)).cast());
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
