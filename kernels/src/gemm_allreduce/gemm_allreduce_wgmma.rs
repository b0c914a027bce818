//! The Hopper form: `wgmma` by warpgroups, on tiles that one thread loads by TMA.

use cuda_std::prelude::*;
use cuda_std::tile::{Pipeline, PipelineState, SharedTile, TileMemory};
use cuda_std::tma;
use cuda_std::wgmma::{self, Tile};
use devcomm_types::{F8E4M3, GridConstant, TensorMap};
use nccl_device::{DevComm, Window};

use super::exchange::Exchange;
use super::partial::Partial;
use super::tiles::{STRIP_ROWS, STRIPS, TILE_ROWS, Tiles};

/// Columns of a tile of C.
pub(super) const COLUMNS: u32 = 256;
/// A stage's tiles of A and B.
type A = SharedTile<bf16, TILE_ROWS>;
type B = SharedTile<bf16, COLUMNS>;
/// Columns of A and B in a stage of the pipeline.
const TILE_K: u32 = A::COLUMNS;
/// Stages in shared memory.
const STAGES: u32 = 4;
/// Bytes of a stage: tiles of A and B.
const STAGE: u32 = A::BYTES + B::BYTES;
/// Dynamic shared memory: the stages, and padding to align them.
pub(super) const SHARED: u32 = STAGES * STAGE + TileMemory::PADDING;
/// Computing warps: four for each strip.
const COMPUTING_WARPS: u32 = 4 * STRIPS;
/// Index of the loading warp.
const LOADING: u32 = COMPUTING_WARPS;
/// Warps that only reduce.
const REDUCING_WARPS: u32 = 3;
pub(super) const THREADS: u32 = (COMPUTING_WARPS + 1 + REDUCING_WARPS) * warp::WARP_SIZE;
/// Named barriers: the first of one for each strip's threads.
const STRIP_BARRIER: u32 = 1;

/// The product and its all-reduce, as [`GemmForm`] describes, on Hopper. Partial sums are sent as
/// `W`.
///
/// `a` and `b` are [`TensorMapDesc`]s of the two matrices, with tiles of [`GemmForm::TILE_ROWS`]
/// and of [`GemmForm::tile_columns`] rows.
///
/// Grid: at most as many blocks as the device communicator has LSA barriers, the same in every
/// rank. Block: [`GemmForm::threads`] threads, with [`GemmForm::dynamic_shared`] bytes.
///
/// # Safety
///
/// `a` describes allocated memory of `m x k` elements and `b` of `n x k`; `c` has `m * n` in every
/// rank. `k` is a multiple of 8, and `m`, `n` and `k` are not 0. The windows of the workspace have
/// [`GemmForm::workspace`]'s words for this form and `W`; no other kernel uses them, and their
/// flags were 0 in every rank before the first launch in any. All ranks launch with the same
/// arguments, in the same order.
///
/// [`TensorMapDesc`]: devcomm_types::TensorMapDesc
/// [`GemmForm::TILE_ROWS`]: super::GemmForm::TILE_ROWS
/// [`GemmForm::tile_columns`]: super::GemmForm::tile_columns
/// [`GemmForm`]: super::GemmForm
/// [`GemmForm::threads`]: super::GemmForm::threads
/// [`GemmForm::dynamic_shared`]: super::GemmForm::dynamic_shared
/// [`GemmForm::workspace`]: super::GemmForm::workspace
#[kernel(arch = "sm_90a", max_threads = 384, W = [f32, bf16, F8E4M3])]
pub unsafe fn gemm_allreduce_wgmma<W: Partial>(
    comm: DevComm,
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: Window<bf16>,
    partials: Window<u32>,
    flags: Window<u32>,
    m: u32,
    n: u32,
    k: u32,
) {
    let tiles = Tiles::<COLUMNS> { m, n };
    let steps = k.div_ceil(TILE_K);
    // SAFETY: the kernel's contract. All warps reach `reduce` and `finish`.
    unsafe {
        let exchange = Exchange::<W, COLUMNS>::new(&comm, tiles, c, partials, flags);
        let shared = Shared {
            memory: TileMemory::dynamic(),
            pipeline: Pipeline::at(shared_array![u64; Pipeline::words(STAGES)], STAGES),
        };
        if thread::thread_idx_x() == 0 {
            // The loading thread; one lane of each computing warp.
            shared.pipeline.init(1, COMPUTING_WARPS);
        }
        thread::sync_threads();
        let warp = thread::thread_idx_x() / warp::WARP_SIZE;
        if warp < COMPUTING_WARPS {
            compute(&exchange, shared, tiles, steps);
        } else if warp == LOADING {
            if warp::lane_id() == 0 {
                load(&a, &b, shared, tiles, steps);
            }
            warp::sync();
        }
        exchange.reduce();
        exchange.finish();
    }
}

