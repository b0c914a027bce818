//! Atomics, ordered accesses, fences: one instruction for an operation, an order and a scope.
//!
//! Sequential consistency is a `fence.sc` before the operation, which is relaxed (a store) or acquiring (the rest).

use core::arch::asm;

use super::{Order, Scope};
use crate::atomic::raw::{Add, Bits, MinMax};

macro_rules! fence {
    ($what:literal) => {{
        // SAFETY: orders memory, touches none.
        unsafe { asm!(concat!("fence.", $what, ";"), options(nostack)) }
    }};
}

#[inline(always)]
pub(crate) fn fence(order: Order, scope: Scope) {
    match (order, scope) {
        (Order::SeqCst, Scope::Cta) => fence!("sc.cta"),
        (Order::SeqCst, Scope::Gpu) => fence!("sc.gpu"),
        (Order::SeqCst, Scope::Sys) => fence!("sc.sys"),
        (_, Scope::Cta) => fence!("acq_rel.cta"),
        (_, Scope::Gpu) => fence!("acq_rel.gpu"),
        (_, Scope::Sys) => fence!("acq_rel.sys"),
    }
}

/// The order of the instruction itself, after the fence that sequential consistency needs.
#[inline(always)]
fn after_fence(order: Order, scope: Scope) -> Order {
    if order == Order::SeqCst {
        fence(Order::SeqCst, scope);
        return Order::Acquire;
    }
    order
}

macro_rules! ld {
    ($sem:literal, $bits:literal, $reg:ident, $address:ident) => {{
        let value;
        // SAFETY: the caller's.
        unsafe {
            asm!(
                concat!("ld.", $sem, ".", $bits, " {}, [{}];"),
                out($reg) value,
                in(reg64) $address,
                options(nostack),
            );
        }
        value
    }};
}

macro_rules! st {
    ($sem:literal, $bits:literal, $reg:ident, $address:ident, $value:ident) => {{
        // SAFETY: the caller's.
        unsafe {
            asm!(
                concat!("st.", $sem, ".", $bits, " [{}], {};"),
                in(reg64) $address,
                in($reg) $value,
                options(nostack),
            );
        }
    }};
}

macro_rules! atom {
    ($sem:literal, $op:literal, $reg:ident, $address:ident, $value:ident) => {{
        let old;
        // SAFETY: the caller's.
        unsafe {
            asm!(
                concat!("atom.", $sem, ".", $op, " {}, [{}], {};"),
                out($reg) old,
                in(reg64) $address,
                in($reg) $value,
                options(nostack),
            );
        }
        old
    }};
}

macro_rules! cas {
    ($sem:literal, $op:literal, $reg:ident, $address:ident, $current:ident, $new:ident) => {{
        let old;
        // SAFETY: the caller's.
        unsafe {
            asm!(
                concat!("atom.", $sem, ".", $op, " {}, [{}], {}, {};"),
                out($reg) old,
                in(reg64) $address,
                in($reg) $current,
                in($reg) $new,
                options(nostack),
            );
        }
        old
    }};
}

/// The read-modify-write `emit!("<order>.<scope>", args..)` of an order and a scope.
macro_rules! ordered {
    ($order:ident, $scope:ident, $emit:ident, $($arg:tt),*) => {
        match (after_fence($order, $scope), $scope) {
            (Order::Relaxed, Scope::Cta) => $emit!("relaxed.cta", $($arg),*),
            (Order::Relaxed, Scope::Gpu) => $emit!("relaxed.gpu", $($arg),*),
            (Order::Relaxed, Scope::Sys) => $emit!("relaxed.sys", $($arg),*),
            (Order::Acquire, Scope::Cta) => $emit!("acquire.cta", $($arg),*),
            (Order::Acquire, Scope::Gpu) => $emit!("acquire.gpu", $($arg),*),
            (Order::Acquire, Scope::Sys) => $emit!("acquire.sys", $($arg),*),
            (Order::Release, Scope::Cta) => $emit!("release.cta", $($arg),*),
            (Order::Release, Scope::Gpu) => $emit!("release.gpu", $($arg),*),
            (Order::Release, Scope::Sys) => $emit!("release.sys", $($arg),*),
            (_, Scope::Cta) => $emit!("acq_rel.cta", $($arg),*),
            (_, Scope::Gpu) => $emit!("acq_rel.gpu", $($arg),*),
            (_, Scope::Sys) => $emit!("acq_rel.sys", $($arg),*),
        }
    };
}

