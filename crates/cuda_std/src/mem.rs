//! Loads and stores that the simulator can observe.
//!
//! A plain `*p` works in a kernel too, but the simulator checks only accesses by these functions
//! for races. On the GPU they have no overhead: [`load`] and [`store`] are plain accesses, vector
//! accesses one 16-byte instruction, ordered accesses `ld`/`st` with an order and a scope.
//!
//! # Safety model
//!
//! All are `unsafe`: the pointer must be valid for the access and aligned for its size. If several
//! threads access an address plainly and one of them writes, a barrier, or a release store with an
//! acquire load, must separate the accesses.
//!
//! # Example
//!
//! ```
//! use cuda_std::atomic::{Order, Scope};
//! use cuda_std::mem;
//! /// Passes `value` to a thread that waits for `flag`.
//! ///
//! /// # Safety
//! ///
//! /// Both are valid, and the other thread reads `slot` only after it has read the flag with an
//! /// acquire load.
//! unsafe fn publish(slot: *mut f32, flag: *mut u32, value: f32) {
//!     // SAFETY: the caller's contract.
//!     unsafe {
//!         mem::store(slot, value);
//!         mem::store_ordered(flag, 1, Order::Release, Scope::Sys);
//!     }
//! }
//! ```

use devcomm_types::Element;

use crate::arch;
use crate::atomic::{Atomic, AtomicValue, Order, Scope};
use crate::vector::{Accumulate, Vec16};

/// Returns the value at an address, by a plain load.
///
/// # Safety
///
/// `address` is aligned and valid for reads, and holds a `T`.
#[track_caller]
pub unsafe fn load<T: Copy>(address: *const T) -> T {
    // SAFETY: the caller passes an address that is valid for reads and aligned.
    unsafe { arch::load(address) }
}

/// Stores a value by a plain store.
///
/// # Safety
///
/// `address` is aligned and valid for writes.
#[track_caller]
pub unsafe fn store<T: Copy>(address: *mut T, value: T) {
    // SAFETY: the caller passes an address that is valid for writes and aligned.
    unsafe { arch::store(address, value) }
}

/// Returns the value at an address, by a volatile load; another thread may write at the same time.
/// PTX: `ld.volatile`, which orders like a relaxed load at system scope.
///
/// # Safety
///
/// The contract is that of [`load`]; `T` is a number of at most 8 bytes.
#[track_caller]
pub unsafe fn load_volatile<T: AtomicValue>(address: *const T) -> T {
    // SAFETY: the caller passes an address that is valid for reads and aligned.
    unsafe { arch::load_volatile(address) }
}

/// Stores a value by a volatile store; another thread may read at the same time. PTX:
/// `st.volatile`.
///
/// # Safety
///
/// The contract is that of [`store`].
#[track_caller]
pub unsafe fn store_volatile<T: AtomicValue>(address: *mut T, value: T) {
    // SAFETY: the caller passes an address that is valid for writes and aligned.
    unsafe { arch::store_volatile(address, value) }
}

/// Loads 16 bytes of elements by one instruction. PTX: `ld.v4.b32`.
///
/// # Safety
///
/// `address` is aligned to 16 bytes and valid for reads of 16.
#[track_caller]
pub unsafe fn load_vec<T: Element>(address: *const T) -> Vec16<T> {
    // SAFETY: the caller passes an address of 16 bytes that is valid for reads and aligned.
    Vec16::from_bits(unsafe { arch::load_v4(address.cast()) })
}

/// Does the same as [`load_vec`], for data that no other thread reads: the L2 cache evicts it
/// first. PTX: `ld.v4.b32` with `.L2::cache_hint`.
///
/// # Safety
///
/// The contract is that of [`load_vec`], in global memory.
#[track_caller]
pub unsafe fn load_vec_once<T: Element>(address: *const T) -> Vec16<T> {
    // SAFETY: the caller passes an address of 16 bytes that is valid for reads and aligned.
    Vec16::from_bits(unsafe { arch::load_v4_once(address.cast()) })
}

/// Stores 16 bytes of elements by one instruction. PTX: `st.v4.b32`.
///
/// # Safety
///
/// `address` is aligned to 16 bytes and valid for writes of 16.
#[track_caller]
pub unsafe fn store_vec<T: Element>(address: *mut T, value: Vec16<T>) {
    // SAFETY: the caller passes an address of 16 bytes that is valid for writes and aligned.
    unsafe { arch::store_v4(address.cast(), value.to_bits()) }
}

