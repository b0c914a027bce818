//! The order in which clusters compute the tiles of a large product.

use super::prelude::*;

/// Rows of clusters' tiles that are computed at the same time.
const GROUP: u32 = 8;

/// The order of clusters' tiles. A cluster's tile has those of its blocks, one below the other.
#[derive(Clone, Copy)]
pub(crate) struct Order {
    /// The tiles of all rows, or of one part of the rows if clusters compute parts by turns.
    tiles: TileOrder<GROUP>,
    division: Division,
}

/// The division of the rows.
#[derive(Clone, Copy)]
enum Division {
    None,
    /// A cluster computes the same tile of each part of the rows by turns, from part `first` on,
    /// modulo `parts`.
    Turns {
        first: u32,
        parts: u32,
    },
    /// All clusters compute the tiles of `height` rows, from row `first` on, before those of the
    /// next `height`; the last row is followed by row 0.
    Parts {
        first: u32,
        height: u32,
    },
    /// The tiles of each group of rows come after those of the group before it.
    Groups(GroupTiles<GROUP>),
}

/// A tile of this block, or a warp's rows of it.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    /// The first row and column in C.
    pub(crate) row: u32,
    pub(crate) column: u32,
    /// The row of B for the first column.
    pub(super) b_row: u32,
    /// The end of the rows of the tile's group.
    pub(super) end: u32,
}

impl Tile {
    pub(super) const NONE: Self = Self { row: 0, column: 0, b_row: 0, end: u32::MAX };
}

/// Returns the numbers of rows and columns of clusters' tiles of a matrix of `m x n` elements.
fn tiles([m, n]: [u32; 2]) -> TileOrder<GROUP> {
    TileOrder { rows: m.div_ceil(CLUSTER_M), columns: n.div_ceil(TILE_N) }
}

impl Order {
    /// Returns the order of the tiles of all rows of a matrix of `m x n` elements.
    pub(crate) fn whole(extents: [u32; 2]) -> Self {
        Self { tiles: tiles(extents), division: Division::None }
    }

    /// Returns the order of [`Division::Turns`]. The rows of tiles are a multiple of `parts`.
    pub(crate) fn by_turns(extents: [u32; 2], first: u32, parts: u32) -> Self {
        let TileOrder { rows, columns } = tiles(extents);
        let tiles = TileOrder { rows: rows / parts, columns };
        Self { tiles, division: Division::Turns { first, parts } }
    }

    /// Returns the order of [`Division::Parts`]; `first` is taken modulo the rows of tiles.
    pub(crate) fn parts(extents: [u32; 2], first: u32, height: u32) -> Self {
        let tiles = tiles(extents);
        Self { tiles, division: Division::Parts { first: first % tiles.rows, height } }
    }

    /// Returns the order of the tiles of groups of rows. The conditions are those of
    /// [`GroupTiles::new`].
    pub(super) unsafe fn groups(groups: Groups, extents: [u32; 2]) -> Self {
        let TileOrder { columns, .. } = tiles(extents);
        // SAFETY: the caller has all threads of the block here, with arrays that nothing writes.
        let groups = unsafe { GroupTiles::new(groups, CLUSTER_M, extents, columns) };
        Self { tiles: TileOrder { rows: groups.rows, columns }, division: Division::Groups(groups) }
    }

    /// Returns the end of the numbers of this cluster's tiles. The first number is the cluster's,
    /// and each of the others is more than the one before it by the number of clusters.
    pub(crate) fn count(self) -> u32 {
        match self.division {
            Division::Turns { parts, .. } => {
                cluster() + parts * turns(self.tiles.count()) * clusters()
            }
            _ => self.tiles.count(),
        }
    }

    /// Returns how many tiles this block computes.
    pub(crate) fn turns(self) -> u32 {
        turns(self.count())
    }

    /// Returns the tile that this block computes after `before` others.
    pub(crate) fn turn(self, before: u32) -> Tile {
        self.tile(cluster() + before * clusters())
    }

    /// Returns this block's tile of one of this cluster's tiles.
    pub(crate) fn tile(self, number: u32) -> Tile {
        let (group, (row, column)) = self.position(number);
        let (row, column) = ((CLUSTER * row + cluster::rank()) * TILE_M, column * TILE_N);
        Tile { row: group.first + row, column, b_row: group.b_row + column, end: group.end }
    }

    /// Returns the group of one of this cluster's tiles, and its row and column, in tiles.
    fn position(self, number: u32) -> (Group, (u32, u32)) {
        let position = match self.division {
            Division::None => self.tiles.position(number),
            Division::Turns { first, parts } => {
                let turn = number / clusters();
                let part = (first + turn) % parts;
                let (row, column) = self.tiles.position(cluster() + turn / parts * clusters());
                (part * self.tiles.rows + row, column)
            }
            Division::Parts { first, height } => {
                position_in_parts(self.tiles, first, height, number)
            }
            // SAFETY: `GroupTiles::new` had groups that nothing writes; the number is a tile's.
            Division::Groups(groups) => return unsafe { groups.position(number) },
        };
        (Group::ALL, position)
    }
}

/// Returns the row and the column of a tile, for [`Division::Parts`].
fn position_in_parts(tiles: TileOrder<GROUP>, first: u32, height: u32, number: u32) -> (u32, u32) {
    let TileOrder { rows, columns } = tiles;
    let in_part = (height * columns).max(1); // `max` spares the checks of the divisions.
    let (part, rest) = (number / in_part, number % in_part);
    let before = part * height;
    let part = TileOrder::<GROUP> { rows: height.min(rows - before), columns };
    let (row, column) = part.position(rest);
    let row = first + before + row;
    (if row < rows { row } else { row - rows }, column)
}

/// Returns how many of these clusters' tiles this cluster computes.
fn turns(tiles: u32) -> u32 {
    tiles.saturating_sub(cluster()).div_ceil(clusters())
}

/// Returns this cluster's number.
pub(crate) fn cluster() -> u32 {
    thread::block_idx_x() / CLUSTER
}

/// Returns the number of clusters of the grid.
pub(crate) fn clusters() -> u32 {
    thread::grid_dim_x() / CLUSTER
}

#[cfg(test)]
mod tests;
