//! The rank that adds each part of a matrix, and the slots of the part's messages.

use crate::prelude::*;
use cuda_std::{bf16, tile::SharedTile};

/// Rows of a part.
pub(crate) const PART_ROWS: u32 = 16;
/// Columns of a part.
pub(crate) const PART_COLUMNS: u32 = SharedTile::<bf16, PART_ROWS>::COLUMNS;
/// Slots of a part.
const PART_SLOTS: u32 = PART_ROWS * PART_COLUMNS / Vec16::<bf16>::LANES as u32;

/// A matrix of `m x n` elements, of which the `N` ranks of a team have parts.
#[derive(Clone, Copy, Debug)]
pub struct PeerMatrix<const N: usize> {
    /// The team.
    pub team: Team,
    /// The number of rows.
    pub m: u32,
    /// The number of columns.
    pub n: u32,
}

impl<const N: usize> PeerMatrix<N> {
    /// Returns the number of ranks.
    pub fn ranks(&self) -> u32 {
        N as u32
    }

    /// Returns this rank's number.
    pub fn rank(&self) -> u32 {
        self.team.rank as u32
    }
}

/// The owner of a part, and the place of the part there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerPlace {
    /// The rank that adds the ranks' parts.
    pub owner: u32,
    /// The part's first row in that rank's C.
    pub row: u32,
    /// The first slot of the part's messages to that rank.
    pub slot: u32,
}

/// The division of the sums of [`PeerTiles`](crate::PeerTiles) among the ranks.
pub trait Owners: Copy {
    /// Whether every rank adds every part, so that a part is sent to all.
    const ALL: bool = false;

    /// Whether the owners store the sums to every rank's C.
    const BROADCASTS: bool = false;

    /// Returns the place of the part with this first row and column.
    fn place<const N: usize>(matrix: &PeerMatrix<N>, row: u32, column: u32) -> PeerPlace;

    /// Returns the row of the matrix that is the first row of this rank's C.
    fn first_row<const N: usize>(_: &PeerMatrix<N>) -> u32 {
        0
    }

    /// Returns the distance in slots from a part to the part below it in the same tile.
    fn below<const N: usize>(matrix: &PeerMatrix<N>) -> u32;

    /// Returns the number of slots that a launch uses for each sending rank.
    fn used<const N: usize>(matrix: &PeerMatrix<N>) -> u32;
}

/// Returns the number of slots of a row of parts.
fn row_slots(columns: u32) -> u32 {
    columns.div_ceil(PART_COLUMNS) * PART_SLOTS
}

/// Returns the first slot of a part, if the parts of a matrix are numbered row by row.
fn slot_in_rows(row: u32, column: u32, columns: u32) -> u32 {
    (row / PART_ROWS * columns.div_ceil(PART_COLUMNS) + column / PART_COLUMNS) * PART_SLOTS
}

/// Returns the number of slots of a matrix in whole parts, if it fits in 32 bits.
fn matrix_slots(m: usize, n: usize) -> Option<u32> {
    let parts = m.div_ceil(PART_ROWS as usize).checked_mul(n.div_ceil(PART_COLUMNS as usize))?;
    u32::try_from(parts.checked_mul(PART_SLOTS as usize)?).ok()
}

/// Every rank adds every part: an all-reduce in one step.
#[derive(Clone, Copy, Debug)]
pub struct Everyone;

impl Everyone {
    /// Counts the slots of an `m x n` matrix for each sending rank, if the count fits in 32 bits.
    #[must_use]
    pub fn slots(m: usize, n: usize) -> Option<u32> {
        matrix_slots(m, n)
    }
}

impl Owners for Everyone {
    const ALL: bool = true;

    fn place<const N: usize>(matrix: &PeerMatrix<N>, row: u32, column: u32) -> PeerPlace {
        PeerPlace { owner: matrix.rank(), row, slot: slot_in_rows(row, column, matrix.n) }
    }

    fn below<const N: usize>(matrix: &PeerMatrix<N>) -> u32 {
        row_slots(matrix.n)
    }

    fn used<const N: usize>(matrix: &PeerMatrix<N>) -> u32 {
        matrix.m.div_ceil(PART_ROWS) * row_slots(matrix.n)
    }
}

/// Each rank adds the same number of rows, in the order of the ranks, and only it gets their sums:
/// a reduce-scatter. The rows of a matrix are a multiple of 16 times the ranks.
#[derive(Clone, Copy, Debug)]
pub struct RowOwners;

