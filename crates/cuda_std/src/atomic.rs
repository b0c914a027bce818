//! Atomics, orders and scopes.
//!
//! [`Atomic`] is a value in memory that several threads modify, like `core::sync::atomic`'s types,
//! with a [`Scope`] in addition to the [`Order`]: ordering for the threads of a block or of one GPU
//! costs less than for peer GPUs and the host. With constant orders and scopes an operation
//! compiles to one instruction.
//!
//! # Safety model
//!
//! The operations are safe, as on the host. [`Atomic::from_ptr`], for memory that other code owns
//! (shared memory, a window), is `unsafe`. A GPU has no atomics on local memory: an [`Atomic`] in
//! a local variable, which no other thread can see, makes the kernel fail.
//!
//! # Example
//!
//! ```
//! use cuda_std::atomic::{AtomicU32, Order, Scope};
//! /// Returns a different number to each caller.
//! fn ticket(counter: &AtomicU32) -> u32 {
//!     counter.fetch_add(1, Order::Relaxed, Scope::Gpu)
//! }
//! ```

use core::cell::UnsafeCell;

use crate::arch;

/// The memory order of an access or a fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Atomic, without ordering of other accesses.
    Relaxed,
    /// Later accesses stay after this one. A load that reads a released value makes the writes
    /// before the release visible.
    Acquire,
    /// Earlier accesses stay before this one.
    Release,
    /// Acquire and release.
    AcqRel,
    /// Acquire and release, with one total order of all such operations.
    SeqCst,
}

/// The threads for which an access or a fence is ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The threads of the block.
    Cta,
    /// The threads of the GPU.
    Gpu,
    /// All GPUs and the host.
    Sys,
}

/// Orders this thread's accesses before the fence and those after it, for the threads in `scope`.
/// PTX: `fence`.
///
/// # Panics
///
/// When `order` is relaxed.
#[track_caller]
pub fn fence(order: Order, scope: Scope) {
    assert!(order != Order::Relaxed, "there is no relaxed fence");
    arch::fence(order, scope);
}

/// Traits that `arch_nvptx` and `arch_host` implement, for the same types.
#[doc(hidden)]
pub mod raw {
    use super::{Order, Scope};

    /// Unsigned integers, with the operations on bits.
    #[allow(
        clippy::missing_safety_doc,
        reason = "every function: the address is valid and aligned"
    )]
    pub trait Bits: Copy + Eq {
        unsafe fn load(address: *const Self, order: Order, scope: Scope) -> Self;
        unsafe fn store(address: *mut Self, value: Self, order: Order, scope: Scope);
        unsafe fn swap(address: *mut Self, value: Self, order: Order, scope: Scope) -> Self;
        unsafe fn compare_exchange(
            address: *mut Self,
            current: Self,
            new: Self,
            order: Order,
            scope: Scope,
        ) -> Self;
        unsafe fn and(address: *mut Self, value: Self, order: Order, scope: Scope) -> Self;
        unsafe fn or(address: *mut Self, value: Self, order: Order, scope: Scope) -> Self;
        unsafe fn xor(address: *mut Self, value: Self, order: Order, scope: Scope) -> Self;
    }

    /// Numbers with an atomic addition.
    #[allow(clippy::missing_safety_doc, reason = "the address is valid and aligned")]
    pub trait Add: Copy {
        unsafe fn add(address: *mut Self, value: Self, order: Order, scope: Scope) -> Self;
    }

    /// Numbers with an atomic minimum and maximum.
    #[allow(clippy::missing_safety_doc, reason = "the address is valid and aligned")]
    pub trait MinMax: Copy {
        unsafe fn min(address: *mut Self, value: Self, order: Order, scope: Scope) -> Self;
        unsafe fn max(address: *mut Self, value: Self, order: Order, scope: Scope) -> Self;
    }
}

/// A number of 4 or 8 bytes, the value of an [`Atomic`].
///
/// # Safety
///
/// `Bits` has the type's size and alignment, and every bit pattern is a value.
pub unsafe trait AtomicValue: Copy + 'static {
    /// The unsigned integer of the same size.
    #[doc(hidden)]
    type Bits: raw::Bits;
    /// Returns the value's bits.
    #[doc(hidden)]
    fn to_bits(self) -> Self::Bits;
    /// Returns the value of these bits.
    #[doc(hidden)]
    fn from_bits(bits: Self::Bits) -> Self;
}

macro_rules! values {
    ($($type:ty as $bits:ty, $to:expr, $from:expr;)*) => { $(
        // SAFETY: a number and the unsigned integer of its size.
        unsafe impl AtomicValue for $type {
            type Bits = $bits;

            fn to_bits(self) -> $bits {
                $to(self)
            }

            fn from_bits(bits: $bits) -> Self {
                $from(bits)
            }
        }
    )* };
}

values! {
    u32 as u32, |v| v, |v| v;
    i32 as u32, i32::cast_unsigned, u32::cast_signed;
    f32 as u32, f32::to_bits, f32::from_bits;
    u64 as u64, |v| v, |v| v;
    i64 as u64, i64::cast_unsigned, u64::cast_signed;
    f64 as u64, f64::to_bits, f64::from_bits;
}

/// A number in memory that threads may change at the same time.
#[repr(transparent)]
pub struct Atomic<T>(UnsafeCell<T>);

