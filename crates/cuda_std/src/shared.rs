//! Shared memory: memory of a block, as fast as its first-level cache.
//!
//! [`shared_array!`](crate::shared_array) reserves an array when the kernel is compiled,
//! [`dynamic_shared_mem`] is what the launch asked for.
//!
//! # Safety model
//!
//! Both give raw pointers. Contents are undefined at first (the simulator fills them with a pattern
//! that shows). Whoever reads or writes through them keeps to the length, and puts a barrier such
//! as [`crate::thread::sync_threads`] between a write and another thread's access.
//!
//! # Example
//!
//! ```
//! use cuda_std::prelude::*;
//!
//! /// Turns blocks of 64 elements around.
//! #[kernel]
//! pub unsafe fn reverse(x: *mut f32) {
//!     let tile = shared_array![f32; 64];
//!     let i = thread::thread_idx_x() as usize;
//!     // SAFETY: blocks have 64 threads, and the barrier is between the write of an element and
//!     // its read.
//!     unsafe {
//!         mem::store(tile.add(i), mem::load(x.add(i)));
//!         thread::sync_threads();
//!         mem::store(x.add(i), mem::load(tile.add(63 - i)));
//!     }
//! }
//! # fn main() {}
//! ```

use core::cell::UnsafeCell;
use core::mem::MaybeUninit;

use crate::arch;

/// The static behind `shared_array!`: the array itself on the GPU, the key of a block's array in a
/// simulator.
#[doc(hidden)]
#[repr(C, align(16))]
pub struct SharedSlot<T>(UnsafeCell<MaybeUninit<T>>);

// SAFETY: the slot is only an address; access goes through raw pointers, and those who use them
// answer for races.
unsafe impl<T> Sync for SharedSlot<T> {}

impl<T> SharedSlot<T> {
    #[expect(clippy::new_without_default, reason = "made by the macro only, in a static")]
    pub const fn new() -> Self {
        const {
            assert!(size_of::<T>() != 0, "a shared array has at least one byte");
            assert!(align_of::<T>() <= 16, "a shared array is aligned to 16 bytes, no more");
        }
        Self(UnsafeCell::new(MaybeUninit::uninit()))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn get(&'static self) -> *mut T {
        arch::shared_static(self.0.get().cast())
    }
}

/// A static of [`macro@crate::address_space`]: dereferences to the array itself on the GPU, to the
/// block's copy in a simulator.
#[doc(hidden)]
pub struct SharedStatic<T>(SharedSlot<T>);

impl<T> SharedStatic<T> {
    /// Shared memory has no contents at first: the initialiser counts for nothing.
    pub const fn new(initialiser: T) -> Self
    where
        T: Copy,
    {
        let _ = initialiser;
        Self(SharedSlot::new())
    }
}

impl<T: Copy> core::ops::Deref for SharedStatic<T> {
    type Target = T;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn deref(&self) -> &T {
        // SAFETY: both are memory of the size and alignment, alive while the block runs; whoever
        // names a `static mut` answers for races, and for contents that are a `T`.
        unsafe { &*arch::shared_static(self.0.0.get().cast::<T>()) }
    }
}

impl<T: Copy> core::ops::DerefMut for SharedStatic<T> {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above.
        unsafe { &mut *arch::shared_static(self.0.0.get().cast::<T>()) }
    }
}

/// `shared_array![f32; 256]`: an array in shared memory, one per block, as a `*mut f32` aligned to
/// 16 bytes.
///
/// Every expansion is an array of its own; one that is executed again, as in a loop, is the same
/// array. The length is a constant. Contents are undefined at first.
#[macro_export]
macro_rules! shared_array {
    [$element:ty; $len:expr] => {{
        #[cfg_attr(target_arch = "nvptx64", unsafe(link_section = ".shared"))]
        static SLOT: $crate::shared::SharedSlot<[$element; $len]> =
            $crate::shared::SharedSlot::new();
        SLOT.get().cast::<$element>()
    }};
}

/// The shared memory that the launch asked for, aligned to 16 bytes: the same address in every call
/// of the block.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn dynamic_shared_mem<T>() -> *mut T {
    const { assert!(align_of::<T>() <= 16, "dynamic shared memory is aligned to 16 bytes only") }
    arch::dynamic_shared().cast()
}

/// Bytes of [`dynamic_shared_mem`]. PTX: `%dynamic_smem_size`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn dynamic_shared_mem_size() -> usize {
    arch::dynamic_shared_size()
}
