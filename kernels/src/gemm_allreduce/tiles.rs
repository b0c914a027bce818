//! The division of C (`A x B^T`) into tiles and strips, and their order.

use cuda_std::tile::TileOrder;

/// Rows and columns of a tile.
pub(super) const TILE_ROWS: u32 = 128;
pub(super) const COLUMNS: u32 = 128;
/// Rows of a strip, which 128 threads compute and one rank reduces.
pub(super) const STRIP_ROWS: u32 = 64;
/// Strips per tile.
pub(super) const STRIPS: u32 = TILE_ROWS / STRIP_ROWS;

/// Rows of tiles that are numbered together.
const GROUP: u32 = 16;

/// The tiles of an `m x n` matrix.
#[derive(Clone, Copy)]
pub(super) struct Tiles {
    pub(super) m: u32,
    pub(super) n: u32,
}

/// A strip: its number, and the row, which may be beyond C, and column of its first element.
#[derive(Clone, Copy)]
pub(super) struct Strip {
    pub(super) number: u32,
    pub(super) row: u32,
    pub(super) column: u32,
}

impl Tiles {
    pub(super) fn count(self) -> u32 {
        self.order().count()
    }

    fn order(self) -> TileOrder<GROUP> {
        TileOrder { rows: self.m.div_ceil(TILE_ROWS), columns: self.n.div_ceil(COLUMNS) }
    }

    /// Returns the first row and column of tile `number`.
    pub(super) fn origin(self, number: u32) -> (u32, u32) {
        let (row, column) = self.order().position(number);
        (row * TILE_ROWS, column * COLUMNS)
    }

    pub(super) fn strip(self, number: u32) -> Strip {
        let (row, column) = self.origin(number / STRIPS);
        Strip { number, row: row + number % STRIPS * STRIP_ROWS, column }
    }
}

#[cfg(test)]
mod tests;
