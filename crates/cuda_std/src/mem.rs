//! Loads and stores that a simulator sees.
//!
//! A plain `*p` works in a kernel too, but only what goes through these functions can be watched
//! for races. They cost nothing on the GPU: [`load`] and [`store`] are plain accesses, the vector
//! forms one 16-byte instruction, the ordered ones `ld`/`st` with an order and a scope.
//!
//! # Safety model
//!
//! All are `unsafe`: the pointer is valid for the access and aligned for its size. Plain accesses
//! of different threads to one place, of which one writes, need a barrier or an ordered pair
//! between them.
//!
//! # Example
//!
//! ```
//! use cuda_std::atomic::{Order, Scope};
//! use cuda_std::mem;
//! /// Hands `value` to a thread that waits for `flag`.
//! ///
//! /// # Safety
//! ///
//! /// Both are valid, and the other thread reads `slot` only after it saw the flag with an
//! /// acquiring load.
//! unsafe fn publish(slot: *mut f32, flag: *mut u32, value: f32) {
//!     // SAFETY: the caller's.
//!     unsafe {
//!         mem::store(slot, value);
//!         mem::store_ordered(flag, 1, Order::Release, Scope::Sys);
//!     }
//! }
//! ```

use devcomm_types::Element;

use crate::arch;
use crate::atomic::{Atomic, AtomicValue, Order, Scope};
use crate::vector::Vec16;

/// A plain load.
///
/// # Safety
///
/// `address` is aligned and valid for reads, and holds a `T`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub unsafe fn load<T: Copy>(address: *const T) -> T {
    // SAFETY: the caller's.
    unsafe { arch::load(address) }
}

/// A plain store.
///
/// # Safety
///
/// `address` is aligned and valid for writes.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub unsafe fn store<T: Copy>(address: *mut T, value: T) {
    // SAFETY: the caller's.
    unsafe { arch::store(address, value) }
}

/// A load that is neither dropped nor merged; another thread may write at the same time. PTX:
/// `ld.volatile`, which orders like a relaxed load of system scope.
///
/// # Safety
///
/// As [`load`]; `T` is a number of at most 8 bytes.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub unsafe fn load_volatile<T: AtomicValue>(address: *const T) -> T {
    // SAFETY: the caller's.
    unsafe { arch::load_volatile(address) }
}

/// A store that is neither dropped nor merged; another thread may read at the same time. PTX:
/// `st.volatile`.
///
/// # Safety
///
/// As [`store`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub unsafe fn store_volatile<T: AtomicValue>(address: *mut T, value: T) {
    // SAFETY: the caller's.
    unsafe { arch::store_volatile(address, value) }
}

/// Loads 16 bytes of elements by one instruction. PTX: `ld.v4.b32`.
///
/// # Safety
///
/// `address` is aligned to 16 bytes and valid for reads of 16.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub unsafe fn load_vec<T: Element>(address: *const T) -> Vec16<T> {
    // SAFETY: the caller's.
    Vec16::from_bits(unsafe { arch::load_v4(address.cast()) })
}

/// Stores 16 bytes of elements by one instruction. PTX: `st.v4.b32`.
///
/// # Safety
///
/// `address` is aligned to 16 bytes and valid for writes of 16.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub unsafe fn store_vec<T: Element>(address: *mut T, value: Vec16<T>) {
    // SAFETY: the caller's.
    unsafe { arch::store_v4(address.cast(), value.to_bits()) }
}

/// Loads 16 bytes of elements at once, while others may store all 16 at once by
/// [`store_vec_relaxed`]. PTX: `ld.relaxed.<scope>.v4.b32`.
///
/// PTX promises no more than that each of the four words is whole; on the GPUs in use an aligned
/// vector store to memory or over NVLink arrives as one, which NCCL's LL protocols rest on too.
///
/// # Safety
///
/// As [`load_vec`], and concurrent writes to it are only [`store_vec_relaxed`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub unsafe fn load_vec_relaxed<T: Element>(address: *const T, scope: Scope) -> Vec16<T> {
    // SAFETY: the caller's.
    Vec16::from_bits(unsafe { arch::load_v4_relaxed(address.cast(), scope) })
}

/// Stores 16 bytes of elements at once, while others may load them by [`load_vec_relaxed`]. PTX:
/// `st.relaxed.<scope>.v4.b32`.
///
/// # Safety
///
/// As [`store_vec`], and concurrent accesses to it are only these two functions.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub unsafe fn store_vec_relaxed<T: Element>(address: *mut T, value: Vec16<T>, scope: Scope) {
    // SAFETY: the caller's.
    unsafe { arch::store_v4_relaxed(address.cast(), value.to_bits(), scope) }
}

/// A load with an order and a scope. PTX: `ld.{relaxed,acquire}.{cta,gpu,sys}`.
///
/// # Panics
///
/// When `order` is release or acquire-release, which are not for loads.
///
/// # Safety
///
/// As [`load`], and concurrent writes to it are only atomic or ordered accesses of the same size.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub unsafe fn load_ordered<T: AtomicValue>(address: *const T, order: Order, scope: Scope) -> T {
    // SAFETY: the caller's; a load does not write.
    unsafe { Atomic::from_ptr(address.cast_mut()) }.load(order, scope)
}

/// A store with an order and a scope. PTX: `st.{relaxed,release}.{cta,gpu,sys}`.
///
/// # Panics
///
/// When `order` is acquire or acquire-release, which are not for stores.
///
/// # Safety
///
/// As [`store`], and concurrent accesses to it are only atomic or ordered accesses of the same
/// size.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub unsafe fn store_ordered<T: AtomicValue>(address: *mut T, value: T, order: Order, scope: Scope) {
    // SAFETY: the caller's.
    unsafe { Atomic::from_ptr(address) }.store(value, order, scope);
}
