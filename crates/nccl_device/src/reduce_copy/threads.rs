//! The threads that share the elements of a reduction or copy.

use cuda_std::thread;

use crate::Coop;

/// The threads that a reduction or copy is divided among: those of a [`Coop`], or of the whole
/// grid.
///
/// The grid's threads move interleaved vectors, so that at any time all blocks access nearby
/// memory; between GPUs that is faster than a contiguous range per block.
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
