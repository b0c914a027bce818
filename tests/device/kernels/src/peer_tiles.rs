//! The sum of a matrix over the ranks by [`PeerTiles`], without a product.

use cuda_std::convert::f32_to_bf16x2;
use cuda_std::prelude::*;
use cuda_std::tile::{RegTile, SharedTile, TileMemory};
use cuda_std::{grid, tma};
use nccl_device::{
    DevComm, Everyone, LamportMemory, Owners, PeerTiles, RowOwners, TileOwners, Window,
    message_word,
};

/// Threads of a block: a warp that stores and sends, and one that adds.
pub const THREADS: u32 = 64;
/// Dynamic shared memory in bytes: four parts.
pub const SHARED: u32 = 4 * Part::BYTES + TileMemory::PADDING;

type Part = SharedTile<bf16, 16>;

/// Owners of tiles of the size that a block takes.
pub type Tiles = TileOwners<16, 256>;

/// Computes `C = sum over the N ranks of rank + row + 2 * column`, of `m x n` elements, each
/// rounded to bf16. One block takes tiles of 16 rows and 256 columns, each of four parts. `n` is a
/// multiple of 8. `own` has this rank's elements.
///
/// # Safety
///
/// The arguments are as [`PeerTiles::new`] needs them.
#[kernel(arch = "sm_90a", max_threads = 64, O = [Everyone, RowOwners, Tiles], N = [2, 4, 8])]
pub unsafe fn peer_tiles_sum<O: Owners, const N: usize>(
    comm: DevComm,
    own: *mut bf16,
    c: Window<bf16>,
    memory: LamportMemory,
    m: u32,
    n: u32,
) {
    // SAFETY: the kernel's contract. One warp stores the parts, and the other adds them.
    unsafe {
        let to = c.local().as_ptr();
        let peers = PeerTiles::<O, N>::new(&comm, &memory, to, [m, n]);
        let peers = peers.kept_in(own);
        let peers = if O::BROADCASTS { peers.stored_in_all(&c) } else { peers };
        peers.prepare();
        grid::wait_for_previous();
        let shared = TileMemory::dynamic();
        let part = |i: u32| -> Part { shared.tile(i * Part::BYTES) };
        let (rows, columns) = (m.div_ceil(16), n.div_ceil(256));
        let adds = thread::thread_idx_x() >= warp::WARP_SIZE;
        let sums = peers.sums();
        if adds {
            peers.meet(true);
        }
        for tile in 0..rows * columns {
            let (row, column) = (tile / columns * 16, tile % columns * 256);
            if !adds {
                let values = RegTile::<f32, 32>::filled(comm.lsa_team().rank as f32)
                    .map_at(|r, c, rank| rank + (row + r) as f32 + 2.0 * (column + c) as f32);
                values.for_each_pair(|r, at, pair| {
                    if row + r < m && column + at < n {
                        let at = (row + r) as usize * n as usize + (column + at) as usize;
                        mem::store(own.add(at).cast(), f32_to_bf16x2(pair));
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
                    // The parts are written again after this.
                    tma::wait_stores_read::<0>();
                    peers.stored(0, tile + 1);
                }
                warp::sync();
            } else if let Some(column) = peers.column(row, column) {
                peers.wait_stored(0, tile);
                for first in (0..16).step_by(PeerTiles::<O, N>::AT_ONCE as usize) {
                    sums.add(column, first);
                }
            }
        }
        if adds {
            peers.added();
        }
        tma::wait_stores::<0>();
        thread::sync_threads();
        peers.end(warp::WARP_SIZE);
    }
}
