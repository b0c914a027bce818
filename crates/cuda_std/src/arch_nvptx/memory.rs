//! Plain accesses and shared memory.

use core::arch::asm;
use core::mem::transmute;

use super::atomics::scoped;
use crate::atomic::{AtomicValue, Scope};

/// The cache policy that `createpolicy.fractional.L2::evict_first.b64` with fraction 1 returns.
pub(super) const EVICT_FIRST: u64 = 0x12f0_0000_0000_0000;

macro_rules! ld_v4 {
    ($order:expr, $address:ident) => {{
        let (a, b, c, d): (u32, u32, u32, u32);
        // SAFETY: 16 bytes at the address are valid for reads and aligned: the caller's duty.
        unsafe {
            asm!(
                concat!("ld.", $order, ".v4.b32 {{{a}, {b}, {c}, {d}}}, [{address}];"),
                a = out(reg32) a,
                b = out(reg32) b,
                c = out(reg32) c,
                d = out(reg32) d,
                address = in(reg64) $address,
                options(nostack),
            );
        }
        [a, b, c, d]
    }};
}

macro_rules! st_v4 {
    ($order:expr, $address:ident, $value:ident) => {{
        let [a, b, c, d] = $value;
        // SAFETY: 16 bytes at the address are valid for writes and aligned: the caller's duty.
        unsafe {
            asm!(
                concat!("st.", $order, ".v4.b32 [{address}], {{{a}, {b}, {c}, {d}}};"),
                address = in(reg64) $address,
                a = in(reg32) a,
                b = in(reg32) b,
                c = in(reg32) c,
                d = in(reg32) d,
                options(nostack),
            );
        }
    }};
}

pub(crate) unsafe fn load_v4_relaxed(address: *const [u32; 4], scope: Scope) -> [u32; 4] {
    scoped!(scope, ld_v4, "relaxed", address)
}

pub(crate) unsafe fn store_v4_relaxed(address: *mut [u32; 4], value: [u32; 4], scope: Scope) {
    scoped!(scope, st_v4, "relaxed", address, value)
}

pub(crate) unsafe fn load<T: Copy>(address: *const T) -> T {
    // SAFETY: the caller passes an address that is valid for reads and aligned.
    unsafe { address.read() }
}

pub(crate) unsafe fn store<T: Copy>(address: *mut T, value: T) {
    // SAFETY: the caller passes an address that is valid for writes and aligned.
    unsafe { address.write(value) }
}

/// Four words as one LLVM vector. LLVM would store an array through a copy in memory, by two 8-byte
/// accesses.
#[repr(simd)]
#[derive(Clone, Copy)]
struct Four([u32; 4]);

pub(crate) unsafe fn load_v4(address: *const [u32; 4]) -> [u32; 4] {
    // SAFETY: 16 bytes at the address are valid for reads and aligned: the caller's duty.
    unsafe { address.cast::<crate::vector::Vec16<u32>>().read().to_bits() }
}

instructions! { [nostack readonly]
    // 16 bytes at the address are valid for reads and aligned: the caller's duty.
    unsafe fn load_v4_with(address: *const [u32; 4], policy: u64) -> [u32; 4]:
        "ld.L2::cache_hint.v4.b32 {{{a}, {b}, {c}, {d}}}, [{address}], {policy};",
        in(reg64: address policy), out(reg32: a b c d) => [a, b, c, d];
    // The caller passes an address in global memory. Loads may move across it.
    unsafe fn prefetch(address: *const u8): "prefetch.global.L2 [{address}];", in(reg64: address);
}

instructions! { [pure nomem nostack]
    fn dynamic_shared_bytes() -> u32:
        "mov.u32 {bytes}, %dynamic_smem_size;", out(reg32: bytes) => bytes;
}

pub(crate) unsafe fn load_v4_once(address: *const [u32; 4]) -> [u32; 4] {
    // SAFETY: 16 bytes at the address are valid for reads and aligned: the caller's duty.
    unsafe { load_v4_with(address, EVICT_FIRST) }
}

pub(crate) unsafe fn store_v4(address: *mut [u32; 4], value: [u32; 4]) {
    // SAFETY: the caller's contract; both types are 16 bytes of words.
    unsafe { address.cast::<Four>().write(transmute::<[u32; 4], Four>(value)) }
}

pub(crate) unsafe fn load_volatile<T: AtomicValue>(address: *const T) -> T {
    // SAFETY: the caller passes an address that is valid for reads and aligned.
    unsafe { address.read_volatile() }
}

pub(crate) unsafe fn store_volatile<T: AtomicValue>(address: *mut T, value: T) {
    // SAFETY: the caller passes an address that is valid for writes and aligned.
    unsafe { address.write_volatile(value) }
}

pub(crate) fn shared_static<T>(slot: *mut T) -> *mut T {
    slot
}

unsafe extern "C" {
    // `cuda_builder` makes the symbol `.extern .shared .align 16`.
    static __cuda_std_dynamic_shared: [u128; 0];
}

pub(crate) fn dynamic_shared() -> *mut u8 {
    (&raw const __cuda_std_dynamic_shared).cast_mut().cast()
}

pub(crate) fn dynamic_shared_size() -> usize {
    dynamic_shared_bytes() as usize
}
