//! The division of a matrix product among the blocks of a grid.

use super::Scheduler;

/// The tiles of a product, divided among the blocks of a grid of clusters, which are all resident:
/// first *whole* tiles, each computed by one block; then the others, each *split* over a cluster,
/// whose blocks sum a share of the terms each. So the last round, in which there is not a tile for
/// each block, takes less time than a tile.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// The number of tiles.
    pub tiles: u32,
    /// The number of whole tiles.
    pub whole: u32,
    /// Steps of the sum that a tile needs.
    pub steps: u32,
    /// The block's cluster.
    pub cluster: u32,
    /// The number of clusters.
    pub clusters: u32,
    /// The block's place among the `splits` blocks of a split tile.
    pub rank: u32,
    /// The blocks over which a tile is split, a power of two.
    pub splits: u32,
}

/// A tile, and the steps of it that a block computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// The tile's number.
    pub tile: u32,
    /// The first step.
    pub first: u32,
    /// The step after the last one.
    pub end: u32,
    /// Whether the other blocks of the cluster compute the other steps.
    pub split: bool,
}

impl Schedule {
    /// Returns the number of whole tiles with which the blocks end soonest.
    #[must_use]
    pub fn whole_tiles(tiles: u32, clusters: u32, splits: u32) -> u32 {
        let rest = tiles % (clusters * splits);
        // Each round of split tiles takes the time of `1 / splits` of a tile.
        if rest.div_ceil(clusters) < splits { tiles - rest } else { tiles }
    }

    /// Returns whether the block's cluster splits a tile.
    #[must_use]
    pub fn splits_any(self) -> bool {
        self.whole + self.cluster < self.tiles
    }

    /// Returns the work of this tile if it is whole, or else of the first tile that the cluster
    /// splits.
    fn work(self, tile: u32) -> Work {
        if tile < self.whole {
            return Work { tile, first: 0, end: self.steps, split: false };
        }
        let Self { rank, splits, steps, .. } = self;
        // Divides by `splits`, a power of two.
        let first = |rank| (rank * steps) >> splits.trailing_zeros();
        let (first, end) = (first(rank), first(rank + 1));
        Work { tile: self.whole + self.cluster, first, end, split: true }
    }

    fn if_exists(self, work: Work) -> Option<Work> {
        (work.tile < self.tiles).then_some(work)
    }
}

impl Scheduler for Schedule {
    type Work = Work;

    fn first(&self) -> Option<Work> {
        self.if_exists(self.work(self.cluster * self.splits + self.rank))
    }

    fn next(&self, work: Work) -> Option<Work> {
        self.if_exists(match work.split {
            true => Work { tile: work.tile + self.clusters, ..work },
            false => self.work(work.tile + self.clusters * self.splits),
        })
    }

    fn steps(&self, work: Work) -> (u32, u32) {
        (work.first, work.end)
    }
}

#[cfg(test)]
mod tests;
