//! Clusters: blocks that run at the same time and reach each other's shared memory.
//!
//! A kernel declares the number of blocks in its cluster: `#[kernel(cluster = 2)]`. Its grid is a
//! multiple of it; consecutive blocks form a cluster. Needs sm_90.
//!
//! # Example
//!
//! ```
//! use cuda_std::mbarrier::{self, MBarrier};
//! use cuda_std::{cluster, prelude::*, tma};
//! use devcomm_types::TensorMap;
//! /// Each of two blocks loads half of a tile, 64 rows, for both.
//! ///
//! /// # Safety
//! ///
//! /// All threads of a cluster of two call this; `tile` has 16 KiB of shared memory, aligned to
//! /// 1,024, and `full` is a new barrier, each at the same place in both blocks.
//! unsafe fn load_for_both(map: &TensorMap, tile: *mut u8, full: MBarrier) {
//!     let (first, rank) = (thread::thread_idx_x() == 0, cluster::rank());
//!     // SAFETY: the caller's contract. Both barriers are initialized before either block loads.
//!     unsafe {
//!         if first {
//!             full.init(1);
//!             mbarrier::fence_init();
//!             full.arrive_expect_tx(128 * 128);
//!         }
//!         cluster::sync();
//!         if first {
//!             let half = tile.add(64 * 128 * rank as usize);
//!             tma::load_tile_multicast(half, map, 64 * rank, 0, full, 0b11);
//!         }
//!     }
//!     full.wait(0);
//! }
//! ```

use crate::arch;

/// The block's rank in its cluster. PTX: `%cluster_ctarank`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[must_use]
pub fn rank() -> u32 {
    arch::cluster_rank()
}

/// A barrier of all threads of the cluster, which orders accesses to shared memory. PTX:
/// `barrier.cluster.arrive.release`, `barrier.cluster.wait.acquire`.
///
/// # Safety
///
/// All threads of the cluster call this, those of a warp together.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub unsafe fn sync() {
    arch::cluster_sync();
}
