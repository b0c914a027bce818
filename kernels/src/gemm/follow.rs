//! What a kernel does beside a product of large matrices, with the tiles that are done.

use super::order::Order;

/// What the warps of a block of [`gemm_wgmma`](super::gemm_wgmma) do beside the product.
pub(crate) trait Follow {
    /// Whether it is anything.
    const ANY: bool;

    /// The order of the tiles of clusters, of this many rows and columns.
    #[inline(always)]
    fn order(&self, rows: u32, columns: u32) -> Order {
        Order::whole(rows, columns)
    }

    /// A multiplying warp has this many of its parts of tiles in C. One lane calls it.
    fn stored(&self, warp: u32, tiles: u32);

    /// What the `index`-th of the warps does that neither load nor multiply.
    ///
    /// # Safety
    ///
    /// The kernel's contract, and all lanes of the warp call it.
    unsafe fn beside(&self, order: Order, index: u32);

    /// What a multiplying warp does when all its parts of tiles are in C.
    ///
    /// # Safety
    ///
    /// As [`beside`](Self::beside).
    unsafe fn last(&self, order: Order, warp: u32);
}

/// Nothing.
impl Follow for () {
    const ANY: bool = false;

    #[inline(always)]
    fn stored(&self, _warp: u32, _tiles: u32) {}

    #[inline(always)]
    unsafe fn beside(&self, _order: Order, _index: u32) {}

    #[inline(always)]
    unsafe fn last(&self, _order: Order, _warp: u32) {}
}
