//! Asynchronous copies from global to shared memory (`cp.async`).
//!
//! A thread starts copies, commits them as a group by [`commit_group`], and later waits until all
//! but the newest groups are complete. A wait covers the thread's own copies; a block barrier after
//! the wait makes the copies of all threads visible to all.
//!
//! # Safety model
//!
//! The copies are `unsafe`: before the wait no thread may access the destination or write the
//! source. The simulator reports such an access as a race.
//!
//! # Example
//!
//! ```
//! use cuda_std::{async_copy, thread};
//! /// Copies 16 bytes per thread.
//! ///
//! /// # Safety
//! ///
//! /// `shared` has 16 bytes for each thread of the block, `global` too, both aligned to 16.
//! unsafe fn fetch(shared: *mut u8, global: *const u8) {
//!     let at = 16 * thread::thread_idx_x() as usize;
//!     // SAFETY: the caller's contract.
//!     unsafe { async_copy::copy_16(shared.add(at), global.add(at), true) };
//!     async_copy::commit_group();
//!     async_copy::wait_groups::<0>();
//!     thread::sync_threads();
//! }
//! ```

use crate::arch;

/// Starts a copy of 16 bytes from global to shared memory, bypassing L1; if `pred` is false, it
/// writes zeros and reads nothing. PTX: `cp.async.cg.shared.global` with a source size.
///
/// # Safety
///
/// `to` lies in shared memory and `from` in global; both are aligned to 16 bytes, and valid for 16
/// (`from` only if `pred`). Until [`wait_groups`] has waited for the copy, no thread accesses `to`
/// or writes `from`.
#[doc(alias = "cp.async")]
#[track_caller]
pub unsafe fn copy_16<T>(to: *mut T, from: *const T, pred: bool) {
    // SAFETY: the caller keeps both addresses valid and aligned until the copy is waited for.
    unsafe { arch::copy_16_async(arch::shared_address(to), from.cast(), pred) }
}

/// Commits the copies that this thread started since the last call as a group, possibly empty.
/// PTX: `cp.async.commit_group`.
#[track_caller]
pub fn commit_group() {
    arch::commit_copies();
}

/// Waits until at most the newest `N` of this thread's groups are pending. PTX:
/// `cp.async.wait_group N`.
#[track_caller]
pub fn wait_groups<const N: u32>() {
    arch::wait_copies::<N>();
}
