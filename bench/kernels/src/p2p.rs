//! Copies between two neighbouring ranks: by loads, by stores and by TMA.

use cuda_std::atomic::{Order, Scope, fence};
use cuda_std::prelude::*;
use cuda_std::tile::{Pipeline, PipelineState, SharedTile, TileMemory};
use cuda_std::tma;
use devcomm_types::{GridConstant, TensorMap};
use nccl_device::{DevComm, Window};

use super::lsa_put::copy_part;

/// Copies the first `bytes` bytes of the peer's `send` to this rank's `recv` by loads if `reads`,
/// otherwise this rank's `send` to the peer's `recv` by stores; `rounds` times. The peer of rank
/// `r` is `r ^ 1`. A block's part has arrived before its next round begins.
///
/// Grid: any. Block: any, one-dimensional.
///
/// # Safety
///
/// All ranks are in one LSA team. Both windows have `bytes` bytes in every rank, and nothing else
/// accesses them until the kernel has ended in every rank.
#[kernel]
pub unsafe fn p2p_copy(
    comm: DevComm,
    send: Window<u8>,
    recv: Window<u8>,
    bytes: usize,
    reads: bool,
    rounds: u32,
) {
    let team = comm.lsa_team();
    let peer = team.rank ^ 1;
    if peer >= team.n_ranks {
        return;
    }
    let (from, to) =
        if reads { (send.lsa(peer), recv.local()) } else { (send.local(), recv.lsa(peer)) };
    for _ in 0..rounds {
        // SAFETY: the launch passes two buffers of `bytes` bytes.
        unsafe { copy_part(from, to, bytes) };
        fence(Order::SeqCst, Scope::Sys);
        thread::sync_threads();
    }
}

/// Bytes of a row of a tile.
pub const TMA_ROW: u32 = 128;
/// Rows of the largest tile.
pub const TMA_ROWS: u32 = 256;
/// Dynamic shared memory of [`p2p_tma`](fn@p2p_tma) in bytes.
pub const TMA_SHARED: u32 = STAGES * Tile::BYTES + TileMemory::PADDING;
const STAGES: u32 = 6;
type Tile = SharedTile<u8, TMA_ROWS>;

/// Copies the matrix `from`, `rows` rows of [`TMA_ROW`] bytes, to `to`, `rounds` times, each in
/// tiles of `tile_rows` rows. A block's stores of a round are complete before its next round
/// begins.
///
/// Grid: any. Block: one warp, of which one thread works, with [`TMA_SHARED`] bytes.
///
/// # Safety
///
/// `from` and `to` are maps of such matrices with such tiles, at most [`TMA_ROWS`] rows each, and
/// nothing else accesses the matrices until the kernel has ended.
#[kernel(requires(tile_rows > 0 && tile_rows <= TMA_ROWS))]
pub unsafe fn p2p_tma(
    from: GridConstant<TensorMap>,
    to: GridConstant<TensorMap>,
    rows: u32,
    tile_rows: u32,
    rounds: u32,
) {
    if thread::thread_idx_x() != 0 {
        return;
    }
    let (block, blocks) = (thread::block_idx_x(), thread::grid_dim_x());
    let memory = TileMemory::dynamic();
    let place = |state: PipelineState| -> Tile { memory.tile(state.stage * Tile::BYTES) };
    let tiles = rows.div_ceil(tile_rows);
    // SAFETY: the caller passes maps of such tiles; a place is stored from when it is full, and
    // loaded to again when that store has read it.
    unsafe {
        let pipeline = Pipeline::at(shared_array![u64; Pipeline::words(STAGES)], STAGES);
        // The waits for stores to have read their memory take the place of the *empty* barriers.
        pipeline.init(1, 1);
        let (mut full, mut empty) = (PipelineState::FIRST, PipelineState::FIRST);
        for _ in 0..rounds {
            let (mut loaded, mut stored) = (block, block);
            while stored < tiles {
                // The last load below goes to the shared memory of the last stored tile but one.
                tma::wait_stores_read::<1>();
                while loaded < tiles && loaded < stored + (STAGES - 1) * blocks {
                    let barrier = pipeline.full(empty);
                    barrier.arrive_expect_tx(tile_rows * TMA_ROW);
                    place(empty).load(&from, loaded * tile_rows, 0, barrier);
                    (empty, loaded) = (pipeline.next(empty), loaded + blocks);
                }
                pipeline.wait_full(full);
                place(full).store(&to, stored * tile_rows, 0);
                tma::commit_stores();
                (full, stored) = (pipeline.next(full), stored + blocks);
            }
            tma::wait_stores::<0>();
        }
    }
}
