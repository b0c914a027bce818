//! Which rank adds the ranks' parts of a tile, and where its messages lie.

use nccl_device::Team;

use super::messages::{COLUMNS, SLOTS};
use super::partial::SCALED;
use crate::files::gemm::gemm_wgmma::{CLUSTER, STORE_M, TILE_M, TILE_N};
use crate::files::gemm::order::{Order, cluster};

/// Rows of a cluster's tile.
pub(super) const CLUSTER_M: u32 = CLUSTER * TILE_M;
/// Slots of a cluster's tile.
const CLUSTER_SLOTS: u32 = CLUSTER_M / STORE_M * (TILE_N / COLUMNS) * SLOTS;

/// A product of `m x n` elements, and the `N` ranks.
#[derive(Clone, Copy)]
pub(super) struct Problem<const N: usize> {
    pub(super) team: Team,
    pub(super) m: u32,
    pub(super) n: u32,
}

impl<const N: usize> Problem<N> {
    pub(super) fn ranks(&self) -> u32 {
        N as u32
    }

    pub(super) fn rank(&self) -> u32 {
        self.team.rank as u32
    }
}

/// Who has a part of a tile that a warp stores.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// The rank that adds to it.
    pub(super) owner: u32,
    /// Its first row in that rank's C.
    pub(super) row: u32,
    /// The first slot of its messages to that rank.
    pub(super) slot: u32,
}

/// How the ranks share the sums.
pub(super) trait Owners: Copy {
    /// The order of the tiles of clusters, of this many rows and columns.
    fn order<const N: usize>(problem: &Problem<N>, rows: u32, columns: u32) -> Order;

    /// The place of 16 rows and 64 columns of this block's tiles.
    fn place<const N: usize>(problem: &Problem<N>, row: u32, column: u32) -> Place;

    /// How many ranks after this one the receiver of a message is, if this rank sends it. Of
    /// several ranks it sends its own part to itself.
    fn receiver<const N: usize>(problem: &Problem<N>, place: Place) -> Option<usize> {
        if N == 2 {
            return (place.owner != problem.rank()).then_some(1);
        }
        let after = place.owner + problem.ranks() - problem.rank();
        Some(if after < problem.ranks() { after } else { after - problem.ranks() } as usize)
    }

    /// The row of the product that is the first one of this rank's C.
    fn first_row<const N: usize>(_: &Problem<N>) -> u32 {
        0
    }

    /// Slots from those of a part to those of the part below, of the same tile.
    fn below<const N: usize>(problem: &Problem<N>) -> u32;

    /// The slots that a launch uses.
    fn used<const N: usize>(problem: &Problem<N>) -> u32;

    /// Whether ranks send the sums to each other.
    const RETURNS: bool = false;
}

/// The slots of a row of parts, whole ones.
const fn grid_row(columns: u32) -> u32 {
    columns.div_ceil(COLUMNS) * SLOTS
}

/// The slots of a grid of such rows.
const fn grid(rows: u32, columns: u32) -> u32 {
    rows.div_ceil(STORE_M) * grid_row(columns)
}

/// The slot of a part in such a grid.
fn slot_in_grid(row: u32, column: u32, columns: u32) -> u32 {
    (row / STORE_M * columns.div_ceil(COLUMNS) + column / COLUMNS) * SLOTS
}

/// Each of two ranks adds to every tile.
#[derive(Clone, Copy)]
pub(super) struct All;

impl Owners for All {
    fn order<const N: usize>(_: &Problem<N>, rows: u32, columns: u32) -> Order {
        Order::whole(rows, columns)
    }

    fn place<const N: usize>(problem: &Problem<N>, row: u32, column: u32) -> Place {
        Place { owner: problem.rank(), row, slot: slot_in_grid(row, column, problem.n) }
    }

    fn receiver<const N: usize>(_: &Problem<N>, _: Place) -> Option<usize> {
        Some(1)
    }

    fn below<const N: usize>(problem: &Problem<N>) -> u32 {
        grid_row(problem.n)
    }

    fn used<const N: usize>(problem: &Problem<N>) -> u32 {
        grid(problem.m, problem.n)
    }
}

/// The same, of parts of 16 rows and 256 columns as 8-bit floats.
#[derive(Clone, Copy)]
pub(super) struct AllQuantised;

/// Slots of a part before those of its scales, and all.
pub(super) const PART_SCALES: u32 = STORE_M * TILE_N / 16;
const PART_SLOTS: u32 = PART_SCALES + TILE_N / SCALED;

