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

/// The row and the column of a tile, and its group of rows.
#[derive(Clone, Copy)]
pub(crate) struct Position {
    /// The row among those of its group, in tiles.
    pub(super) row: u32,
    /// The column, in tiles.
    pub(super) column: u32,
    pub(super) group: Group,
}

/// A group of rows of A and C.
#[derive(Clone, Copy)]
pub(crate) struct Group {
    /// The first row.
    pub(super) first: u32,
    /// The row after the last one.
    pub(super) end: u32,
    /// The first row of the group's B.
    pub(super) b_row: u32,
}

impl Group {
    pub(super) const ALL: Self = Self { first: 0, end: u32::MAX, b_row: 0 };
}

impl Order {
    /// Returns the order of the tiles of all rows.
    pub(crate) fn whole(rows: u32, columns: u32) -> Self {
        Self { tiles: TileOrder { rows, columns }, division: Division::None }
    }

    /// Returns the order of [`Division::Turns`]. `rows` is a multiple of `parts`.
    pub(crate) fn turns(rows: u32, columns: u32, first: u32, parts: u32) -> Self {
        let tiles = TileOrder { rows: rows / parts, columns };
        Self { tiles, division: Division::Turns { first, parts } }
    }

    /// Returns the order of [`Division::Parts`].
    pub(crate) fn parts(rows: u32, columns: u32, first: u32, height: u32) -> Self {
        Self { tiles: TileOrder { rows, columns }, division: Division::Parts { first, height } }
    }

    /// Returns the order of the tiles of groups of rows.
    pub(super) fn groups(groups: GroupTiles<GROUP>) -> Self {
        let GroupTiles { rows, columns, .. } = groups;
        Self { tiles: TileOrder { rows, columns }, division: Division::Groups(groups) }
    }

    /// Returns how many tiles of a part this cluster computes.
    fn in_part(self) -> u32 {
        self.tiles.count().saturating_sub(cluster()).div_ceil(clusters())
    }

    /// Returns the end of the numbers of this cluster's tiles. The first number is the cluster's,
    /// and each of the others is more than the one before it by the number of clusters.
    pub(crate) fn count(self) -> u32 {
        match self.division {
            Division::Turns { parts, .. } => cluster() + parts * self.in_part() * clusters(),
            _ => self.tiles.count(),
        }
    }

    /// Returns the position of one of this cluster's tiles, in tiles of clusters.
    pub(super) fn position(self, number: u32) -> Position {
        let (row, column) = match self.division {
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
        Position { row, column, group: Group::ALL }
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
