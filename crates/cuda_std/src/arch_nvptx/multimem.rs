//! Accesses to multicast addresses: one instruction per value, operation, order and scope.

use core::arch::asm;
use core::mem::transmute_copy;

use half::{bf16, f16};

use super::atomics::scoped;
use super::{Order, Scope};
use crate::multimem::raw::{Bytes, LoadReduce, Red, Strength};
use crate::multimem::{operations, values};
use crate::reduce::{And, Max, Min, Or, Sum, SumInHalf, Xor};
use crate::vector::Vec16;

/// `multimem.ld_reduce` by the kind of access (see `values`); returns the value's bits.
macro_rules! ld_reduce {
    ($strength:expr, word, $($form:tt)*) => { ld_reduce!($strength, reg32 u32, $($form)*) };
    ($strength:expr, long, $($form:tt)*) => { ld_reduce!($strength, reg64 u64, $($form)*) };
    ($strength:expr, $reg:ident $type:ident, $form:literal, $address:expr) => {{
        let value: $type;
        // SAFETY: the caller passes a multicast address that is valid and aligned for the access.
        unsafe {
            asm!(
                concat!("multimem.ld_reduce.", $strength, ".", $form, " {}, [{}];"),
                out($reg) value,
                in(reg64) $address,
                options(nostack),
            );
        }
        value
    }};
    ($strength:expr, pair, $form:literal, $address:expr) => {{
        let (a, b): (u32, u32);
        // SAFETY: the caller passes a multicast address that is valid and aligned for the access.
        unsafe {
            asm!(
                concat!("multimem.ld_reduce.", $strength, ".", $form, " {{{}, {}}}, [{}];"),
                out(reg32) a,
                out(reg32) b,
                in(reg64) $address,
                options(nostack),
            );
        }
        [a, b]
    }};
    ($strength:expr, quad, $form:literal, $address:expr) => {{
        let (a, b, c, d): (u32, u32, u32, u32);
        // SAFETY: the caller passes a multicast address that is valid and aligned for the access.
        unsafe {
            asm!(
                concat!("multimem.ld_reduce.", $strength, ".", $form, " {{{}, {}, {}, {}}}, [{}];"),
                out(reg32) a,
                out(reg32) b,
                out(reg32) c,
                out(reg32) d,
                in(reg64) $address,
                options(nostack),
            );
        }
        [a, b, c, d]
    }};
    ($strength:expr, words, $form:literal, $address:expr) => {{
        let words = $address.cast::<u32>();
        [
            ld_reduce!($strength, word, $form, words),
            ld_reduce!($strength, word, $form, words.wrapping_add(1)),
            ld_reduce!($strength, word, $form, words.wrapping_add(2)),
            ld_reduce!($strength, word, $form, words.wrapping_add(3)),
        ]
    }};
    ($strength:expr, longs, $form:literal, $address:expr) => {{
        let longs = $address.cast::<u64>();
        [
            ld_reduce!($strength, long, $form, longs),
            ld_reduce!($strength, long, $form, longs.wrapping_add(1)),
        ]
    }};
}

