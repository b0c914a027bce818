//! What a kernel does beside a product of large matrices.

use cuda_std::tile::{RegisterSplit, Registers, SharedTile};
use devcomm_types::TensorMap;

use super::gemm_wgmma::{CLUSTER, STORE_M, TILE_M, TILE_N};
use super::order::Order;

/// What a block of [`gemm_wgmma`](super::gemm_wgmma) does beside the product.
pub(crate) trait Follow {
    /// How the registers are divided: fewer for the multiplying warps if the idle ones have work.
    type Registers: RegisterSplit;

    /// Whether multiplying warps send what they store.
    const SENDS: bool = false;

    /// Whether multiplying warps [report](Self::stored) what they have stored.
    const REPORTS: bool = false;

    /// Whether the rows are in groups, so that tiles may end before C does.
    const GROUPS: bool = false;

    /// The order of the tiles of clusters, of this many rows and columns. With
    /// [`GROUPS`](Self::GROUPS) all threads of the block call it together, once; otherwise any
    /// thread, at any time.
    fn order(&self, rows: u32, columns: u32) -> Order {
        Order::whole(rows, columns)
    }

    /// The order of the tiles of a matrix of `m x n` elements.
    fn order_of(&self, m: u32, n: u32) -> Order {
        self.order(m.div_ceil(CLUSTER * TILE_M), n.div_ceil(TILE_N))
    }

    /// From where the rows of A of a block's tile are loaded, if they begin at `row`: by default
    /// from `a`. The loading thread calls it for each tile, behind `tiles` others, and loads then.
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    unsafe fn source<'a>(
        &'a self,
        a: &'a TensorMap,
        _tiles: u32,
        row: u32,
    ) -> (&'a TensorMap, u32) {
        (a, row)
    }

    /// What is stored of a word of the product.
    fn word(&self, word: u32) -> u32 {
        word
    }

    /// Stores a slice of a warp's part of a tile from shared memory: by default to C, of which this
    /// is the map. One lane calls it.
    ///
    /// # Safety
    ///
    /// The kernel's contract; the tile is as [`SharedTile::store`] needs it.
    #[track_caller]
    unsafe fn keep<O>(&self, c: &TensorMap, row: u32, column: u32, tile: SharedTile<O, STORE_M>) {
        // SAFETY: the caller's contract.
        unsafe { tile.store(c, row, column) };
    }

    /// Sends a slice of a warp's part of a tile from shared memory, in a bulk group that follows
    /// the one of the slices that are stored together. One lane calls it.
    ///
    /// # Safety
    ///
    /// The kernel's contract; the tile is as [`SharedTile::store`] needs it.
    unsafe fn send<O>(&self, _row: u32, _column: u32, _tile: SharedTile<O, STORE_M>) {}

    /// A multiplying warp has stored this many of its parts of tiles. One lane calls it, if they
    /// are [reported](Self::REPORTS).
    fn stored(&self, _warp: u32, _tiles: u32) {}

    /// What the `index`-th of the warps does that neither load nor multiply.
    ///
    /// # Safety
    ///
    /// The kernel's contract, and all lanes of the warp call it.
    unsafe fn beside(&self, _order: Order, _index: u32) {}

    /// What a multiplying warp does when all its parts of tiles are stored and sent.
    ///
    /// # Safety
    ///
    /// As [`beside`](Self::beside).
    unsafe fn last(&self, _order: Order, _warp: u32) {}
}

/// The registers if the idle warps have nothing to do, copy, or add.
pub(crate) type Alone = Registers<232, 40>;
pub(crate) type Copying = Registers<208, 88>;
pub(crate) type Adding = Registers<192, 120>;

/// Nothing.
impl Follow for () {
    type Registers = Alone;
}
