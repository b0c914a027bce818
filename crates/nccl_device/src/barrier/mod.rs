//! Barriers between all ranks of a team (by load and store, over the network, or both), between
//! neighbours, and between the blocks of a grid.
//!
//! Barriers between ranks are guards with the same methods. The constructor opens a session for a
//! coop; `arrive` signals the peers and returns an [`Arrival`], whose `wait` waits for them;
//! `sync` does both, `sync_timeout` with a timeout. Dropping the guard closes the session.

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

/// The index of the barrier that a coop uses in a set of barriers. Only one coop of a rank may use
/// an index at a time, even if several kernels run concurrently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarrierIndex(u32);

impl BarrierIndex {
    /// Returns `blockIdx.x`: one barrier per block of a one-dimensional grid. A launch is refused
    /// when the grid has more blocks than there are LSA barriers, for a kernel that opens them.
    pub fn this_block() -> Self {
        Self(thread::block_idx_x())
    }

    /// Returns barrier `index`. Opening an LSA barrier traps if the set has no such index; of a GIN
    /// barrier, see [`GinBarriers::barrier`].
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// Returns the index as a number.
    pub const fn get(self) -> u32 {
        self.0
    }
}