/// `multimem.st` and `multimem.red` of a value's bits, by the kind of access.
macro_rules! write {
    ($what:expr, word, $($form:tt)*) => { write!($what, reg32 u32, $($form)*) };
    ($what:expr, long, $($form:tt)*) => { write!($what, reg64 u64, $($form)*) };
    ($what:expr, $reg:ident $type:ident, $form:literal, $address:expr, $value:expr) => {{
        // SAFETY: values are plain bytes, and this one has the register's size; the rest is the
        // caller's contract.
        unsafe {
            asm!(
                concat!("multimem.", $what, ".", $form, " [{}], {};"),
                in(reg64) $address,
                in($reg) transmute_copy::<_, $type>(&$value),
                options(nostack),
            );
        }
    }};
    ($what:expr, pair, $form:literal, $address:expr, $value:expr) => {{
        // SAFETY: values are plain bytes, this one 8 bytes; the rest is the caller's contract.
        unsafe {
            let [a, b] = transmute_copy::<_, [u32; 2]>(&$value);
            asm!(
                concat!("multimem.", $what, ".", $form, " [{}], {{{}, {}}};"),
                in(reg64) $address,
                in(reg32) a,
                in(reg32) b,
                options(nostack),
            );
        }
    }};
    ($what:expr, quad, $form:literal, $address:expr, $value:expr) => {{
        let [a, b, c, d] = $value.to_bits();
        // SAFETY: the caller passes a multicast address that is valid and aligned for the access.
        unsafe {
            asm!(
                concat!("multimem.", $what, ".", $form, " [{}], {{{}, {}, {}, {}}};"),
                in(reg64) $address,
                in(reg32) a,
                in(reg32) b,
                in(reg32) c,
                in(reg32) d,
                options(nostack),
            );
        }
    }};
    ($what:expr, words, $form:literal, $address:expr, $value:expr) => {{
        let [a, b, c, d] = $value.to_bits();
        let words = $address.cast::<u32>();
        write!($what, word, $form, words, a);
        write!($what, word, $form, words.wrapping_add(1), b);
        write!($what, word, $form, words.wrapping_add(2), c);
        write!($what, word, $form, words.wrapping_add(3), d);
    }};
    ($what:expr, longs, $form:literal, $address:expr, $value:expr) => {{
        let [a, b, c, d] = $value.to_bits().map(u64::from);
        let longs = $address.cast::<u64>();
        write!($what, long, $form, longs, a | b << 32);
        write!($what, long, $form, longs.wrapping_add(1), c | d << 32);
    }};
}

/// `multimem.st` by the kind of access.
macro_rules! st {
    ($strength:expr, word, $address:expr, $value:expr) => {
        write!($strength, word, "b32", $address, $value)
    };
    ($strength:expr, long, $address:expr, $value:expr) => {
        write!($strength, long, "b64", $address, $value)
    };
    // PTX has only float vectors here; a store moves their bits.
    ($strength:expr, pair, $address:expr, $value:expr) => {
        write!($strength, pair, "v2.f32", $address, $value)
    };
    ($strength:expr, quad, $address:expr, $value:expr) => {
        write!($strength, quad, "v4.f32", $address, $value)
    };
}

macro_rules! stores {
    ($($value:ty: $element:ident $kind:ident;)*) => { $(
        impl Bytes for $value {
            unsafe fn store(address: *mut Self, value: Self, strength: Strength) {
                match strength {
                    None => st!("st.weak", $kind, address, value),
                    Some((Order::Relaxed, scope)) => {
                        scoped!(scope, st, "st.relaxed", $kind, address, value)
                    }
                    Some((_, scope)) => scoped!(scope, st, "st.release", $kind, address, value),
                }
            }
        }
    )* };
}
values!(stores);

macro_rules! impls {
    ($($op:ident $value:ty: $kind:ident $load:literal, $red:literal;)*) => { $(
        impl LoadReduce<$op> for $value {
            unsafe fn load_reduce(_: $op, address: *const Self, strength: Strength) -> Self {
                let bits = match strength {
                    None => ld_reduce!("weak", $kind, $load, address),
                    Some((Order::Relaxed, scope)) => {
                        scoped!(scope, ld_reduce, "relaxed", $kind, $load, address)
                    }
                    Some((_, scope)) => scoped!(scope, ld_reduce, "acquire", $kind, $load, address),
                };
                // SAFETY: values are plain bytes, and `bits` has the same size.
                unsafe { transmute_copy(&bits) }
            }
        }

        impl Red<$op> for $value {
            unsafe fn red(_: $op, address: *mut Self, value: Self, order: Order, scope: Scope) {
                match order {
                    Order::Relaxed => {
                        scoped!(scope, write, "red.relaxed", $kind, $red, address, value)
                    }
                    _ => scoped!(scope, write, "red.release", $kind, $red, address, value),
                }
            }
        }
    )* };
}
operations!(impls);
