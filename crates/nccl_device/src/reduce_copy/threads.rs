//! The threads that share the elements of a reduction or copy.

use crate::prelude::*;

/// The threads that a reduction or copy is divided among: those of a [`Coop`], or of the whole
/// grid.
///
/// The grid's threads move interleaved vectors, so that at any time all blocks access nearby
/// memory; between GPUs that is faster than a contiguous range per block.
#[derive(Clone, Copy)]
pub struct Threads {
    pub(super) rank: usize,
    pub(super) count: usize,
    /// The coop, for the simulator's checks.
    #[cfg(not(target_arch = "nvptx64"))]
    coop: Option<Coop>,
}

impl Threads {
    /// Returns the threads of a one-dimensional grid. Every thread of the grid makes the call.
    pub fn grid() -> Self {
        let count = (thread::grid_dim_x() * thread::block_dim_x()) as usize;
        Self {
            rank: thread::index_1d() as usize,
            count,
            #[cfg(not(target_arch = "nvptx64"))]
            coop: None,
        }
    }

    /// Tells the simulator that these threads make this call.
    #[track_caller]
    pub(super) fn call(self, call: CoopCall) -> Self {
        #[cfg(not(target_arch = "nvptx64"))]
        if let Some(coop) = &self.coop {
            (crate::raw::host::checks().call_without_wait)(&coop.as_raw(), call);
        }
        let _ = call;
        self
    }
}

impl core::fmt::Debug for Threads {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "thread {} of {}", self.rank, self.count)
    }
}

impl From<Coop> for Threads {
    fn from(coop: Coop) -> Self {
        Self {
            rank: coop.thread_rank() as usize,
            count: coop.size() as usize,
            #[cfg(not(target_arch = "nvptx64"))]
            coop: Some(coop),
        }
    }
}
