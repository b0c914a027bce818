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
mod tests {
    use super::*;

    #[test]
    fn every_step_of_every_tile_is_computed_once() {
        for (tiles, steps, clusters, splits) in
            [(1, 1, 1, 1), (64, 64, 66, 2), (192, 56, 66, 2), (224, 128, 30, 4), (7, 3, 2, 4)]
        {
            let whole = Schedule::whole_tiles(tiles, clusters, splits);
            let mut counts = vec![0; (tiles * steps) as usize];
            for block in 0..clusters * splits {
                let (cluster, rank) = (block / splits, block % splits);
                let schedule = Schedule { tiles, whole, steps, cluster, clusters, rank, splits };
                let mut work = schedule.first();
                while let Some(now) = work {
                    for step in now.first..now.end {
                        counts[(now.tile * steps + step) as usize] += 1;
                    }
                    assert!(!now.split || schedule.splits_any());
                    work = schedule.next(now);
                }
            }
            assert!(counts.iter().all(|&count| count == 1), "{tiles} {steps} {clusters} {splits}");
        }
    }

    #[test]
    fn only_a_last_round_that_is_not_full_is_split() {
        assert_eq!(Schedule::whole_tiles(192, 66, 2), 132);
        assert_eq!(Schedule::whole_tiles(128, 66, 2), 128);
        assert_eq!(Schedule::whole_tiles(64, 66, 2), 0);
        assert_eq!(Schedule::whole_tiles(200, 30, 4), 120);
        assert_eq!(Schedule::whole_tiles(448, 132, 1), 448);
    }
}
