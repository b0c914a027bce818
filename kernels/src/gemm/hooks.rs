//! Hooks into the product of large matrices: what a kernel does in addition to the product.

use super::prelude::*;
pub(crate) use super::stores::Store;

/// The steps of [`gemm_wgmma`](super::gemm_wgmma) that a kernel can change or add. In a block two
/// warpgroups multiply and store C, one warp loads, and three warps are idle.
///
/// A multiplying warp stores its 16 rows of a tile in *parts* of 128 bytes of each row ([`Store`]),
/// two at a time.
pub(crate) trait Hooks {
    /// The division of the registers: the multiplying warps have fewer if the idle warps have work.
    type Registers: RegisterSplit;

    /// Whether multiplying warps call [`send_part`](Self::send_part), to send the parts that they
    /// store to a peer too.
    const SENDS: bool = false;

    /// Whether multiplying warps call [`on_stored`](Self::on_stored), when their rows of a tile are
    /// in C.
    const REPORTS: bool = false;

    /// Whether the rows of C are in groups, each with a B of its own. Then a tile ends where its
    /// group ends, also in the middle of C.
    const GROUPS: bool = false;

    /// Returns the order in which clusters compute the tiles of a matrix of `m x n` elements. With
    /// [`GROUPS`](Self::GROUPS) all threads of the block call it together, once; otherwise any
    /// thread may call it, at any time.
    fn order(&self, extents: [u32; 2]) -> Order {
        Order::whole(extents)
    }

    /// Returns the map, and the row of its matrix, from which the rows of A of a tile are loaded:
    /// by default the map `a` and `row`, the tile's first row in C. The loading thread calls it
    /// once for each tile that its block computes, in their order, and then loads the rows. `_turn`
    /// is the number of these tiles that came before.
    unsafe fn a_tile<'a>(&'a self, a: &'a TensorMap, _turn: u32, row: u32) -> (&'a TensorMap, u32) {
        (a, row)
    }

    /// Returns the word that is stored, and sent, in place of a word of rounded sums.
    fn encode(&self, word: u32) -> u32 {
        word
    }

    /// Stores a part from shared memory (`tile`): by default to C, by the map `c`. The part begins
    /// at this row and column of C. One lane calls it, and the part is as [`Store::store`] needs
    /// it.
    #[track_caller]
    unsafe fn store_part<O>(&self, c: &TensorMap, row: u32, column: u32, tile: Store<O>) {
        // SAFETY: the caller passes a tile that was written before a fence, and one lane is here.
        unsafe { tile.store(c, row, column) };
    }

    /// Sends a part, which has the same arguments as in [`store_part`](Self::store_part), to a
    /// peer. Two parts are stored and then sent together: their stores are one bulk group of TMA,
    /// and what this sends belongs to the next one. One lane calls it, and the part is as
    /// [`Store::store`] needs it.
    unsafe fn send_part<O>(&self, _row: u32, _column: u32, _tile: Store<O>) {}

    /// Learns that the rows of multiplying warp `_warp` of the block's first `_tiles` tiles are in
    /// C. With [`REPORTS`](Self::REPORTS) one lane calls it.
    fn on_stored(&self, _warp: u32, _tiles: u32) {}

    /// Runs idle warp `_index` of the block, of the three warps that neither load nor multiply. All
    /// lanes of the warp call it, once.
    unsafe fn run_idle_warp(&self, _order: Order, _index: u32) {}

    /// Ends the work of multiplying warp `_warp` of the block, after all its parts are stored and
    /// sent. All lanes of the warp call it, once.
    unsafe fn drain(&self, _order: Order, _warp: u32) {}
}

/// The registers of a multiplying thread, and of another thread, if the idle warps have nothing to
/// do. Two warpgroups multiply and one does not, and a launch gives each thread 168 registers:
/// `2 * 232 + 40` is `3 * 168`.
pub(crate) type IdleRegisters = Registers<232, 40>;
/// The registers of both if the idle warps copy.
pub(crate) type CopyingRegisters = Registers<208, 88>;
/// The registers of both if the idle warps add.
pub(crate) type AddingRegisters = Registers<192, 120>;

/// The hooks of a kernel that is the product alone.
impl Hooks for () {
    type Registers = IdleRegisters;
}