macro_rules! read_modify_writes {
    ($reg:ident: $($name:ident $op:literal),*) => { $(
        #[inline(always)]
        unsafe fn $name(address: *mut Self, value: Self, order: Order, scope: Scope) -> Self {
            ordered!(order, scope, atom, $op, $reg, address, value)
        }
    )* };
}

macro_rules! words {
    ($($word:ty, $reg:ident, $bits:literal $exch:literal $cas:literal $and:literal $or:literal $xor:literal;)*) => { $(
        impl Bits for $word {
            #[inline(always)]
            unsafe fn load(address: *const Self, order: Order, scope: Scope) -> Self {
                match (after_fence(order, scope), scope) {
                    (Order::Relaxed, Scope::Cta) => ld!("relaxed.cta", $bits, $reg, address),
                    (Order::Relaxed, Scope::Gpu) => ld!("relaxed.gpu", $bits, $reg, address),
                    (Order::Relaxed, Scope::Sys) => ld!("relaxed.sys", $bits, $reg, address),
                    (_, Scope::Cta) => ld!("acquire.cta", $bits, $reg, address),
                    (_, Scope::Gpu) => ld!("acquire.gpu", $bits, $reg, address),
                    (_, Scope::Sys) => ld!("acquire.sys", $bits, $reg, address),
                }
            }

            #[inline(always)]
            unsafe fn store(address: *mut Self, value: Self, order: Order, scope: Scope) {
                match (after_fence(order, scope), scope) {
                    (Order::Release, Scope::Cta) => st!("release.cta", $bits, $reg, address, value),
                    (Order::Release, Scope::Gpu) => st!("release.gpu", $bits, $reg, address, value),
                    (Order::Release, Scope::Sys) => st!("release.sys", $bits, $reg, address, value),
                    (_, Scope::Cta) => st!("relaxed.cta", $bits, $reg, address, value),
                    (_, Scope::Gpu) => st!("relaxed.gpu", $bits, $reg, address, value),
                    (_, Scope::Sys) => st!("relaxed.sys", $bits, $reg, address, value),
                }
            }

            #[inline(always)]
            unsafe fn compare_exchange(
                address: *mut Self,
                current: Self,
                new: Self,
                order: Order,
                scope: Scope,
            ) -> Self {
                ordered!(order, scope, cas, $cas, $reg, address, current, new)
            }

            read_modify_writes!($reg: swap $exch, and $and, or $or, xor $xor);
        }
    )* };
}

words! {
    u32, reg32, "b32" "exch.b32" "cas.b32" "and.b32" "or.b32" "xor.b32";
    u64, reg64, "b64" "exch.b64" "cas.b64" "and.b64" "or.b64" "xor.b64";
}

macro_rules! numbers {
    ($($type:ty, $reg:ident, $add:literal $($min:literal $max:literal)?;)*) => { $(
        impl Add for $type {
            read_modify_writes!($reg: add $add);
        }

        $(impl MinMax for $type {
            read_modify_writes!($reg: min $min, max $max);
        })?
    )* };
}

numbers! {
    u32, reg32, "add.u32" "min.u32" "max.u32";
    i32, reg32, "add.s32" "min.s32" "max.s32";
    u64, reg64, "add.u64" "min.u64" "max.u64";
    i64, reg64, "add.u64" "min.s64" "max.s64";
    f32, reg32, "add.f32";
    f64, reg64, "add.f64";
}
