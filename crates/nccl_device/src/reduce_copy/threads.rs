//! Who shares the elements.

use cuda_std::thread;

use crate::Coop;

/// The threads that a reduction or copy is divided among: those of a [`Coop`], or of the whole
/// grid.
///
/// The grid's threads move one row of vectors after the other, so that the blocks are close
/// together in memory at any time; between GPUs that is faster than a part of its own for each
/// block.
#[derive(Clone, Copy, Debug)]
pub struct Threads {
    pub(super) rank: usize,
    pub(super) count: usize,
}

impl Threads {
    /// The threads of a one-dimensional grid. Every thread of the grid makes the call.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn grid() -> Self {
        let count = (thread::grid_dim_x() * thread::block_dim_x()) as usize;
        Self { rank: thread::index_1d() as usize, count }
    }
}

impl From<Coop> for Threads {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn from(coop: Coop) -> Self {
        Self { rank: coop.thread_rank() as usize, count: coop.size() as usize }
    }
}