/// The first slot of a part with this row and column.
pub(super) fn quantised_part(row: u32, column: u32, columns: u32) -> u32 {
    (row / STORE_M * columns.div_ceil(TILE_N) + column / TILE_N) * PART_SLOTS
}

impl Owners for AllQuantised {
    fn order<const N: usize>(_: &Problem<N>, rows: u32, columns: u32) -> Order {
        Order::whole(rows, columns)
    }

    fn place<const N: usize>(problem: &Problem<N>, row: u32, column: u32) -> Place {
        Place { owner: problem.rank(), row, slot: quantised_part(row, column, problem.n) }
    }

    fn below<const N: usize>(problem: &Problem<N>) -> u32 {
        problem.n.div_ceil(TILE_N) * PART_SLOTS
    }

    fn used<const N: usize>(problem: &Problem<N>) -> u32 {
        problem.m.div_ceil(STORE_M) * problem.n.div_ceil(TILE_N) * PART_SLOTS
    }
}

/// Each rank has as many rows. A cluster computes the same tile of each rank's rows: of two ranks
/// its own last; of several ones each cluster begins elsewhere, so that all receive at any time.
#[derive(Clone, Copy)]
pub(super) struct OfRows;

impl OfRows {
    fn each<const N: usize>(problem: &Problem<N>) -> u32 {
        problem.m / problem.ranks()
    }
}

impl Owners for OfRows {
    fn order<const N: usize>(problem: &Problem<N>, rows: u32, columns: u32) -> Order {
        let first = problem.rank() + 1 + if N == 2 { 0 } else { cluster() };
        Order::turns(rows, columns, first, problem.ranks())
    }

    fn place<const N: usize>(problem: &Problem<N>, row: u32, column: u32) -> Place {
        let each = Self::each(problem);
        // Of two ranks without a division, which takes registers.
        let owner = if N == 2 { u32::from(row >= each) } else { row / each };
        let row = row - owner * each;
        Place { owner, row, slot: slot_in_grid(row, column, problem.n) }
    }

    fn first_row<const N: usize>(problem: &Problem<N>) -> u32 {
        problem.rank() * Self::each(problem)
    }

    fn below<const N: usize>(problem: &Problem<N>) -> u32 {
        grid_row(problem.n)
    }

    fn used<const N: usize>(problem: &Problem<N>) -> u32 {
        grid(Self::each(problem), problem.n)
    }
}

/// Ranks take turns with the tiles: as many are each rank's of those that clusters compute at the
/// same time, and of a cluster's successive ones. So all send as much as they receive, at any time.
#[derive(Clone, Copy)]
pub(super) struct OfTiles;

/// Columns of tiles in which a row has as many tiles of each rank, of a power of two.
const TURN: u32 = 8;

impl Owners for OfTiles {
    fn order<const N: usize>(_: &Problem<N>, rows: u32, columns: u32) -> Order {
        Order::whole(rows, columns)
    }

    fn place<const N: usize>(problem: &Problem<N>, row: u32, column: u32) -> Place {
        let (tile_row, tile_column) = (row / CLUSTER_M, column / TILE_N);
        let (turn, in_turn) = (tile_column / TURN, tile_column % TURN);
        let owner = (tile_row + turn + in_turn) % problem.ranks();
        // Of a turn an owner's tiles are so many apart.
        let turns = problem.n.div_ceil(TURN * TILE_N);
        let tile = (tile_row * turns + turn) * of_turn(problem.ranks()) + in_turn / problem.ranks();
        let in_tile = slot_in_grid(row % CLUSTER_M, column % TILE_N, TILE_N);
        Place { owner, row, slot: tile * CLUSTER_SLOTS + in_tile }
    }

    fn below<const N: usize>(_: &Problem<N>) -> u32 {
        grid_row(TILE_N)
    }

    fn used<const N: usize>(problem: &Problem<N>) -> u32 {
        let turns = problem.m.div_ceil(CLUSTER_M) * problem.n.div_ceil(TURN * TILE_N);
        turns * of_turn(problem.ranks()) * CLUSTER_SLOTS
    }

    const RETURNS: bool = true;
}

/// The most tiles of a turn that a rank has.
const fn of_turn(ranks: u32) -> u32 {
    TURN.div_ceil(ranks)
}

