//! The Hopper form: `wgmma` by warpgroups, on tiles that one thread loads by TMA.

use cuda_std::mbarrier::{self, MBarrier};
use cuda_std::prelude::*;
use cuda_std::tma;
use cuda_std::wgmma::{self, Tile};
use devcomm_types::{GridConstant, TensorMap, TensorMapDesc};
use nccl_device::{DevComm, Window};

use super::exchange::Exchange;
use super::tiles::{STRIP_ROWS, STRIPS, TILE_ROWS, Tiles};

/// Columns of a tile of C.
pub(super) const COLUMNS: u32 = 256;
/// Columns of A and B in a stage of the pipeline.
const TILE_K: u32 = TensorMapDesc::TILE_COLUMNS;
/// Stages in shared memory.
const STAGES: u32 = 4;
/// Bytes of a row in a stage.
const ROW: u32 = TILE_K * 2;
/// Bytes of a stage: tiles of A and B.
const STAGE: u32 = (TILE_ROWS + COLUMNS) * ROW;
/// Alignment of a tile, in bytes.
const ALIGN: u32 = 1024;
/// Dynamic shared memory: the stages, and padding to align them.
pub(super) const SHARED: u32 = STAGES * STAGE + ALIGN;
/// Computing warps: four for each strip.
const COMPUTING_WARPS: u32 = 4 * STRIPS;
/// Index of the loading warp.
const LOADING: u32 = COMPUTING_WARPS;
/// Warps that only reduce.
const REDUCING_WARPS: u32 = 3;
pub(super) const THREADS: u32 = (COMPUTING_WARPS + 1 + REDUCING_WARPS) * warp::WARP_SIZE;
/// Named barriers: the first of one for each strip's threads.
const STRIP_BARRIER: u32 = 1;

/// The product and its all-reduce, as [`GemmForm`] describes, on Hopper.
///
/// `a` and `b` are [`TensorMapDesc`]s of the two matrices, with tiles of [`GemmForm::TILE_ROWS`]
/// and of [`GemmForm::tile_columns`] rows. With `local_only` each rank stores its own product to
/// its own memory of `c`, without an exchange.
///
/// Grid: at most as many blocks as the device communicator has LSA barriers, the same in every
/// rank. Block: [`GemmForm::threads`] threads, with [`GemmForm::dynamic_shared`] bytes.
///
/// # Safety
///
/// `a` describes allocated memory of `m x k` elements and `b` of `n x k`; `c` has `m * n` in every
/// rank. `k` is a multiple of 8, and `m`, `n` and `k` are not 0. The windows of the workspace have
/// [`GemmForm::workspace`]'s elements for this form; no other kernel uses them, and their flags
/// were 0 in every rank before the first launch in any. All ranks launch with the same arguments,
/// in the same order.
///
/// [`GemmForm::TILE_ROWS`]: super::GemmForm::TILE_ROWS
/// [`GemmForm::tile_columns`]: super::GemmForm::tile_columns
/// [`GemmForm`]: super::GemmForm
/// [`GemmForm::threads`]: super::GemmForm::threads
/// [`GemmForm::dynamic_shared`]: super::GemmForm::dynamic_shared
/// [`GemmForm::workspace`]: super::GemmForm::workspace
#[kernel(arch = "sm_90a", max_threads = 384)]
pub unsafe fn gemm_allreduce_wgmma(
    comm: DevComm,
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: Window<bf16>,
    partials: Window<f32>,
    flags: Window<u32>,
    m: u32,
    n: u32,
    k: u32,
    local_only: bool,
) {
    let tiles = Tiles::<COLUMNS> { m, n };
    let steps = k.div_ceil(TILE_K);
    // SAFETY: the kernel's contract. All warps reach `reduce` and `finish`.
    unsafe {
        let exchange = Exchange::new(&comm, tiles, c, partials, flags, local_only);
        let pipeline = Pipeline::new();
        if thread::thread_idx_x() == 0 {
            pipeline.init();
        }
        thread::sync_threads();
        let warp = thread::thread_idx_x() / warp::WARP_SIZE;
        if warp < COMPUTING_WARPS {
            compute(&exchange, pipeline, tiles, steps);
        } else if warp == LOADING {
            if warp::lane_id() == 0 {
                load(&a, &b, pipeline, tiles, steps);
            }
            warp::sync();
        }
        exchange.reduce();
        exchange.finish();
    }
}

/// The stages in shared memory, each with an `mbarrier` for *full* and one for *empty*.
#[derive(Clone, Copy)]
struct Pipeline {
    barriers: *mut u64,
    stages: *mut u8,
}

