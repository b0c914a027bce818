//! TMA: copies of tiles of matrices from global to shared memory, started by one thread, without
//! registers.
//!
//! [`TensorMap`] says where the matrix is and what a tile is. What lies outside of the matrix
//! arrives as zeros.
//!
//! # Safety model
//!
//! A copy is `unsafe`: until the barrier's phase has ended nobody touches the destination or writes
//! the source. In the simulator a copy happens at once. Needs sm_90.
//!
//! # Example
//!
//! ```
//! use cuda_std::{mbarrier::MBarrier, tma};
//! use devcomm_types::TensorMap;
//! /// Loads the first tile, of 64 rows.
//! ///
//! /// # Safety
//! ///
//! /// One thread calls it; `to` has the 8 KiB, aligned to 1,024, and `full` is a barrier for one
//! /// arrival.
//! unsafe fn first_tile(map: &TensorMap, to: *mut u8, full: MBarrier) {
//!     full.arrive_expect_tx(64 * 128);
//!     // SAFETY: the caller's.
//!     unsafe { tma::load_tile(to, map, 0, 0, full) };
//!     full.wait(0);
//! }
//! ```

use devcomm_types::TensorMap;

use crate::arch;
use crate::mbarrier::MBarrier;

/// Starts the copy of the tile whose first element is (`row`, `column`) of the matrix. All bytes of
/// the tile, the zeros too, count for the current phase of `barrier`. PTX:
/// `cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes`.
///
/// # Safety
///
/// `to` lies in shared memory, aligned to 1,024 bytes, and has room for the tile. `map` is where
/// the launch put it, a parameter of the kernel, and its matrix is there. Until the phase has ended
/// nobody reads or writes the tile, or writes the matrix.
#[doc(alias = "cp.async.bulk.tensor")]
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub unsafe fn load_tile(to: *mut u8, map: &TensorMap, row: u32, column: u32, barrier: MBarrier) {
    // SAFETY: the caller's.
    unsafe { arch::load_tile(to, map, row, column, barrier.as_ptr()) }
}

/// Brings the map itself near, before the first copy. PTX: `prefetch.tensormap`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn prefetch_map(map: &TensorMap) {
    arch::prefetch_map(map);
}
