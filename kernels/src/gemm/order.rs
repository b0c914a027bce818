//! The order in which clusters compute the tiles of a large product.

use cuda_std::thread;
use cuda_std::tile::TileOrder;

use super::gemm_wgmma::CLUSTER;

/// Rows of clusters' tiles that are computed at the same time.
const GROUP: u32 = 8;

/// The tiles of clusters: one of a cluster has those of its blocks, one below the other.
#[derive(Clone, Copy)]
pub(crate) struct Order {
    /// The tiles, or those of a half of the rows.
    tiles: TileOrder<GROUP>,
    /// If clusters compute the same tiles of both halves, by turns, the half that comes first.
    first_half: Option<u32>,
}

impl Order {
    /// Of all rows.
    #[inline(always)]
    pub(crate) fn whole(rows: u32, columns: u32) -> Self {
        Self { tiles: TileOrder { rows, columns }, first_half: None }
    }

    /// A cluster computes the same tiles of both halves of the rows, of which there is an even
    /// number, by turns: first that of half `first`.
    #[inline(always)]
    pub(crate) fn halves(rows: u32, columns: u32, first: u32) -> Self {
        Self { tiles: TileOrder { rows: rows / 2, columns }, first_half: Some(first) }
    }

    /// The tiles of a half that this cluster computes.
    #[inline(always)]
    fn turns(self) -> u32 {
        self.tiles.count().saturating_sub(cluster()).div_ceil(clusters())
    }

    /// The number behind those of this cluster's tiles: its first is that of the cluster, and the
    /// others follow at distances of the number of clusters.
    #[inline(always)]
    pub(crate) fn count(self) -> u32 {
        match self.first_half {
            None => self.tiles.count(),
            Some(_) => cluster() + 2 * self.turns() * clusters(),
        }
    }

    /// The row and the column of one of this cluster's tiles, in tiles of clusters.
    #[inline(always)]
    pub(crate) fn position(self, number: u32) -> (u32, u32) {
        let Some(first) = self.first_half else { return self.tiles.position(number) };
        let turn = number / clusters();
        let half = first ^ turn % 2;
        let (row, column) = self.tiles.position(cluster() + turn / 2 * clusters());
        (half * self.tiles.rows + row, column)
    }
}

/// This cluster's number.
#[inline(always)]
pub(crate) fn cluster() -> u32 {
    thread::block_idx_x() / CLUSTER
}

/// The clusters of the grid.
#[inline(always)]
pub(crate) fn clusters() -> u32 {
    thread::grid_dim_x() / CLUSTER
}
