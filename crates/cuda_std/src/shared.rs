//! Shared memory: the on-chip memory of a block.
//!
//! [`shared_array!`](crate::shared_array) reserves an array at compile time;
//! [`dynamic_shared_mem`] is the memory that the launch requested.
//!
//! # Safety model
//!
//! Both return raw pointers. The initial contents are undefined (the simulator fills the memory
//! with a recognizable pattern). Accesses must stay within the length, and a barrier such as
//! [`crate::thread::sync_threads`] must separate a write from another thread's access.
//!
//! # Example
//!
//! ```
//! use cuda_std::prelude::*;
//!
//! /// Reverses each block of 64 elements.
//! #[kernel]
//! pub unsafe fn reverse(x: *mut f32) {
//!     let tile = shared_array![f32; 64];
//!     let i = thread::thread_idx_x() as usize;
//!     // SAFETY: blocks have 64 threads, and the barrier separates the writes of `tile` from the
//!     // reads.
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

/// The static of a `shared_array!`. On the GPU it is the array itself; a simulator uses its address
/// as the key of each block's array.
#[doc(hidden)]
#[repr(C, align(16))]
pub struct SharedSlot<T>(UnsafeCell<MaybeUninit<T>>);

// SAFETY: the slot is only an address; users of the raw pointers prevent races.
unsafe impl<T> Sync for SharedSlot<T> {}

impl<T> SharedSlot<T> {
    #[expect(clippy::new_without_default, reason = "used only by the macro, in a static")]
    pub const fn new() -> Self {
        const {
            assert!(size_of::<T>() != 0, "a shared array has at least one byte");
            assert!(align_of::<T>() <= 16, "a shared array is aligned to at most 16 bytes");
        }
        Self(UnsafeCell::new(MaybeUninit::uninit()))
    }

    #[track_caller]
    pub fn get(&'static self) -> *mut T {
        arch::shared_static(self.0.get().cast())
    }
}

/// A static of [`macro@crate::address_space`]: dereferences to the array itself on the GPU, to the
/// block's copy in a simulator.
#[doc(hidden)]
pub struct SharedStatic<T>(SharedSlot<T>);

impl<T> SharedStatic<T> {
    /// Declares shared memory, which cannot be initialized: `initialiser` is ignored.
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

    #[track_caller]
    fn deref(&self) -> &T {
        // SAFETY: the memory has this size and alignment on both targets, and lives while the block
        // runs; users of a `static mut` prevent races and write a `T` before they read one.
        unsafe { &*arch::shared_static(self.0.0.get().cast::<T>()) }
    }
}

impl<T: Copy> core::ops::DerefMut for SharedStatic<T> {
    #[track_caller]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; the kernel makes one reference at a time to its `static mut`.
        unsafe { &mut *arch::shared_static(self.0.0.get().cast::<T>()) }
    }
}

/// `shared_array![f32; 256]`: an array in shared memory, one per block, as a `*mut f32` aligned to
/// 16 bytes.
///
/// Every expansion is a separate array; repeated execution of an expansion, as in a loop, gives the
/// same array. The length is a constant. The initial contents are undefined.
#[macro_export]
macro_rules! shared_array {
    [$element:ty; $len:expr] => {{
        #[cfg_attr(target_arch = "nvptx64", unsafe(link_section = ".shared"))]
        static SLOT: $crate::shared::SharedSlot<[$element; $len]> =
            $crate::shared::SharedSlot::new();
        SLOT.get().cast::<$element>()
    }};
}

/// Returns the dynamic shared memory of the launch, aligned to 16 bytes: the same address in all
/// threads of the block.
pub fn dynamic_shared_mem<T>() -> *mut T {
    const { assert!(align_of::<T>() <= 16, "dynamic shared memory is aligned to 16 bytes only") }
    arch::dynamic_shared().cast()
}

/// Returns the size of [`dynamic_shared_mem`] in bytes. PTX: `%dynamic_smem_size`.
pub fn dynamic_shared_mem_size() -> usize {
    arch::dynamic_shared_size()
}
