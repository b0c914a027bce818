//! Step 8: a block computes tile after tile, in an order that the L2 cache likes, and TMA stores
//! them.

use cuda_std::prelude::*;
use cuda_std::tile::{Pipeline, PipelineState, SharedTile, TileMemory, TileOrder};
use cuda_std::{cluster, tma, wgmma};
use devcomm_types::{GridConstant, TensorMap};

use crate::warpgroup::{ROWS, Sums256, TERMS, multiply};

/// Rows of C of a block.
pub const TILE_M: u32 = 128;
/// Columns of C of a block.
pub const TILE_N: u32 = 256;
/// Blocks per cluster.
pub const CLUSTER: u32 = 2;
/// Rows of B that a block loads.
pub const HALF: u32 = TILE_N / CLUSTER;
/// Rows of tiles of C that are computed at the same time, of two blocks each.
const GROUP: u32 = 8;
/// Rows of C that a warp stores.
pub const STORE_M: u32 = 16;
/// Stages of the pipeline.
const STAGES: u32 = 4;
const STAGE_BYTES: u32 = A::BYTES + B::BYTES;
/// Warps that multiply: two warpgroups.
const MULTIPLYING: u32 = 8;
/// Threads per block: two warpgroups that multiply, one that loads.
pub const THREADS: u32 = 384;
/// Dynamic shared memory in bytes, with two tiles for the stores of each warp.
pub const SHARED: u32 = STAGES * STAGE_BYTES + 2 * MULTIPLYING * Store::BYTES + TileMemory::PADDING;

type A = SharedTile<bf16, TILE_M>;
type B = SharedTile<bf16, TILE_N>;
type Store = SharedTile<bf16, STORE_M>;

/// Computes `C = A x B^T`. `a`, `b` and `c` are tensor maps with tiles of [`TILE_M`], [`HALF`] and
/// [`STORE_M`] rows.
///
/// Grid: a multiple of [`CLUSTER`] blocks, at most one per multiprocessor. Block: [`THREADS`]
/// threads, with [`SHARED`] bytes.
#[kernel(arch = "sm_90a", max_threads = 384, cluster = 2)]
pub unsafe fn step8_persistent(
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: GridConstant<TensorMap>,
    m: u32,
    n: u32,
    k: u32,
) {
    let memory = TileMemory::dynamic();
    let tiles = |state: PipelineState| -> (A, B) {
        let at = state.stage * STAGE_BYTES;
        (memory.tile(at), memory.tile(at + A::BYTES))
    };
    let order = TileOrder::<GROUP> { rows: m / (CLUSTER * TILE_M), columns: n / TILE_N };
    let origin = |tile: u32| {
        let (row, column) = order.position(tile);
        ((CLUSTER * row + cluster::rank()) * TILE_M, column * TILE_N)
    };
    let (mut tile, clusters) = (thread::block_idx_x() / CLUSTER, thread::grid_dim_x() / CLUSTER);
    let thread = thread::thread_idx_x();
    let warp = thread / warp::WARP_SIZE;
    // SAFETY: the contract. A stage is loaded when it is empty, and read when it is full.
    unsafe {
        let pipeline = Pipeline::at(shared_array![u64; Pipeline::words(STAGES)], STAGES);
        if thread == 0 {
            // A block's loads write to both blocks: all their warpgroups release a stage.
            pipeline.init(1, 2 * CLUSTER);
        }
        cluster::sync_relaxed();
        let mut state = PipelineState::FIRST;
        if warp < MULTIPLYING {
            wgmma::raise_registers::<232>();
            let warpgroup_row = ROWS * (thread / 128);
            let release = |state| {
                // One thread for each block of the cluster.
                if thread % 128 < CLUSTER {
                    pipeline.empty(state).arrive_in(thread % 128);
                }
            };
            while tile < order.count() {
                let (mut sums, mut last, mut term) = (Sums256::filled(0.0), state, 0);
                wgmma::fence_operand(&mut sums);
                while term < k {
                    let (tile_a, tile_b) = tiles(state);
                    pipeline.wait_full(state);
                    multiply(&mut sums, tile_a.rows(warpgroup_row), tile_b, term > 0);
                    wgmma::wait_groups::<1>();
                    if term > 0 {
                        release(last);
                    }
                    (last, state, term) = (state, pipeline.next(state), term + TERMS);
                }
                wgmma::wait_groups::<0>();
                wgmma::fence_operand(&mut sums);
                release(last);
                let (row, column) = origin(tile);
                store(&sums, &c, memory, row + STORE_M * warp, column);
                tile += clusters;
            }
            tma::wait_stores::<0>();
        } else {
            wgmma::lower_registers::<40>();
            if warp == MULTIPLYING && warp::lane_id() == 0 {
                let half = HALF * cluster::rank();
                while tile < order.count() {
                    let ((row, column), mut term) = (origin(tile), 0);
                    while term < k {
                        let (tile_a, tile_b) = tiles(state);
                        pipeline.wait_empty(state);
                        let full = pipeline.full(state);
                        full.arrive_expect_tx(STAGE_BYTES);
                        tile_a.load(&a, row, term, full);
                        let (b_half, both) = (tile_b.rows::<HALF>(half), (1 << CLUSTER) - 1);
                        b_half.load_multicast(&b, column + half, term, full, both);
                        (state, term) = (pipeline.next(state), term + TERMS);
                    }
                    tile += clusters;
                }
            }
        }
        // No block ends while the other one still writes to its shared memory.
        cluster::sync();
    }
}

/// Stores the sums of a warp, 64 columns at a time: to shared memory, and from there by TMA.
///
/// # Safety
///
/// The lanes of a multiplying warp call this together.
unsafe fn store(sums: &Sums256, c: &TensorMap, memory: TileMemory, row: u32, column: u32) {
    let (warp, lane) = (thread::thread_idx_x() / warp::WARP_SIZE, warp::lane_id());
    let mut slice = 0;
    while slice < TILE_N / Store::COLUMNS {
        let number = 2 * warp + slice % 2;
        let to: Store = memory.tile(STAGES * STAGE_BYTES + number * Store::BYTES);
        // SAFETY: TMA has read the tile before the warp writes it again.
        unsafe {
            if lane == 0 {
                tma::wait_stores_read::<1>();
            }
            warp::sync();
            sums.store(to, slice * Store::COLUMNS);
            tma::fence_async_shared();
            warp::sync();
            if lane == 0 {
                to.store(c, row, column + slice * Store::COLUMNS);
                tma::commit_stores();
            }
        }
        slice += 1;
    }
}