/// An atomic `u32`.
pub type AtomicU32 = Atomic<u32>;
/// An atomic `i32`.
pub type AtomicI32 = Atomic<i32>;
/// An atomic `f32`.
pub type AtomicF32 = Atomic<f32>;
/// An atomic `u64`.
pub type AtomicU64 = Atomic<u64>;
/// An atomic `i64`.
pub type AtomicI64 = Atomic<i64>;
/// An atomic `f64`.
pub type AtomicF64 = Atomic<f64>;

// SAFETY: all access is atomic.
unsafe impl<T: AtomicValue> Sync for Atomic<T> {}

impl<T: AtomicValue> Atomic<T> {
    /// Returns a new atomic.
    pub const fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// Returns an atomic in memory that other code owns.
    ///
    /// # Safety
    ///
    /// `address` is aligned and valid for `'a`, and concurrent accesses to it are only atomic or
    /// ordered accesses of the same size, whose scopes include each other's threads.
    pub const unsafe fn from_ptr<'a>(address: *mut T) -> &'a Self {
        // SAFETY: the caller's contract; the layout is T's.
        unsafe { &*address.cast() }
    }

    /// Returns the atomic's address.
    pub const fn as_ptr(&self) -> *mut T {
        self.0.get()
    }

    fn bits(&self) -> *mut T::Bits {
        self.as_ptr().cast()
    }

    /// Returns the value. PTX: `ld`.
    ///
    /// # Panics
    ///
    /// When `order` is release or acquire-release.
    #[track_caller]
    pub fn load(&self, order: Order, scope: Scope) -> T {
        assert!(
            !matches!(order, Order::Release | Order::AcqRel),
            "a load is relaxed, acquire or sequentially consistent"
        );
        // SAFETY: the address is that of a live atomic.
        T::from_bits(unsafe { raw::Bits::load(self.bits().cast_const(), order, scope) })
    }

    /// Replaces the value. PTX: `st`.
    ///
    /// # Panics
    ///
    /// When `order` is acquire or acquire-release.
    #[track_caller]
    pub fn store(&self, value: T, order: Order, scope: Scope) {
        assert!(
            !matches!(order, Order::Acquire | Order::AcqRel),
            "a store is relaxed, release or sequentially consistent"
        );
        // SAFETY: the address is that of a live atomic.
        unsafe { raw::Bits::store(self.bits(), value.to_bits(), order, scope) }
    }

    /// Replaces the value and returns the old one. PTX: `atom.exch`.
    #[track_caller]
    pub fn swap(&self, value: T, order: Order, scope: Scope) -> T {
        // SAFETY: the address is that of a live atomic.
        T::from_bits(unsafe { raw::Bits::swap(self.bits(), value.to_bits(), order, scope) })
    }

    /// Replaces the value if its bits equal those of `current`. PTX: `atom.cas`.
    ///
    /// # Errors
    ///
    /// The value found, if it differs from `current`.
    #[track_caller]
    pub fn compare_exchange(&self, current: T, new: T, order: Order, scope: Scope) -> Result<T, T> {
        let (current, new) = (current.to_bits(), new.to_bits());
        // SAFETY: the address is that of a live atomic.
        let found = unsafe { raw::Bits::compare_exchange(self.bits(), current, new, order, scope) };
        if found == current { Ok(T::from_bits(found)) } else { Err(T::from_bits(found)) }
    }
}

impl<T: AtomicValue + raw::Add> Atomic<T> {
    /// Adds `value` and returns the old value; integers wrap around. PTX: `atom.add`.
    #[track_caller]
    pub fn fetch_add(&self, value: T, order: Order, scope: Scope) -> T {
        // SAFETY: the address is that of a live atomic.
        unsafe { raw::Add::add(self.as_ptr(), value, order, scope) }
    }
}

macro_rules! integers {
    ($($type:ty)*) => { $(
        impl Atomic<$type> {
            /// Subtracts `value`, wrapping around, and returns the old value. PTX: `atom.add`.
            #[track_caller]
            pub fn fetch_sub(&self, value: $type, order: Order, scope: Scope) -> $type {
                self.fetch_add(value.wrapping_neg(), order, scope)
            }

            /// Stores the minimum and returns the old value. PTX: `atom.min`.
            #[track_caller]
            pub fn fetch_min(&self, value: $type, order: Order, scope: Scope) -> $type {
                // SAFETY: the address is that of a live atomic.
                unsafe { raw::MinMax::min(self.as_ptr(), value, order, scope) }
            }

            /// Stores the maximum and returns the old value. PTX: `atom.max`.
            #[track_caller]
            pub fn fetch_max(&self, value: $type, order: Order, scope: Scope) -> $type {
                // SAFETY: the address is that of a live atomic.
                unsafe { raw::MinMax::max(self.as_ptr(), value, order, scope) }
            }

            integers!(bitwise $type: fetch_and and "and", fetch_or or "or", fetch_xor xor "xor");
        }
    )* };
    (bitwise $type:ty: $($name:ident $raw:ident $ptx:literal),*) => { $(
        #[doc = concat!("Stores the bitwise ", $ptx, " with `value` and returns the old value. ")]
        #[doc = concat!("PTX: `atom.", $ptx, "`.")]
        #[track_caller]
        pub fn $name(&self, value: $type, order: Order, scope: Scope) -> $type {
            // SAFETY: the address is that of a live atomic.
            let old = unsafe { raw::Bits::$raw(self.bits(), value.to_bits(), order, scope) };
            AtomicValue::from_bits(old)
        }
    )* };
}

integers!(u32 i32 u64 i64);
