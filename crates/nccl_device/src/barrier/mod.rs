//! Barriers between ranks: over load and store, over the network, and over both.

mod gin;
mod hybrid;
mod lsa;

use cuda_std::thread;

pub use gin::{FenceLevel, GinBarrier, GinBarriers};
pub use hybrid::HybridBarrier;
pub use lsa::{Arrival, LsaBarrier, LsaBarriers};

/// Which barrier of a set a coop uses. One index has one user at a time, also across kernels in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarrierIndex(u32);

impl BarrierIndex {
    /// The block's own: `blockIdx.x`. A launch is refused when the grid has more blocks than there are barriers.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn this_block() -> Self {
        Self(thread::block_idx_x())
    }

    /// Barrier `index`. Opening a session traps when the set has no such barrier.
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
