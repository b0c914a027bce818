//! Clusters: blocks that run at the same time and reach each other's shared memory.
//!
//! A kernel declares the number of blocks in its cluster, `#[kernel(cluster = 2)]`, or each launch
//! gives it (`Launch::cluster`). The grid is a multiple of it in x; consecutive blocks form a
//! cluster. Needs sm_90.
//!
//! # Example
//!
//! ```
//! use cuda_std::mbarrier::{self, MBarrier};
//! use cuda_std::{cluster, prelude::*, tma};
//! use devcomm_types::TensorMap;
//! /// Loads a tile for two blocks, each of which loads half of it, 64 rows, for both.
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
//!
//! Sums of the blocks of a cluster, added by the first:
//!
//! ```
//! use cuda_std::{cluster, prelude::*};
//! /// Returns the sum of `mine` over the blocks of the cluster, in each thread of its first block.
//! ///
//! /// # Safety
//! ///
//! /// All threads of a cluster of at most 8 blocks of 128 threads call this.
//! unsafe fn sum(mut mine: [f32; 4]) -> [f32; 4] {
//!     let sums = shared_array![[f32; 4]; 8 * 128];
//!     let slot = |block: u32| sums.wrapping_add((block * 128 + thread::thread_idx_x()) as usize);
//!     // SAFETY: the caller's contract. Each thread has a slot of its own in the first block.
//!     unsafe {
//!         cluster::sync();
//!         cluster::store(slot(cluster::rank()), 0, mine);
//!         cluster::sync();
//!         if cluster::rank() == 0 {
//!             for block in 1..cluster::size() {
//!                 let sent = mem::load(slot(block));
//!                 mine = [0, 1, 2, 3].map(|i| mine[i] + sent[i]);
//!             }
//!         }
//!     }
//!     mine
//! }
//! ```

use crate::arch;

/// Returns the block's rank in its cluster. PTX: `%cluster_ctarank`.
#[must_use]
pub fn rank() -> u32 {
    arch::cluster_rank()
}

/// Returns the number of blocks of the cluster; 1 in a launch without clusters. PTX:
/// `%cluster_nctarank`.
#[must_use]
pub fn size() -> u32 {
    arch::cluster_size()
}

/// Stores to the address that corresponds to `to` in the shared memory of block `block` of the
/// cluster. PTX: `mapa.shared::cluster`, `st.shared::cluster.v4.f32`.
///
/// # Safety
///
/// `to` lies in shared memory, is aligned to 16 bytes and valid for writes in that block, which has
/// started (a [`sync`] ensures it) and does not end before the store. A [`sync`] lies between this
/// and any other thread's access to these bytes.
#[track_caller]
pub unsafe fn store(to: *mut [f32; 4], block: u32, value: [f32; 4]) {
    // SAFETY: the caller passes an aligned address in the shared memory of a running block.
    unsafe { arch::store_cluster(to, block, value) }
}

/// Executes a barrier of all threads of the cluster, which orders accesses to shared memory. PTX:
/// `barrier.cluster.arrive.release`, `barrier.cluster.wait.acquire`.
///
/// # Safety
///
/// All threads of the cluster call this, those of a warp together.
#[track_caller]
pub unsafe fn sync() {
    arch::cluster_sync();
}

/// Does the same as [`sync`], but orders no accesses to memory. PTX:
/// `barrier.cluster.arrive.relaxed`, `barrier.cluster.wait`.
///
/// # Safety
///
/// The contract is that of [`sync`].
#[track_caller]
pub unsafe fn sync_relaxed() {
    arch::cluster_sync_relaxed();
}
