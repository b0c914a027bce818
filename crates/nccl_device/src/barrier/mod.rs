//! Barriers between ranks, over load and store, the network, or both, or of neighbours alone; and a
//! barrier of the blocks of a grid.
//!
//! Those between ranks are guards with the same methods. The constructor opens a session for a
//! coop; `arrive` signals the peers and gives an [`Arrival`], whose `wait` waits for them; `sync`
//! is both, `sync_timeout` both with a timeout; dropping the guard closes the session.

mod arrival;
mod gin;
mod grid;
mod hybrid;
mod lsa;
mod neighbors;

use cuda_std::thread;

pub use arrival::Arrival;
pub use gin::{FenceLevel, GinBarrier, GinBarriers};
pub use grid::GridBarrier;
pub use hybrid::HybridBarrier;
pub use lsa::{LsaBarrier, LsaBarriers};
pub use neighbors::NeighborBarrier;

/// Which barrier of a set a coop uses. One index has one user at a time, also across kernels in
/// flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarrierIndex(u32);

impl BarrierIndex {
    /// The block's own: `blockIdx.x`. A launch is refused when the grid has more blocks than there
    /// are barriers.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn this_block() -> Self {
        Self(thread::block_idx_x())
    }

    /// Barrier `index`. Opening the barrier traps if the set does not have it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// The number.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn get(self) -> u32 {
        self.0
    }
}
