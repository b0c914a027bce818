//! Sums over the ranks of tiles in registers by [`PeerRegTiles`].

use cuda_std::prelude::*;
use cuda_std::tile::RegTile;
use nccl_device::{DevComm, LamportMemory, PeerRegTiles};

/// Blocks of 8 columns of a tile.
const BLOCKS: usize = 4;
/// Rows and columns of a tile.
pub const TILE: [u32; 2] = [16, 8 * BLOCKS as u32];
/// Warps of a block: each adds one tile after the other.
pub const WARPS: u32 = 2;

/// Stores, for `tiles` tiles of [`TILE`] one below the other, the sum over the N ranks of
/// `rank + row + 16 * column`, each rounded to bf16, of the first `columns` columns to `sums`.
///
/// # Safety
///
/// `sums` has all elements of the tiles; the rest is as [`PeerRegTiles::begin`] needs it.
#[kernel(max_threads = 64, N = [2, 4, 8])]
pub unsafe fn peer_reg_tiles_sum<const N: usize>(
    comm: DevComm,
    sums: *mut f32,
    memory: LamportMemory,
    tiles: u32,
    columns: u32,
) {
    let used = tiles * TILE[1] / 16 * warp::WARP_SIZE;
    // SAFETY: the kernel's contract. Each tile is one warp's.
    unsafe {
        let peers = PeerRegTiles::<N>::begin(&comm, &memory, used);
        let rank = comm.lsa_team().rank as f32;
        let mut number = thread::thread_idx_x() / warp::WARP_SIZE;
        while number < tiles {
            let first = number * TILE[0];
            let mut tile = RegTile::<f32, BLOCKS>::filled(rank)
                .map_at(|row, column, rank| rank + (first + row) as f32 + 16.0 * column as f32);
            peers.add(number, &mut tile, columns);
            tile.for_each_pair(|row, column, pair| {
                if column < columns {
                    let at = sums.add(((first + row) * TILE[1] + column) as usize);
                    mem::store(at, pair[0]);
                    mem::store(at.add(1), pair[1]);
                }
            });
            number += WARPS;
        }
        // As in a kernel whose other warps have other roles.
        thread::named_barrier_sync(1, WARPS * warp::WARP_SIZE);
        if thread::thread_idx_x() == 0 {
            peers.end();
        }
    }
}
