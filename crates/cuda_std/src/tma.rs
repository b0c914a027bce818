//! TMA: asynchronous copies of matrix tiles from global to shared memory, started by one thread.
//!
//! A [`TensorMap`] describes the matrix and the shape of a tile. Elements outside the matrix are
//! filled with zeros.
//!
//! # Safety model
//!
//! A copy is `unsafe`: until the barrier's phase has completed, no thread accesses the destination
//! or writes the source. In the simulator a copy completes immediately. Needs sm_90.
//!
//! # Example
//!
//! ```
//! use cuda_std::{mbarrier::MBarrier, tma};
//! use devcomm_types::TensorMap;
//! /// Loads the first tile, 64 rows of 128 bytes.
//! ///
//! /// # Safety
//! ///
//! /// One thread calls this; `to` has 8 KiB, aligned to 1,024, and `full` is a barrier for one
//! /// arrival.
//! unsafe fn first_tile(map: &TensorMap, to: *mut u8, full: MBarrier) {
//!     full.arrive_expect_tx(64 * 128);
//!     // SAFETY: the caller's contract.
//!     unsafe { tma::load_tile(to, map, 0, 0, full) };
//!     full.wait(0);
//! }
//! ```

use devcomm_types::TensorMap;

use crate::arch;
use crate::mbarrier::MBarrier;

/// Starts the copy of the tile whose first element is (`row`, `column`) of the matrix. All bytes of
/// the tile, including zero fill, count for the current phase of `barrier`. PTX:
/// `cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes`.
///
/// # Safety
///
/// `to` lies in shared memory, aligned to 1,024 bytes, and has room for the tile. `map` is a
/// parameter of the kernel, not a copy of one, and its matrix is allocated. Until the phase has
/// completed, no thread accesses the tile or writes the matrix.
#[doc(alias = "cp.async.bulk.tensor")]
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub unsafe fn load_tile(to: *mut u8, map: &TensorMap, row: u32, column: u32, barrier: MBarrier) {
    // SAFETY: the caller's contract.
    unsafe { arch::load_tile(to, map, row, column, barrier.as_ptr()) }
}

/// Prefetches the tensor map, for the first copy. PTX: `prefetch.tensormap`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn prefetch_map(map: &TensorMap) {
    arch::prefetch_map(map);
}
