//! Atomics. A simulated machine runs its threads on one OS thread; host atomics also make accesses
//! from several OS threads defined.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::memory::{spin, touch};
use super::{Access, Order, Scope};
use crate::atomic::raw::{Add, Bits, MinMax};

hooks! { fence(order: Order, scope: Scope) = fence(order, scope); }

/// Reports a read-modify-write of `address` and executes it by `update`, which returns the old and
/// the new value. If they are the same, the thread may be polling, so this calls `spin`.
#[inline]
#[track_caller]
fn modify<T: Copy + PartialEq>(
    address: *mut T,
    order: Order,
    scope: Scope,
    update: impl FnOnce(*mut T) -> (T, T),
) -> T {
    let (old, new) = update(touch(address, Access::AtomicRmw(order, scope)));
    if old == new {
        spin();
    }
    old
}

macro_rules! modifications {
    (
        $word:ty, $atomic:ty, $to:expr, $from:expr;
        $($name:ident |$old:ident, $value:ident| $new:expr;)*
    ) => { $(
        #[inline]
        #[track_caller]
        unsafe fn $name(address: *mut Self, $value: Self, order: Order, scope: Scope) -> Self {
            let update = |bits: $word| {
                let $old: Self = $from(bits);
                $to($new)
            };
            let old = modify(address.cast::<$word>(), order, scope, |address| {
                // SAFETY: the caller passes an aligned address that threads access only by such
                // operations.
                let word = unsafe { <$atomic>::from_ptr(address) };
                let old = word.update(Ordering::SeqCst, Ordering::SeqCst, update);
                (old, update(old))
            });
            $from(old)
        }
    )* };
}

macro_rules! words {
    ($($word:ty, $atomic:ty;)*) => { $(
        impl Bits for $word {
            #[inline]
            #[track_caller]
            unsafe fn load(address: *const Self, order: Order, scope: Scope) -> Self {
                spin();
                let address = touch(address, Access::AtomicRead(order, scope));
                // SAFETY: the caller's contract; a load does not write.
                unsafe { <$atomic>::from_ptr(address) }.load(Ordering::SeqCst)
            }

            #[inline]
            #[track_caller]
            unsafe fn store(address: *mut Self, value: Self, order: Order, scope: Scope) {
                let address = touch(address, Access::AtomicWrite(order, scope));
                // SAFETY: the caller passes an aligned address that threads access only by such
                // operations.
                unsafe { <$atomic>::from_ptr(address) }.store(value, Ordering::SeqCst);
            }

            #[inline]
            #[track_caller]
            unsafe fn compare_exchange(
                address: *mut Self,
                current: Self,
                new: Self,
                order: Order,
                scope: Scope,
            ) -> Self {
                modify(address, order, scope, |address| {
                    // SAFETY: the caller passes an aligned address that threads access only by such
                    // operations.
                    let word = unsafe { <$atomic>::from_ptr(address) };
                    match word.compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst) {
                        Ok(old) => (old, new),
                        Err(old) => (old, old),
                    }
                })
            }

            modifications! {
                $word, $atomic, |v| v, |v| v;
                swap |_old, value| value;
                and |old, value| old & value;
                or |old, value| old | value;
                xor |old, value| old ^ value;
            }
        }
    )* };
}

words! {
    u32, AtomicU32;
    u64, AtomicU64;
}

macro_rules! integers {
    ($($type:ty, $word:ty, $atomic:ty;)*) => { $(
        impl Add for $type {
            modifications! {
                $word, $atomic, |v| v as $word, |v| v as $type;
                add |old, value| <$type>::wrapping_add(old, value);
            }
        }

        impl MinMax for $type {
            modifications! {
                $word, $atomic, |v| v as $word, |v| v as $type;
                min |old, value| Ord::min(old, value);
                max |old, value| Ord::max(old, value);
            }
        }
    )* };
}

integers! {
    u32, u32, AtomicU32;
    i32, u32, AtomicU32;
    u64, u64, AtomicU64;
    i64, u64, AtomicU64;
}

impl Add for f32 {
    modifications! { u32, AtomicU32, f32::to_bits, f32::from_bits; add |old, value| old + value; }
}

impl Add for f64 {
    modifications! { u64, AtomicU64, f64::to_bits, f64::from_bits; add |old, value| old + value; }
}
