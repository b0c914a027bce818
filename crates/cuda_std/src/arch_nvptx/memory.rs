//! Plain accesses and shared memory.

use core::arch::asm;

use crate::atomic::AtomicValue;

#[inline(always)]
pub(crate) unsafe fn load<T: Copy>(address: *const T) -> T {
    // SAFETY: the caller's.
    unsafe { address.read() }
}

#[inline(always)]
pub(crate) unsafe fn store<T: Copy>(address: *mut T, value: T) {
    // SAFETY: the caller's.
    unsafe { address.write(value) }
}

#[inline(always)]
pub(crate) unsafe fn load_volatile<T: AtomicValue>(address: *const T) -> T {
    // SAFETY: the caller's.
    unsafe { address.read_volatile() }
}

#[inline(always)]
pub(crate) unsafe fn store_volatile<T: AtomicValue>(address: *mut T, value: T) {
    // SAFETY: the caller's.
    unsafe { address.write_volatile(value) }
}

#[inline(always)]
pub(crate) fn shared_static<T>(slot: *mut T) -> *mut T {
    slot
}

unsafe extern "C" {
    // The builder knows the name and makes it `.extern .shared .align 16`.
    static __cuda_std_dynamic_shared: [u128; 0];
}

#[inline(always)]
pub(crate) fn dynamic_shared() -> *mut u8 {
    (&raw const __cuda_std_dynamic_shared).cast_mut().cast()
}

#[inline(always)]
pub(crate) fn dynamic_shared_size() -> usize {
    let bytes: u32;
    // SAFETY: reads a register that never changes.
    unsafe {
        asm!("mov.u32 {}, %dynamic_smem_size;", out(reg32) bytes, options(pure, nomem, nostack));
    }
    bytes as usize
}