/// The slots that a rank has for each other one's messages of a product of `m x n` elements, whole
/// tiles, if every rank adds to all, or each to its rows. `None` if 32 bits do not count them.
#[must_use]
pub(super) fn slots(m: usize, n: usize) -> Option<u32> {
    let parts = m.div_ceil(STORE_M as usize).checked_mul(n.div_ceil(COLUMNS as usize))?;
    u32::try_from(parts.checked_mul(SLOTS as usize)?).ok()
}

/// As [`slots`], of two ranks that send 8-bit floats.
#[must_use]
pub(super) fn quantised_slots(m: usize, n: usize) -> Option<u32> {
    let parts = m.div_ceil(STORE_M as usize).checked_mul(n.div_ceil(TILE_N as usize))?;
    u32::try_from(parts.checked_mul(PART_SLOTS as usize)?).ok()
}

/// As [`slots`], if so many ranks take turns with the tiles.
#[must_use]
pub(super) fn tile_slots(m: usize, n: usize, ranks: u32) -> Option<u32> {
    let columns = n.div_ceil((TURN * TILE_N) as usize);
    let turns = m.div_ceil(CLUSTER_M as usize).checked_mul(columns)?;
    let tiles = turns.checked_mul(of_turn(ranks.max(1)) as usize)?;
    u32::try_from(tiles.checked_mul(CLUSTER_SLOTS as usize)?).ok()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn slots_are_counted_for_whole_tiles() {
        assert_eq!(slots(1, 8), Some(128));
        assert_eq!(slots(256, 256), Some(CLUSTER_SLOTS));
        assert_eq!(slots(usize::MAX, 1 << 20), None);
        // Two tiles of 128 vectors and four of scales.
        assert_eq!(quantised_slots(1, 8), Some(260));
        assert_eq!(quantised_slots(17, 257), Some(4 * 260));
        assert_eq!(quantised_part(16, 256, 257), 3 * 260);
        assert_eq!(quantised_slots(usize::MAX, 1 << 20), None);
        assert_eq!(tile_slots(1, 1, 4), Some(2 * CLUSTER_SLOTS));
        assert_eq!(tile_slots(257, 2049, 8), Some(4 * CLUSTER_SLOTS));
        assert_eq!(tile_slots(1 << 20, 1 << 20, 4), None);
    }

    #[test]
    fn every_part_of_an_owners_tiles_has_slots_of_its_own() {
        fn check<const N: usize>(ranks: i32) {
            let (m, n) = (3 * CLUSTER_M, 11 * TILE_N);
            let team = Team { n_ranks: ranks, rank: 0, stride: 1 };
            let problem = Problem::<N> { team, m, n };
            let (mut places, mut of_ranks) = (HashSet::new(), vec![0; ranks as usize]);
            for row in (0..m).step_by(STORE_M as usize) {
                for column in (0..n).step_by(COLUMNS as usize) {
                    let Place { owner, slot, .. } = OfTiles::place(&problem, row, column);
                    assert!(slot + SLOTS <= OfTiles::used(&problem) && slot.is_multiple_of(SLOTS));
                    assert!(places.insert((owner, slot)), "{ranks}: ({row}, {column})");
                    of_ranks[owner as usize] += 1;
                }
            }
            assert_eq!(
                tile_slots(m as usize, n as usize, ranks as u32),
                Some(OfTiles::used(&problem))
            );
            let (least, most) = (of_ranks.iter().min(), of_ranks.iter().max());
            assert!(2 * least.unwrap() >= *most.unwrap(), "{of_ranks:?}");
        }
        check::<4>(4);
        check::<8>(8);
    }

    #[test]
    fn parts_of_a_tile_are_so_many_slots_below_each_other() {
        fn check<D: Owners, const N: usize>() {
            let (m, n) = (N as u32 * CLUSTER_M, 3 * TILE_N + 8);
            let team = Team { n_ranks: N as i32, rank: 1, stride: 1 };
            let problem = Problem::<N> { team, m, n };
            for tile in (0..m).step_by(TILE_M as usize) {
                for column in (0..n).step_by(COLUMNS as usize) {
                    let first = D::place(&problem, tile, column);
                    for row in (0..TILE_M).step_by(STORE_M as usize) {
                        let Place { owner, slot, .. } = D::place(&problem, tile + row, column);
                        let below = row / STORE_M * D::below(&problem);
                        assert_eq!((owner, slot), (first.owner, first.slot + below));
                    }
                }
            }
        }
        check::<All, 2>();
        check::<AllQuantised, 2>();
        check::<OfRows, 2>();
        check::<OfRows, 4>();
        check::<OfTiles, 4>();
        check::<OfTiles, 8>();
    }
}
