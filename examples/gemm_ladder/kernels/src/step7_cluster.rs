//! Step 7: each of the two blocks of a cluster loads half of their common rows of B, for both.

use cuda_std::cluster;
use cuda_std::prelude::*;
use cuda_std::tile::{Pipeline, PipelineState, SharedTile, TileMemory};
use cuda_std::wgmma;
use devcomm_types::{GridConstant, TensorMap};

use crate::warpgroup::{ROWS, Sums256, TERMS, multiply, store};

/// Rows of C of a block.
pub const TILE_M: u32 = 128;
/// Columns of C of a block.
pub const TILE_N: u32 = 256;
/// Blocks per cluster.
pub const CLUSTER: u32 = 2;
/// Rows of B that a block loads.
pub const HALF: u32 = TILE_N / CLUSTER;
/// Stages of the pipeline.
const STAGES: u32 = 4;
const STAGE_BYTES: u32 = A::BYTES + B::BYTES;
/// Warps that multiply: two warpgroups.
const MULTIPLYING: u32 = 8;
/// Threads per block: two warpgroups that multiply, one that loads.
pub const THREADS: u32 = 384;
/// Dynamic shared memory in bytes.
pub const SHARED: u32 = STAGES * STAGE_BYTES + TileMemory::PADDING;

type A = SharedTile<bf16, TILE_M>;
type B = SharedTile<bf16, TILE_N>;

/// Computes `C = A x B^T`. `a` and `b` are tensor maps with tiles of [`TILE_M`] and [`HALF`] rows.
///
/// Grid: a block for each tile of [`TILE_M`] x [`TILE_N`] elements, `x` along columns of C. Block:
/// [`THREADS`] threads, with [`SHARED`] bytes.
#[kernel(arch = "sm_90a", max_threads = 384, cluster = 2)]
pub unsafe fn step7_cluster(
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: *mut bf16,
    n: u32,
    k: u32,
) {
    let memory = TileMemory::dynamic();
    let tiles = |state: PipelineState| -> (A, B) {
        let at = state.stage * STAGE_BYTES;
        (memory.tile(at), memory.tile(at + A::BYTES))
    };
    let (row, column) = (TILE_M * thread::block_idx_x(), TILE_N * thread::block_idx_y());
    let thread = thread::thread_idx_x();
    let warp = thread / warp::WARP_SIZE;
    // SAFETY: the crate's contract. A stage is loaded when it is empty, and read when it is full.
    unsafe {
        let pipeline = Pipeline::at(shared_array![u64; Pipeline::words(STAGES)], STAGES);
        if thread == 0 {
            // A block's loads write to both blocks: all their warpgroups release a stage.
            pipeline.init(1, 2 * CLUSTER);
        }
        cluster::sync_relaxed();
        let (mut state, mut term) = (PipelineState::FIRST, 0);
        if warp < MULTIPLYING {
            wgmma::raise_registers::<232>(); // 2 * 232 + 40 = 3 * 168, those of the launch.
            let warpgroup_row = ROWS * (thread / 128);
            let (mut sums, mut last) = (Sums256::filled(0.0), state);
            let release = |state| {
                // One thread arrives for each block of the cluster.
                if thread % 128 < CLUSTER {
                    pipeline.empty(state).arrive_in(thread % 128);
                }
            };
            wgmma::fence_operand(&mut sums);
            while term < k {
                let (tile_a, tile_b) = tiles(state);
                pipeline.wait_full(state);
                multiply(&mut sums, tile_a.rows(warpgroup_row), tile_b, term > 0);
                // These products run on; those of the previous stage have ended.
                wgmma::wait_groups::<1>();
                if term > 0 {
                    release(last);
                }
                (last, state, term) = (state, pipeline.next(state), term + TERMS);
            }
            wgmma::wait_groups::<0>();
            wgmma::fence_operand(&mut sums);
            store(&sums, c, n, row + warpgroup_row, column);
        } else {
            wgmma::lower_registers::<40>();
            if warp == MULTIPLYING && warp::lane_id() == 0 {
                let half = HALF * cluster::rank();
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
            }
            warp::sync(); // The lane that loads meets the others.
        }
        // No block ends while the other one still writes to its shared memory.
        cluster::sync();
    }
}
