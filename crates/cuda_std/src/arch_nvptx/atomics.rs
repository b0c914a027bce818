//! Atomics, ordered accesses, fences: one instruction per operation, order and scope.
//!
//! For sequential consistency a `fence.sc` precedes the operation, which is relaxed (stores) or
//! acquire (others).

use core::arch::asm;

use super::{Order, Scope};
use crate::atomic::raw::{Add, Bits, MinMax};

/// Expands to `emit!("<order>.<scope>", args..)`, with PTX's name of the scope.
macro_rules! scoped {
    ($scope:expr, $emit:ident, $order:literal $(, $arg:tt)*) => {
        match $scope {
            $crate::atomic::Scope::Cta => $emit!(concat!($order, ".cta") $(, $arg)*),
            $crate::atomic::Scope::Gpu => $emit!(concat!($order, ".gpu") $(, $arg)*),
            $crate::atomic::Scope::Sys => $emit!(concat!($order, ".sys") $(, $arg)*),
        }
    };
}
pub(super) use scoped;

macro_rules! fence {
    ($what:expr) => {{
        // SAFETY: a fence accesses no memory.
        unsafe { asm!(concat!("fence.", $what, ";"), options(nostack)) }
    }};
}

pub(crate) fn fence(order: Order, scope: Scope) {
    match order {
        Order::SeqCst => scoped!(scope, fence, "sc"),
        _ => scoped!(scope, fence, "acq_rel"),
    }
}

/// Emits the fence that sequential consistency needs. Returns the order of the access after it.
fn fence_if_seq_cst(order: Order, scope: Scope) -> Order {
    if order == Order::SeqCst {
        fence(Order::SeqCst, scope);
        return Order::Acquire;
    }
    order
}

macro_rules! ld {
    ($sem:expr, $bits:literal, $reg:ident, $address:ident) => {{
        let value;
        // SAFETY: the caller passes an aligned address that threads access only by such operations.
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
    ($sem:expr, $bits:literal, $reg:ident, $address:ident, $value:ident) => {{
        // SAFETY: the caller passes an aligned address that threads access only by such operations.
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
    ($sem:expr, $op:literal, $reg:ident, $address:ident, $value:ident) => {{
        let old;
        // SAFETY: the caller passes an aligned address that threads access only by such operations.
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
    ($sem:expr, $op:literal, $reg:ident, $address:ident, $current:ident, $new:ident) => {{
        let old;
        // SAFETY: the caller passes an aligned address that threads access only by such operations.
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

/// Expands to the read-modify-write `emit!("<order>.<scope>", args..)` of an order and a scope.
macro_rules! ordered {
    ($order:ident, $scope:ident, $emit:ident, $($arg:tt),*) => {
        match fence_if_seq_cst($order, $scope) {
            Order::Relaxed => scoped!($scope, $emit, "relaxed", $($arg),*),
            Order::Acquire => scoped!($scope, $emit, "acquire", $($arg),*),
            Order::Release => scoped!($scope, $emit, "release", $($arg),*),
            _ => scoped!($scope, $emit, "acq_rel", $($arg),*),
        }
    };
}

macro_rules! read_modify_writes {
    ($reg:ident: $($name:ident $op:literal),*) => { $(
        unsafe fn $name(address: *mut Self, value: Self, order: Order, scope: Scope) -> Self {
            ordered!(order, scope, atom, $op, $reg, address, value)
        }
    )* };
}

macro_rules! words {
    ($(
        $word:ty, $reg:ident,
        $bits:literal $exch:literal $cas:literal $and:literal $or:literal $xor:literal;
    )*) => { $(
        impl Bits for $word {
            unsafe fn load(address: *const Self, order: Order, scope: Scope) -> Self {
                match fence_if_seq_cst(order, scope) {
                    Order::Relaxed => scoped!(scope, ld, "relaxed", $bits, $reg, address),
                    _ => scoped!(scope, ld, "acquire", $bits, $reg, address),
                }
            }

            unsafe fn store(address: *mut Self, value: Self, order: Order, scope: Scope) {
                match fence_if_seq_cst(order, scope) {
                    Order::Release => scoped!(scope, st, "release", $bits, $reg, address, value),
                    _ => scoped!(scope, st, "relaxed", $bits, $reg, address, value),
                }
            }

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