/// The block's shared memory.
#[derive(Clone, Copy)]
struct Shared {
    memory: TileMemory,
    pipeline: Pipeline,
}

impl Shared {
    /// A stage's tile of A.
    fn a(self, state: PipelineState) -> A {
        self.memory.tile(state.stage * STAGE)
    }

    /// A stage's tile of B.
    fn b(self, state: PipelineState) -> B {
        self.memory.tile(state.stage * STAGE + A::BYTES)
    }
}

/// Loads the tiles of A and B for this block's tiles of C.
///
/// # Safety
///
/// The kernel's contract, and one thread calls it.
unsafe fn load(a: &TensorMap, b: &TensorMap, shared: Shared, tiles: Tiles<COLUMNS>, steps: u32) {
    tma::prefetch_map(a);
    tma::prefetch_map(b);
    let mut state = PipelineState::FIRST;
    let mut tile = thread::block_idx_x();
    while tile < tiles.count() {
        let (row, column) = tiles.origin(tile);
        let mut step = 0;
        while step < steps {
            shared.pipeline.wait_empty(state);
            let full = shared.pipeline.full(state);
            full.arrive_expect_tx(STAGE);
            // SAFETY: the stage is empty, and no thread reads it before it is full.
            unsafe {
                shared.a(state).load(a, row, step * TILE_K, full);
                shared.b(state).load(b, column, step * TILE_K, full);
            }
            state = shared.pipeline.next(state);
            step += 1;
        }
        tile += thread::grid_dim_x();
    }
}

/// Computes this warpgroup's strip of each of the block's tiles, and stores the sums to its owner.
///
/// # Safety
///
/// The kernel's contract, and the first [`COMPUTING_WARPS`] warps of the block call it.
unsafe fn compute<W: Partial>(
    exchange: &Exchange<'_, W, COLUMNS>,
    shared: Shared,
    tiles: Tiles<COLUMNS>,
    steps: u32,
) {
    let thread = thread::thread_idx_x();
    let warpgroup = thread / 128;
    let warp = thread / warp::WARP_SIZE % 4;
    let mut state = PipelineState::FIRST;
    let mut tile = thread::block_idx_x();
    while tile < tiles.count() {
        let mut sums = [0.0; 128];
        // SAFETY: the caller's contract. No other code accesses the sums between the two operand
        // fences.
        unsafe {
            let mut last = state;
            let mut step = 0;
            wgmma::fence_operand(&mut sums);
            while step < steps {
                shared.pipeline.wait_full(state);
                wgmma::fence();
                let a = shared.a(state).rows::<STRIP_ROWS>(warpgroup * STRIP_ROWS);
                multiply(&mut sums, a.factor(), shared.b(state).factor());
                wgmma::commit_group();
                // The previous step's `wgmma`s have read their stage.
                wgmma::wait_groups::<1>();
                if step > 0 && warp::lane_id() == 0 {
                    shared.pipeline.empty(last).arrive();
                }
                last = state;
                state = shared.pipeline.next(state);
                step += 1;
            }
            wgmma::wait_groups::<0>();
            wgmma::fence_operand(&mut sums);
            if warp::lane_id() == 0 {
                shared.pipeline.empty(last).arrive();
            }
            let strip = tiles.strip(STRIPS * tile + warpgroup);
            exchange.partial_tile(strip).store::<{ COLUMNS as usize / 8 }>(warp, 0, |j| {
                [sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]]
            });
            exchange.announce(strip, STRIP_BARRIER + warpgroup, thread % 128);
        }
        tile += thread::grid_dim_x();
    }
}

/// Adds the products of a stage.
///
/// # Safety
///
/// As for [`compute`]; the stage is full.
unsafe fn multiply(sums: &mut [f32; 128], a: Tile<bf16>, b: Tile<bf16>) {
    let mut k = 0;
    while k < TILE_K {
        // SAFETY: the caller's contract.
        unsafe { wgmma::multiply(sums, a.columns_from(k), b.columns_from(k), true) };
        k += 16;
    }
}
