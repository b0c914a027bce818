//! TMA: asynchronous copies of matrix tiles between global and shared memory, started by one
//! thread.
//!
//! A [`TensorMap`] describes the matrix and the shape of a tile. Elements outside the matrix are
//! filled with zeros.
//!
//! # Safety model
//!
//! A copy is `unsafe`: until the barrier's phase has completed, no thread accesses the destination
//! or writes the source. The simulator reports such an access as a race. Needs sm_90.
//!
//! # Example
//!
//! ```
//! use cuda_std::mbarrier::MBarrier;
//! use cuda_std::tma::{self, TensorMap};
//!
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

pub use devcomm_types::{GridConstant, TensorMap};

use crate::arch;
use crate::mbarrier::MBarrier;

/// Starts the copy of the tile whose first element is (`row`, `column`) of the matrix. All bytes of
/// the tile, including zero fill, count for the current phase of `barrier`. A row or column before
/// the first one is `-1i32 as u32` and so on. The simulator refuses a column that is not a multiple
/// of 16 bytes, here and in stores. PTX:
/// `cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes`.
///
/// # Safety
///
/// `to` lies in shared memory, aligned to 1,024 bytes, and has room for the tile. `map` is a
/// parameter of the kernel, not a copy of one, and its matrix is allocated. Until the phase has
/// completed, no thread accesses the tile or writes the matrix.
#[doc(alias = "cp.async.bulk.tensor")]
#[track_caller]
pub unsafe fn load_tile(to: *mut u8, map: &TensorMap, row: u32, column: u32, barrier: MBarrier) {
    // SAFETY: the caller keeps room for the tile in shared memory until the barrier's phase ends.
    unsafe { arch::load_tile(arch::shared_address(to), map, row, column, barrier.address()) }
}

/// Does the same as [`load_tile`], into the same place of the shared memory of each block of the
/// cluster whose bit is set in `blocks`; the bytes count for the barrier at this place in each.
/// PTX: the same with `.multicast::cluster`.
///
/// # Safety
///
/// The contract is that of [`load_tile`], for each of those blocks.
#[track_caller]
pub unsafe fn load_tile_multicast(
    to: *mut u8,
    map: &TensorMap,
    row: u32,
    column: u32,
    barrier: MBarrier,
    blocks: u16,
) {
    // SAFETY: the caller keeps room for the tile in shared memory until the barrier's phase ends.
    unsafe {
        arch::load_tile_multicast(
            arch::shared_address(to),
            map,
            row,
            column,
            barrier.address(),
            blocks,
        )
    }
}

/// Starts the copy of a tile from shared memory to (`row`, `column`) of the matrix; what lies
/// outside the matrix is not copied. PTX: `cp.async.bulk.tensor.2d.global.shared::cta.bulk_group`.
///
/// # Safety
///
/// `from` lies in shared memory, aligned to 1,024 bytes; it is written before a
/// [`fence_async_shared`] of the writing threads and a barrier with this thread. Until a wait of
/// this thread for the group, no thread writes the tile or accesses that part of the matrix. `map`
/// is as in [`load_tile`].
#[doc(alias = "cp.async.bulk.tensor")]
#[track_caller]
pub unsafe fn store_tile(map: &TensorMap, row: u32, column: u32, from: *const u8) {
    // SAFETY: the caller keeps the tile in shared memory until the store has read it.
    unsafe { arch::store_tile(map, row, column, arch::shared_address(from)) }
}

/// Starts the copy of `bytes` bytes from shared to global memory. PTX:
/// `cp.async.bulk.global.shared::cta.bulk_group`.
///
/// # Safety
///
/// `from` lies in shared memory and `to` in global, of this GPU or of a peer; both are valid for
/// the bytes and, like their number, multiples of 16. The rest is as in [`store_tile`].
#[doc(alias = "cp.async.bulk")]
#[track_caller]
pub unsafe fn store_bulk(to: *mut u8, from: *const u8, bytes: u32) {
    // SAFETY: the caller keeps source and target valid and aligned until the copy has ended.
    unsafe { arch::store_bulk(to, arch::shared_address(from), bytes) }
}

/// Does the same as [`store_tile`], but adds the tile to the matrix, atomically for each element.
/// The type of the elements is the map's; a sum is rounded to it. PTX:
/// `cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group`.
///
/// # Safety
///
/// The contract is that of [`store_tile`], but other threads may add to that part of the matrix at
/// the same time. The map's type is f16, bf16 or f32.
#[doc(alias = "cp.reduce.async.bulk.tensor")]
#[track_caller]
pub unsafe fn reduce_add_tile(map: &TensorMap, row: u32, column: u32, from: *const u8) {
    // SAFETY: the caller keeps the tile in shared memory until the store has read it.
    unsafe { arch::reduce_add_tile(map, row, column, arch::shared_address(from)) }
}

/// Does the same as [`store_bulk`], of words that arrive in any order, each as a whole, so that
/// the receiver may wait for each word by itself.
///
/// # Safety
///
/// The contract is that of [`store_bulk`], but other threads may read `to` by relaxed loads at
/// system scope.
#[doc(alias = "cp.async.bulk")]
#[track_caller]
pub unsafe fn store_words(to: *mut u32, from: *const u8, bytes: u32) {
    // SAFETY: the caller keeps source and target valid and aligned until the copy has ended.
    unsafe { arch::store_words(to, arch::shared_address(from), bytes) }
}

/// Commits this thread's stores since the last call as a group. PTX: `cp.async.bulk.commit_group`.
#[track_caller]
pub fn commit_stores() {
    arch::commit_stores();
}

/// Waits until at most the newest `N` groups of this thread's stores still read shared memory. PTX:
/// `cp.async.bulk.wait_group.read`.
#[track_caller]
pub fn wait_stores_read<const N: u32>() {
    arch::wait_stores_read::<N>();
}

/// Waits until at most the newest `N` groups of this thread's stores are pending. PTX:
/// `cp.async.bulk.wait_group`.
#[track_caller]
pub fn wait_stores<const N: u32>() {
    arch::wait_stores::<N>();
}

/// Makes this thread's writes to shared memory visible to TMA and `wgmma`. PTX:
/// `fence.proxy.async.shared::cta`.
#[track_caller]
pub fn fence_async_shared() {
    arch::fence_async_shared();
}

/// Orders the writes to global memory that this thread has made, or knows of by an acquire, before
/// TMA's accesses that follow: before a load of what another thread or rank has written. PTX:
/// `fence.proxy.async.global`.
#[track_caller]
pub fn fence_async_global() {
    arch::fence_async_global();
}

/// Prefetches the tensor map, for the first copy. PTX: `prefetch.tensormap`.
pub fn prefetch_map(map: &TensorMap) {
    arch::prefetch_map(map);
}