impl RowOwners {
    /// Counts the slots of a rank's `rows x n` sums for each sending rank, if that fits in 32 bits.
    #[must_use]
    pub fn slots(rows: usize, n: usize) -> Option<u32> {
        matrix_slots(rows, n)
    }

    /// Returns the number of rows of each rank.
    fn rows_of_rank<const N: usize>(matrix: &PeerMatrix<N>) -> u32 {
        matrix.m / matrix.ranks()
    }
}

impl Owners for RowOwners {
    fn place<const N: usize>(matrix: &PeerMatrix<N>, row: u32, column: u32) -> PeerPlace {
        let rows = Self::rows_of_rank(matrix);
        // Two ranks need no division, which takes registers.
        let owner = if N == 2 { u32::from(row >= rows) } else { row / rows };
        let row = row - owner * rows;
        PeerPlace { owner, row, slot: slot_in_rows(row, column, matrix.n) }
    }

    fn first_row<const N: usize>(matrix: &PeerMatrix<N>) -> u32 {
        matrix.rank() * Self::rows_of_rank(matrix)
    }

    fn below<const N: usize>(matrix: &PeerMatrix<N>) -> u32 {
        row_slots(matrix.n)
    }

    fn used<const N: usize>(matrix: &PeerMatrix<N>) -> u32 {
        Self::rows_of_rank(matrix).div_ceil(PART_ROWS) * row_slots(matrix.n)
    }
}

/// Each tile of `ROWS x COLUMNS` elements has an owner, which stores the sums to every rank's C.
/// Owners take turns along both directions, so that every rank sends as much as it receives at any
/// time: an all-reduce in two steps. `ROWS` is a multiple of 16, and `COLUMNS` of 64.
#[derive(Clone, Copy, Debug)]
pub struct TileOwners<const ROWS: u32, const COLUMNS: u32>;

/// The number of tiles of a round, consecutive in a row of tiles. Each rank owns the same number of
/// them if the number of ranks is a power of two up to 8.
const ROUND: u32 = 8;

/// Returns the largest number of tiles of a round that a rank owns.
const fn round_tiles(ranks: u32) -> u32 {
    ROUND.div_ceil(ranks)
}

impl<const ROWS: u32, const COLUMNS: u32> TileOwners<ROWS, COLUMNS> {
    /// The number of slots of a tile.
    const SLOTS: u32 = ROWS / PART_ROWS * (COLUMNS / PART_COLUMNS) * PART_SLOTS;

    /// Returns the number of slots of an `m x n` matrix for each of `ranks` sending ranks, which
    /// are at least one, if it fits in 32 bits.
    #[must_use]
    pub fn slots(m: usize, n: usize, ranks: u32) -> Option<u32> {
        let columns = n.div_ceil((ROUND * COLUMNS) as usize);
        let rounds = m.div_ceil(ROWS as usize).checked_mul(columns)?;
        let tiles = rounds.checked_mul(round_tiles(ranks.max(1)) as usize)?;
        u32::try_from(tiles.checked_mul(Self::SLOTS as usize)?).ok()
    }
}

impl<const ROWS: u32, const COLUMNS: u32> Owners for TileOwners<ROWS, COLUMNS> {
    const BROADCASTS: bool = true;

    fn place<const N: usize>(matrix: &PeerMatrix<N>, row: u32, column: u32) -> PeerPlace {
        let (tile_row, tile_column) = (row / ROWS, column / COLUMNS);
        let (round, in_round) = (tile_column / ROUND, tile_column % ROUND);
        let owner = (tile_row + round + in_round) % matrix.ranks();
        let rounds = matrix.n.div_ceil(ROUND * COLUMNS);
        // An owner's tiles in a round are `ranks` apart.
        let tile =
            (tile_row * rounds + round) * round_tiles(matrix.ranks()) + in_round / matrix.ranks();
        let in_tile = slot_in_rows(row % ROWS, column % COLUMNS, COLUMNS);
        PeerPlace { owner, row, slot: tile * Self::SLOTS + in_tile }
    }

    fn below<const N: usize>(_: &PeerMatrix<N>) -> u32 {
        row_slots(COLUMNS)
    }

    fn used<const N: usize>(matrix: &PeerMatrix<N>) -> u32 {
        let rounds = matrix.m.div_ceil(ROWS) * matrix.n.div_ceil(ROUND * COLUMNS);
        rounds * round_tiles(matrix.ranks()) * Self::SLOTS
    }
}

#[cfg(test)]
mod tests;