/// A stage's index, and the phase parity of its current use.
#[derive(Clone, Copy)]
struct PipelineState {
    stage: u32,
    parity: u32,
}

impl PipelineState {
    const FIRST: Self = Self { stage: 0, parity: 0 };

    #[inline(always)]
    fn next(self) -> Self {
        if self.stage + 1 == STAGES {
            Self { stage: 0, parity: self.parity ^ 1 }
        } else {
            Self { stage: self.stage + 1, parity: self.parity }
        }
    }
}

impl Pipeline {
    #[inline(always)]
    fn new() -> Self {
        let memory = shared::dynamic_shared_mem::<u8>();
        let unaligned = memory.addr() % ALIGN as usize;
        let skip = (ALIGN as usize - unaligned) % ALIGN as usize;
        Self {
            barriers: shared_array![u64; 2 * STAGES as usize],
            stages: memory.wrapping_add(skip),
        }
    }

    #[inline(always)]
    fn full(self, state: PipelineState) -> MBarrier {
        // SAFETY: the words are used only as `mbarrier`s, initialized before the block's barrier.
        unsafe { MBarrier::at(self.barriers.add(state.stage as usize)) }
    }

    #[inline(always)]
    fn empty(self, state: PipelineState) -> MBarrier {
        // SAFETY: as above.
        unsafe { MBarrier::at(self.barriers.add((STAGES + state.stage) as usize)) }
    }

    /// A stage's tile of A.
    #[inline(always)]
    fn a(self, state: PipelineState) -> *mut u8 {
        self.stages.wrapping_add((state.stage * STAGE) as usize)
    }

    /// A stage's tile of B.
    #[inline(always)]
    fn b(self, state: PipelineState) -> *mut u8 {
        self.a(state).wrapping_add((TILE_ROWS * ROW) as usize)
    }

    /// # Safety
    ///
    /// One thread calls it, before any barrier is used.
    #[inline(always)]
    unsafe fn init(self) {
        let mut stage = 0;
        while stage < STAGES {
            let state = PipelineState { stage, parity: 0 };
            // SAFETY: the caller's contract.
            unsafe {
                // The loading thread.
                self.full(state).init(1);
                // One lane of each computing warp.
                self.empty(state).init(COMPUTING_WARPS);
            }
            stage += 1;
        }
        mbarrier::fence_init();
    }
}

/// Loads the tiles of A and B for this block's tiles of C.
///
/// # Safety
///
/// The kernel's contract, and one thread calls it.
#[inline(always)]
unsafe fn load(
    a: &TensorMap,
    b: &TensorMap,
    pipeline: Pipeline,
    tiles: Tiles<COLUMNS>,
    steps: u32,
) {
    tma::prefetch_map(a);
    tma::prefetch_map(b);
    let mut state = PipelineState::FIRST;
    let mut tile = thread::block_idx_x();
    while tile < tiles.count() {
        let (row, column) = tiles.origin(tile);
        let mut step = 0;
        while step < steps {
            pipeline.empty(state).wait(state.parity ^ 1);
            let full = pipeline.full(state);
            full.arrive_expect_tx(STAGE);
            // SAFETY: the stage is empty, and no thread reads it before it is full.
            unsafe {
                tma::load_tile(pipeline.a(state), a, row, step * TILE_K, full);
                tma::load_tile(pipeline.b(state), b, column, step * TILE_K, full);
            }
            state = state.next();
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
#[inline(always)]
unsafe fn compute(
    exchange: &Exchange<'_, COLUMNS>,
    pipeline: Pipeline,
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
                pipeline.full(state).wait(state.parity);
                wgmma::fence();
                let a = Tile::at(pipeline.a(state)).offset_bytes(warpgroup * STRIP_ROWS * ROW);
                multiply(&mut sums, a, Tile::at(pipeline.b(state)));
                wgmma::commit_group();
                // The previous step's `wgmma`s have read their stage.
                wgmma::wait_groups::<1>();
                if step > 0 && warp::lane_id() == 0 {
                    pipeline.empty(last).arrive();
                }
                last = state;
                state = state.next();
                step += 1;
            }
            wgmma::wait_groups::<0>();
            wgmma::fence_operand(&mut sums);
            if warp::lane_id() == 0 {
                pipeline.empty(last).arrive();
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
#[inline(always)]
unsafe fn multiply(sums: &mut [f32; 128], a: Tile, b: Tile) {
    let mut k = 0;
    while k < TILE_K {
        // SAFETY: the caller's contract.
        unsafe { wgmma::multiply::<bf16, _>(sums, a.columns_from(k), b.columns_from(k), true) };
        k += 16;
    }
}
