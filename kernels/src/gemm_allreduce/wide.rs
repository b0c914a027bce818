//! The products of [`gemm_wgmma`](crate::gemm::gemm_wgmma) that are added over the ranks.
//!
//! A warp that multiplies sends what it stores by [`PeerTiles`], from the same shared memory. The
//! three warps that neither load nor multiply take the rows of the block's tiles in turn, and add
//! what the ranks computed. Only of its last tile each multiplying warp adds its own rows.

use core::ptr::null_mut;

use cuda_std::prelude::*;
use cuda_std::tile::SharedTile;
use cuda_std::{grid, hint};
use devcomm_types::TensorMap;
use nccl_device::{
    Everyone, Owners, PeerColumn, PeerMatrix, PeerTiles, RowOwners, TileOwners, message_word,
};

use crate::files::gemm::epilogue::Epilogue;
use crate::files::gemm::factors::origin;
use crate::files::gemm::gemm_wgmma::{
    CLUSTER, IDLE_WARPS, MULTIPLYING_WARPS, STORE_M, TILE_M, TILE_N, product_with,
};
use crate::files::gemm::hooks::{Adding, Hooks};
use crate::files::gemm::order::{Order, cluster, clusters};

/// Rows of a cluster's tile.
pub(super) const CLUSTER_M: u32 = CLUSTER * TILE_M;
/// The owners of the tiles of clusters.
pub(super) type ClusterTileOwners = TileOwners<CLUSTER_M, TILE_N>;

/// The order in which clusters compute the tiles.
pub(super) trait Ordered: Owners {
    /// The order of the tiles of clusters, of this many rows and columns.
    fn order<const N: usize>(_: &PeerMatrix<N>, rows: u32, columns: u32) -> Order {
        Order::whole(rows, columns)
    }
}

impl Ordered for Everyone {}

impl Ordered for ClusterTileOwners {}

/// A cluster computes the same tile of each rank's rows: of two ranks its own last; of more ranks
/// each cluster begins with another one, so that all receive at any time.
impl Ordered for RowOwners {
    fn order<const N: usize>(matrix: &PeerMatrix<N>, rows: u32, columns: u32) -> Order {
        let first = matrix.rank() + 1 + if N == 2 { 0 } else { cluster() };
        Order::turns(rows, columns, first, matrix.ranks())
    }
}

/// Computes a product, with an epilogue, and adds it over the ranks.
///
/// # Safety
///
/// As for [`gemm_wgmma`](crate::gemm::gemm_wgmma::gemm_wgmma()) of bf16, and as [`PeerTiles::new`]
/// says. All threads of the block call it.
pub(super) unsafe fn summed<O: Owners, const N: usize>(
    maps: [&TensorMap; 3],
    extents: [u32; 3],
    peers: &PeerTiles<'_, O, N>,
    epilogue: impl Epilogue,
    hooks: &impl Hooks,
) {
    peers.prepare();
    // SAFETY: the caller's contract. The product ends with a barrier.
    unsafe {
        product_with::<bf16, _>(maps, null_mut(), extents, [false; 2], epilogue, hooks);
        peers.end((MULTIPLYING_WARPS + IDLE_WARPS) * warp::WARP_SIZE);
    }
}

/// The tiles of this block.
pub(super) fn tiles(order: Order) -> u32 {
    order.count().saturating_sub(cluster()).div_ceil(clusters())
}

/// The lane's column of one of the block's tiles, if this rank adds it.
fn column<O: Owners, const N: usize>(
    peers: &PeerTiles<'_, O, N>,
    order: Order,
    tile: u32,
) -> Option<PeerColumn> {
    let (row, column) = origin(order, cluster() + tile * clusters());
    peers.column(row, column)
}

impl<O: Ordered, const N: usize> Hooks for PeerTiles<'_, O, N> {
    type Registers = Adding;

    const SENDS: bool = true;
    const REPORTS: bool = N == 2;

    fn order(&self, rows: u32, columns: u32) -> Order {
        O::order(&self.matrix(), rows, columns)
    }

    /// Returns the word as the peers receive it, so that all ranks add the same zeros.
    fn encode(&self, word: u32) -> u32 {
        message_word(word)
    }

    #[track_caller]
    unsafe fn store_slice<T>(
        &self,
        c: &TensorMap,
        row: u32,
        column: u32,
        tile: SharedTile<T, STORE_M>,
    ) {
        // SAFETY: the caller is one lane, with a tile that was written before a fence.
        unsafe { self.keep(c, row, column, tile) };
    }

    unsafe fn send_slice<T>(&self, row: u32, column: u32, tile: SharedTile<T, STORE_M>) {
        // SAFETY: the caller's contract. The launches before this one have ended.
        unsafe { self.send(row, column, tile) };
    }

    fn on_stored(&self, warp: u32, tiles: u32) {
        self.stored(warp, tiles);
    }

    unsafe fn run_idle_warp(&self, order: Order, index: u32) {
        grid::wait_for_previous();
        self.meet(index == 0);
        let (mut tile, mut first) = (0, index * Self::AT_ONCE);
        // SAFETY: the caller's contract. The rows are this warp's.
        unsafe {
            let sums = self.sums();
            // Opaque: the number of tiles less one would take a register.
            while hint::opaque(tile) + 1 < tiles(order) {
                if let Some(column) = column(self, order, tile) {
                    let mut row = first;
                    while row < TILE_M {
                        self.wait_stored(row / STORE_M, tile);
                        sums.add(column, row);
                        row += IDLE_WARPS * Self::AT_ONCE;
                    }
                    // The warps take turns with the rows of all tiles.
                    first = row - TILE_M;
                }
                tile += 1;
            }
        }
        self.added();
    }

    unsafe fn drain(&self, order: Order, warp: u32) {
        let last = tiles(order).checked_sub(1);
        if let Some(column) = last.and_then(|last| column(self, order, last)) {
            let mut row = warp * STORE_M;
            // Not unrolled, which would take more registers.
            let end = hint::opaque(row + STORE_M);
            // SAFETY: the caller's contract. The rows are this warp's.
            unsafe {
                warp::sync();
                self.meet(false);
                let sums = self.sums();
                while row < end {
                    sums.add(column, row);
                    row += Self::AT_ONCE;
                }
            }
        }
        self.added();
    }
}
