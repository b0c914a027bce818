//! What a kernel does beside a product of large matrices.

use cuda_std::tile::SharedTile;
use devcomm_types::TensorMap;

use super::gemm_wgmma::STORE_M;
use super::order::Order;

/// What the warps do that neither load nor multiply: how a block's registers are divided.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Beside {
    Nothing,
    /// They copy.
    Copies,
    /// They add to the tiles that are stored, of which multiplying warps report theirs.
    Sums,
    /// They add to what all ranks send, also this one to itself: nothing is reported.
    SumsOfMessages,
}

impl Beside {
    /// Whether they add, and multiplying warps send what they store.
    #[inline(always)]
    pub(crate) const fn is_sums(self) -> bool {
        matches!(self, Self::Sums | Self::SumsOfMessages)
    }

    /// Whether multiplying warps report what they have stored.
    #[inline(always)]
    pub(crate) const fn is_reported(self) -> bool {
        matches!(self, Self::Sums)
    }
}

/// What a block of [`gemm_wgmma`](super::gemm_wgmma) does beside the product.
pub(crate) trait Follow {
    /// What the warps do that neither load nor multiply.
    const BESIDE: Beside;

    /// Whether the rows are in groups, so that tiles may end before C does.
    const GROUPS: bool = false;

    /// The order of the tiles of clusters, of this many rows and columns. With
    /// [`GROUPS`](Self::GROUPS) all threads of the block call it together, once; otherwise any
    /// thread, at any time.
    #[inline(always)]
    fn order(&self, rows: u32, columns: u32) -> Order {
        Order::whole(rows, columns)
    }

    /// From where the rows of A of a block's tile are loaded, if they begin at `row`: by default
    /// from `a`. The loading thread calls it for each tile, behind `tiles` others, and loads then.
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn source<'a>(
        &'a self,
        a: &'a TensorMap,
        _tiles: u32,
        row: u32,
    ) -> (&'a TensorMap, u32) {
        (a, row)
    }

    /// What is stored of a word of the product.
    #[inline(always)]
    fn word(&self, word: u32) -> u32 {
        word
    }

    /// Stores a slice of a warp's part of a tile from shared memory: by default to C, of which this
    /// is the map. One lane calls it.
    ///
    /// # Safety
    ///
    /// The kernel's contract; the tile is as [`SharedTile::store`] needs it.
    #[inline(always)]
    #[track_caller]
    unsafe fn keep<O>(&self, c: &TensorMap, row: u32, column: u32, tile: SharedTile<O, STORE_M>) {
        // SAFETY: the caller's contract.
        unsafe { tile.store(c, row, column) };
    }

    /// Sends a slice of a warp's part of a tile from shared memory, in a bulk group of its own. One
    /// lane calls it.
    ///
    /// # Safety
    ///
    /// The kernel's contract; the tile is as [`SharedTile::store`] needs it.
    #[inline(always)]
    unsafe fn send<O>(&self, _row: u32, _column: u32, _tile: SharedTile<O, STORE_M>) {}

    /// A multiplying warp has stored this many of its parts of tiles, if they
    /// [are reported](Beside::is_reported). One lane calls it.
    #[inline(always)]
    fn stored(&self, _warp: u32, _tiles: u32) {}

    /// What the `index`-th of the warps does that neither load nor multiply.
    ///
    /// # Safety
    ///
    /// The kernel's contract, and all lanes of the warp call it.
    #[inline(always)]
    unsafe fn beside(&self, _order: Order, _index: u32) {}

    /// What a multiplying warp does when all its parts of tiles are stored and sent.
    ///
    /// # Safety
    ///
    /// As [`beside`](Self::beside).
    #[inline(always)]
    unsafe fn last(&self, _order: Order, _warp: u32) {}
}

/// Nothing.
impl Follow for () {
    const BESIDE: Beside = Beside::Nothing;
}
