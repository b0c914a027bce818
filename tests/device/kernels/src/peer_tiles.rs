//! The sum of a matrix over the ranks by [`PeerTiles`], without a product.

use cuda_std::convert::f32_to_bf16x2;
use cuda_std::prelude::*;
use cuda_std::tile::{RegTile, SharedTile, TileMemory};
use cuda_std::{grid, tma};
use nccl_device::{DevComm, PeerTiles, Window, message_word};

/// Threads of a block: a warp that stores and sends, and one that adds.
pub const THREADS: u32 = 64;
/// Dynamic shared memory in bytes: four parts.
pub const SHARED: u32 = 4 * Part::BYTES + TileMemory::PADDING;

type Part = SharedTile<bf16, 16>;

/// `C = sum over the N ranks of rank + row + 2 * column`, of `m x n` elements, rounded in each.
/// One block takes tiles of 16 rows and 256 columns, of four parts each. `n` is a multiple of 8.
///
/// # Safety
///
/// As [`PeerTiles::new`] needs it.
#[kernel(arch = "sm_90a", max_threads = 64, N = [2, 4, 8])]
pub unsafe fn peer_tiles_sum<const N: usize>(
    comm: DevComm,
    c: *mut bf16,
    slots: Window<u32>,
    state: *mut u32,
    capacity: u32,
    m: u32,
    n: u32,
) {
    // SAFETY: the kernel's contract. The parts are one warp's to store and the other's to add.
    unsafe {
        let peers = PeerTiles::<N>::new(&comm, slots, state, capacity, c, [m, n]);
        peers.prepare();
        grid::wait_for_previous();
        let memory = TileMemory::dynamic();
        let part = |i: u32| -> Part { memory.tile(i * Part::BYTES) };
        let (rows, columns) = (m.div_ceil(16), n.div_ceil(256));
        let rank = comm.lsa_team().rank as f32;
        let sums = peers.sums();
        for tile in 0..rows * columns {
            let (row, column) = (tile / columns * 16, tile % columns * 256);
            if thread::thread_idx_x() < warp::WARP_SIZE {
                let values = RegTile::<f32, 32>::filled(rank)
                    .map_at(|r, c, rank| rank + (row + r) as f32 + 2.0 * (column + c) as f32);
                values.for_each_pair(|r, at, pair| {
                    if row + r < m && column + at < n {
                        let at = (row + r) as usize * n as usize + (column + at) as usize;
                        mem::store(c.add(at).cast(), f32_to_bf16x2(pair));
                    }
                });
                for i in 0..4 {
                    let words = values.round::<bf16, 8>(8 * i as usize).map_words(message_word);
                    words.store(part(i), 0);
                }
                tma::fence_async_shared();
                warp::sync();
                if warp::lane_id() == 0 {
                    for i in 0..4 {
                        peers.send(row, column + 64 * i, part(i));
                    }
                    tma::commit_stores();
                    // Before the parts are written again.
                    tma::wait_stores_read::<0>();
                    peers.stored(0, tile + 1);
                }
                warp::sync();
            } else {
                peers.wait_stored(0, tile);
                for first in (0..16).step_by(PeerTiles::<N>::AT_ONCE as usize) {
                    sums.add(row + first, column);
                }
            }
        }
        tma::wait_stores::<0>();
        thread::sync_threads();
        if thread::thread_idx_x() == 0 {
            peers.end();
        }
    }
}
