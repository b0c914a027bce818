//! Plain accesses and shared memory.

use std::panic::Location;

use super::{Access, Event, Order, Scope, SharedAddress, current};
use crate::atomic::AtomicValue;

/// Reports an access to a `T` to the simulator before it happens, and returns the address to
/// access. Panics if it is misaligned, since a GPU would fault.
#[track_caller]
#[must_use]
pub(super) fn touch<T>(address: *const T, access: Access) -> *mut T {
    if !address.is_aligned() {
        misaligned(address.addr(), align_of::<T>());
    }
    let (thread, context) = current();
    if !context.watch {
        return address.cast_mut();
    }
    let (bytes, at) = (size_of::<T>(), Location::caller());
    let actual = (context.ops.access)(thread, address.addr(), bytes, access, at);
    if actual == address.addr() {
        address.cast_mut()
    } else {
        std::ptr::with_exposed_provenance_mut(actual)
    }
}

hooks! {
    /// Reports a step of asynchronous operations.
    event(event: Event) = event(event);
    /// Tells the simulator that this thread may be polling for another thread's store. A load does
    /// so before it is reported: other threads run before the report, not between it and the load.
    spin() = spin();
    nanosleep(_nanos: u32) = spin();
}

#[cold]
#[track_caller]
pub(super) fn misaligned(address: usize, align: usize) -> ! {
    panic!("misaligned access: address {address:#x} is not a multiple of {align}")
}

#[track_caller]
pub(crate) unsafe fn load<T: Copy>(address: *const T) -> T {
    let address = touch(address, Access::Read);
    // SAFETY: the caller passes an address that is valid for reads and aligned.
    unsafe { address.read() }
}

#[track_caller]
pub(crate) unsafe fn store<T: Copy>(address: *mut T, value: T) {
    let address = touch(address, Access::Write);
    // SAFETY: the caller passes an address that is valid for writes and aligned.
    unsafe { address.write(value) }
}

/// Defines loads by one instruction, of the size and alignment of `$word`.
macro_rules! loads {
    ($($name:ident($address:ty) -> $value:ty = $word:ty;)*) => { $(
        #[track_caller]
        pub(crate) unsafe fn $name(address: $address) -> $value {
            let address = touch(address.cast::<$word>(), Access::Read).cast::<$value>();
            // SAFETY: the caller passes an aligned address of memory that no other thread writes.
            unsafe { address.read() }
        }
    )* };
}

loads! {
    load_v4(*const [u32; 4]) -> [u32; 4] = u128;
    load_shared(SharedAddress) -> [u32; 4] = u128;
    load_shared_u32(SharedAddress) -> u32 = u32;
    load_shared_u16(SharedAddress) -> u16 = u16;
}

/// Defines stores by one instruction, of the size and alignment of `$word`.
macro_rules! stores {
    ($($name:ident($address:ty, $value:ty) = $word:ty;)*) => { $(
        #[track_caller]
        pub(crate) unsafe fn $name(address: $address, value: $value) {
            let address = touch(address.cast::<$word>(), Access::Write).cast::<$value>();
            // SAFETY: the caller passes an aligned address that only this thread accesses.
            unsafe { address.write(value) }
        }
    )* };
}

stores! {
    store_v4(*mut [u32; 4], [u32; 4]) = u128;
    store_shared(SharedAddress, [u32; 4]) = u128;
    store_shared_pair(SharedAddress, [u32; 2]) = u64;
}

#[track_caller]
pub(crate) unsafe fn load_v4_once(address: *const [u32; 4]) -> [u32; 4] {
    // SAFETY: the caller passes an address of 16 bytes that is valid for reads and aligned.
    unsafe { load_v4(address) }
}

#[inline]
pub(crate) unsafe fn prefetch(_address: *const u8) {}

#[inline]
#[track_caller]
pub(crate) unsafe fn load_volatile<T: AtomicValue>(address: *const T) -> T {
    spin();
    let address = touch(address, Access::AtomicRead(Order::Relaxed, Scope::Sys));
    // SAFETY: the caller passes an address that is valid for reads and aligned.
    unsafe { address.read_volatile() }
}

#[inline]
#[track_caller]
pub(crate) unsafe fn store_volatile<T: AtomicValue>(address: *mut T, value: T) {
    let address = touch(address, Access::AtomicWrite(Order::Relaxed, Scope::Sys));
    // SAFETY: the caller passes an address that is valid for writes and aligned.
    unsafe { address.write_volatile(value) }
}

#[inline]
#[track_caller]
pub(crate) unsafe fn load_v4_relaxed(address: *const [u32; 4], scope: Scope) -> [u32; 4] {
    spin();
    let access = Access::AtomicRead(Order::Relaxed, scope);
    let address = touch(address.cast::<u128>(), access).cast::<[u32; 4]>();
    // SAFETY: the caller passes an address of 16 bytes that is valid for reads and aligned.
    unsafe { address.read_volatile() }
}

#[inline]
#[track_caller]
pub(crate) unsafe fn store_v4_relaxed(address: *mut [u32; 4], value: [u32; 4], scope: Scope) {
    let access = Access::AtomicWrite(Order::Relaxed, scope);
    let address = touch(address.cast::<u128>(), access).cast::<[u32; 4]>();
    // SAFETY: the caller passes an address of 16 bytes that is valid for writes and aligned.
    unsafe { address.write_volatile(value) }
}

#[inline]
#[track_caller]
pub(crate) fn shared_static<T>(slot: *mut T) -> *mut T {
    let (thread, context) = current();
    (context.ops.shared_static)(thread, slot.addr(), size_of::<T>(), Location::caller()).cast()
}

#[inline]
#[track_caller]
pub(crate) fn dynamic_shared() -> *mut u8 {
    current().1.dynamic_shared.0
}

#[inline]
#[track_caller]
pub(crate) fn dynamic_shared_size() -> usize {
    current().1.dynamic_shared.1
}
