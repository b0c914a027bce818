//! Hooks into the product of large matrices: what a kernel does in addition to it.

use super::prelude::*;
pub(crate) use super::stores::Store;

/// The steps of [`gemm_wgmma`](super::gemm_wgmma) that a kernel can change or add.
pub(crate) trait Hooks {
    /// The division of the registers: the multiplying warps have fewer if the idle warps have work.
    type Registers: RegisterSplit;

    /// Whether multiplying warps send what they store.
    const SENDS: bool = false;

    /// Whether multiplying warps call [`on_stored`](Self::on_stored).
    const REPORTS: bool = false;

    /// Whether the rows are in groups, so that tiles may end before C does.
    const GROUPS: bool = false;

    /// Returns the order in which clusters compute the tiles of a matrix of `m x n` elements. With
    /// [`GROUPS`](Self::GROUPS) all threads of the block call it together, once; otherwise any
    /// thread may call it, at any time.
    fn order(&self, extents: [u32; 2]) -> Order {
        Order::whole(extents)
    }

    /// Returns the map and the row from which the rows of A of a tile are loaded: by default `a`
    /// and the tile's `row`. The loading thread calls it once for each tile, after `turn` others,
    /// in the order of the tiles, and then loads.
    unsafe fn a_tile<'a>(&'a self, a: &'a TensorMap, _turn: u32, row: u32) -> (&'a TensorMap, u32) {
        (a, row)
    }

    /// Returns the word that is stored for a word of the product.
    fn encode(&self, word: u32) -> u32 {
        word
    }

    /// Stores a slice of a warp's part of a tile from shared memory: by default to C by the map
    /// `c`. One lane calls it; the tile is as [`Store::store`] needs it.
    #[track_caller]
    unsafe fn store_slice<O>(&self, c: &TensorMap, row: u32, column: u32, tile: Store<O>) {
        // SAFETY: the caller passes a tile that was written before a fence, and one lane is here.
        unsafe { tile.store(c, row, column) };
    }

    /// Sends a slice of a warp's part of a tile from shared memory, in a bulk group after the group
    /// of the slices that are stored together. One lane calls it; the tile is as [`Store::store`]
    /// needs it.
    unsafe fn send_slice<O>(&self, _row: u32, _column: u32, _tile: Store<O>) {}

    /// Learns that a multiplying warp has stored its parts of this many tiles. With
    /// [`REPORTS`](Self::REPORTS) one lane calls it.
    fn on_stored(&self, _warp: u32, _tiles: u32) {}

    /// Runs the `index`-th of the warps that neither load nor multiply. All lanes of the warp call
    /// it, once.
    unsafe fn run_idle_warp(&self, _order: Order, _index: u32) {}

    /// Ends the work of a multiplying warp, after all its parts of tiles are stored and sent. All
    /// lanes of the warp call it, once.
    unsafe fn drain(&self, _order: Order, _warp: u32) {}
}

/// The registers of a multiplying thread, and of another one, if the idle warps have nothing to do.
/// Two warpgroups multiply and one does not: `2 * 232 + 40` is `3 * 168`, what a launch gives them.
pub(crate) type IdleRegisters = Registers<232, 40>;
/// The same if the idle warps copy.
pub(crate) type CopyingRegisters = Registers<208, 88>;
/// The same if the idle warps add.
pub(crate) type AddingRegisters = Registers<192, 120>;

/// A product without hooks.
impl Hooks for () {
    type Registers = IdleRegisters;
}