/// Loads `N` elements as `f32`, by 16-byte instructions; exact.
///
/// # Safety
///
/// `address` is aligned to 16 bytes and valid for reads of `N` elements, which are a multiple of 16
/// bytes.
#[track_caller]
pub unsafe fn load_as_f32<T: Accumulate<Acc = f32>, const N: usize>(address: *const T) -> [f32; N] {
    const { assert!(N.is_multiple_of(Vec16::<T>::LANES), "whole vectors of 16 bytes") }
    let (mut values, mut first) = ([0.0; N], 0);
    while first < N {
        // SAFETY: the caller guarantees that these elements can be read.
        let wide = T::widen(unsafe { load_vec(address.add(first)) });
        let mut i = 0;
        while i < Vec16::<T>::LANES {
            values[first + i] = wide.as_ref()[i];
            i += 1;
        }
        first += Vec16::<T>::LANES;
    }
    values
}

/// Stores `N` values as elements, each rounded to the nearest, by 16-byte instructions.
///
/// # Safety
///
/// `address` is aligned to 16 bytes and valid for writes of `N` elements, which are a multiple of
/// 16 bytes.
#[track_caller]
pub unsafe fn store_from_f32<T: Accumulate<Acc = f32>, const N: usize>(
    address: *mut T,
    values: [f32; N],
) {
    const { assert!(N.is_multiple_of(Vec16::<T>::LANES), "whole vectors of 16 bytes") }
    let mut first = 0;
    while first < N {
        let mut wide = T::widen(Vec16::from_bits([0; 4]));
        let mut i = 0;
        while i < Vec16::<T>::LANES {
            wide.as_mut()[i] = values[first + i];
            i += 1;
        }
        // SAFETY: the caller guarantees that these elements can be written.
        unsafe { store_vec(address.add(first), T::narrow(wide)) };
        first += Vec16::<T>::LANES;
    }
}

/// Prefetches the cache line of an address into the L2 cache, for a later load. A prefetch takes no
/// register, so more bytes can be in flight than with loads. PTX: `prefetch.global.L2`.
///
/// # Safety
///
/// `address` is in the global memory of a GPU, and valid for reads.
pub unsafe fn prefetch<T>(address: *const T) {
    // SAFETY: the caller passes an address in global memory.
    unsafe { arch::prefetch(address.cast()) }
}

/// Loads 16 bytes of elements by one access; other threads may store all 16 at the same time by
/// [`store_vec_relaxed`]. PTX: `ld.relaxed.<scope>.v4.b32`.
///
/// PTX guarantees single-copy atomicity only for each of the four 32-bit words. On current GPUs an
/// aligned 16-byte store to memory or over NVLink is atomic; NCCL's LL protocols rely on that too.
///
/// # Safety
///
/// The contract is that of [`load_vec`], and concurrent writes are only [`store_vec_relaxed`].
#[track_caller]
pub unsafe fn load_vec_relaxed<T: Element>(address: *const T, scope: Scope) -> Vec16<T> {
    // SAFETY: the caller passes an address of 16 bytes that is valid for reads and aligned.
    Vec16::from_bits(unsafe { arch::load_v4_relaxed(address.cast(), scope) })
}

/// Stores 16 bytes of elements by one access; other threads may load them at the same time by
/// [`load_vec_relaxed`]. PTX: `st.relaxed.<scope>.v4.b32`.
///
/// # Safety
///
/// The contract is that of [`store_vec`], and concurrent accesses are only by this function and
/// [`load_vec_relaxed`].
#[track_caller]
pub unsafe fn store_vec_relaxed<T: Element>(address: *mut T, value: Vec16<T>, scope: Scope) {
    // SAFETY: the caller passes an address of 16 bytes that is valid for writes and aligned.
    unsafe { arch::store_v4_relaxed(address.cast(), value.to_bits(), scope) }
}

/// Loads a value with an order and a scope. PTX: `ld.{relaxed,acquire}.{cta,gpu,sys}`.
///
/// # Panics
///
/// When `order` is release or acquire-release.
///
/// # Safety
///
/// The contract is that of [`load`], and concurrent writes are only atomic or ordered accesses of
/// the same size.
#[track_caller]
pub unsafe fn load_ordered<T: AtomicValue>(address: *const T, order: Order, scope: Scope) -> T {
    // SAFETY: the caller's contract; a load does not write.
    unsafe { Atomic::from_ptr(address.cast_mut()) }.load(order, scope)
}

/// Stores a value with an order and a scope. PTX: `st.{relaxed,release}.{cta,gpu,sys}`.
///
/// # Panics
///
/// When `order` is acquire or acquire-release.
///
/// # Safety
///
/// The contract is that of [`store`], and concurrent accesses are only atomic or ordered accesses
/// of the same size.
#[track_caller]
pub unsafe fn store_ordered<T: AtomicValue>(address: *mut T, value: T, order: Order, scope: Scope) {
    // SAFETY: the caller passes an aligned address that threads access only by such operations.
    unsafe { Atomic::from_ptr(address) }.store(value, order, scope);
}
