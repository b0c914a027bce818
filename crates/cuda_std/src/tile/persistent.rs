//! The tiles that a persistent block computes.

use crate::thread;

/// The tiles that a block computes, one after the other.
pub trait Scheduler: Copy {
    /// A tile, as the scheduler numbers it.
    type Work: Copy;

    /// Returns the block's first tile.
    fn first(&self) -> Option<Self::Work>;

    /// Returns the block's tile after `work`.
    fn next(&self, work: Self::Work) -> Option<Self::Work>;

    /// Returns the first step of a tile, and where its steps end: each adds the products of one
    /// stage.
    fn steps(&self, work: Self::Work) -> (u32, u32);
}

/// A scheduler of equal tiles: each cluster of `CLUSTER` blocks computes the tile of its own number
/// and every further one at the distance of the number of clusters.
#[derive(Clone, Copy, Debug)]
pub struct Persistent<const CLUSTER: u32> {
    /// The number of tiles.
    pub tiles: u32,
    /// The steps of each tile.
    pub steps: u32,
}

/// A tile of [`Persistent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The tile's number.
    pub number: u32,
    /// The number of tiles that the cluster computes before this tile.
    pub before: u32,
}

impl<const CLUSTER: u32> Persistent<CLUSTER> {
    /// Returns how many tiles this block computes.
    #[must_use]
    pub fn turns(&self) -> u32 {
        let (cluster, clusters) = cluster_of_block::<CLUSTER>();
        self.tiles.saturating_sub(cluster).div_ceil(clusters)
    }

    /// Returns the tile that this block computes after `before` others.
    #[must_use]
    pub fn turn(&self, before: u32) -> Turn {
        let (cluster, clusters) = cluster_of_block::<CLUSTER>();
        Turn { number: cluster + before * clusters, before }
    }

    fn if_exists(&self, turn: Turn) -> Option<Turn> {
        (turn.number < self.tiles).then_some(turn)
    }
}

/// Returns the number of this block's cluster, and the number of clusters.
fn cluster_of_block<const CLUSTER: u32>() -> (u32, u32) {
    (thread::block_idx_x() / CLUSTER, thread::grid_dim_x() / CLUSTER)
}

impl<const CLUSTER: u32> Scheduler for Persistent<CLUSTER> {
    type Work = Turn;

    fn first(&self) -> Option<Turn> {
        self.if_exists(Turn { number: cluster_of_block::<CLUSTER>().0, before: 0 })
    }

    fn next(&self, Turn { number, before }: Turn) -> Option<Turn> {
        let (_, clusters) = cluster_of_block::<CLUSTER>();
        self.if_exists(Turn { number: number + clusters, before: before + 1 })
    }

    fn steps(&self, _: Turn) -> (u32, u32) {
        (0, self.steps)
    }
}
