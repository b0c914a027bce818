//! Multicast addresses: one instruction for a value, an operation, an order and a scope.

use core::arch::asm;
use core::mem::transmute_copy;

use half::{bf16, f16};

use super::{Order, Scope};
use crate::multimem::raw::{Bytes, LoadReduce, Red, Strength};
use crate::multimem::{operations, values};
use crate::reduce::{And, Max, Min, Or, Sum, SumInHalf, Xor};
use crate::vector::Vec16;

/// `multimem.ld_reduce`: the bits.
macro_rules! ld_reduce {
    (word, $($form:tt)*) => { ld_reduce!(reg32 u32, $($form)*) };
    (long, $($form:tt)*) => { ld_reduce!(reg64 u64, $($form)*) };
    ($reg:ident $type:ident, $strength:literal, $form:literal, $address:expr) => {{
        let value: $type;
        // SAFETY: the caller's.
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
    (pair, $strength:literal, $form:literal, $address:expr) => {{
        let (a, b): (u32, u32);
        // SAFETY: the caller's.
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
    (quad, $strength:literal, $form:literal, $address:expr) => {{
        let (a, b, c, d): (u32, u32, u32, u32);
        // SAFETY: the caller's.
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
    (words, $strength:literal, $form:literal, $address:expr) => {{
        let words = $address.cast::<u32>();
        [
            ld_reduce!(word, $strength, $form, words),
            ld_reduce!(word, $strength, $form, words.wrapping_add(1)),
            ld_reduce!(word, $strength, $form, words.wrapping_add(2)),
            ld_reduce!(word, $strength, $form, words.wrapping_add(3)),
        ]
    }};
    (longs, $strength:literal, $form:literal, $address:expr) => {{
        let longs = $address.cast::<u64>();
        [
            ld_reduce!(long, $strength, $form, longs),
            ld_reduce!(long, $strength, $form, longs.wrapping_add(1)),
        ]
    }};
}

/// `multimem.st` and `multimem.red`, of the bits of a value.
macro_rules! write {
    (word, $($form:tt)*) => { write!(reg32 u32, $($form)*) };
    (long, $($form:tt)*) => { write!(reg64 u64, $($form)*) };
    ($reg:ident $type:ident, $what:literal, $form:literal, $address:expr, $value:expr) => {{
        // SAFETY: values are plain bytes, and this one has as many as the register; the rest is the caller's.
        unsafe {
            asm!(
                concat!("multimem.", $what, ".", $form, " [{}], {};"),
                in(reg64) $address,
                in($reg) transmute_copy::<_, $type>(&$value),
                options(nostack),
            );
        }
    }};
    (pair, $what:literal, $form:literal, $address:expr, $value:expr) => {{
        // SAFETY: values are plain bytes, and this one has 8; the rest is the caller's.
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
    (quad, $what:literal, $form:literal, $address:expr, $value:expr) => {{
        let [a, b, c, d] = $value.to_bits();
        // SAFETY: the caller's.
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
    (words, $what:literal, $form:literal, $address:expr, $value:expr) => {{
        let [a, b, c, d] = $value.to_bits();
        let words = $address.cast::<u32>();
        write!(word, $what, $form, words, a);
        write!(word, $what, $form, words.wrapping_add(1), b);
        write!(word, $what, $form, words.wrapping_add(2), c);
        write!(word, $what, $form, words.wrapping_add(3), d);
    }};
    (longs, $what:literal, $form:literal, $address:expr, $value:expr) => {{
        let [a, b, c, d] = $value.to_bits().map(u64::from);
        let longs = $address.cast::<u64>();
        write!(long, $what, $form, longs, a | b << 32);
        write!(long, $what, $form, longs.wrapping_add(1), c | d << 32);
    }};
}

/// `multimem.st` by kind.
macro_rules! st {
    (word, $strength:literal, $address:expr, $value:expr) => {
        write!(word, $strength, "b32", $address, $value)
    };
    (long, $strength:literal, $address:expr, $value:expr) => {
        write!(long, $strength, "b64", $address, $value)
    };
    // PTX has vectors of floats only; a store moves their bits.
    (pair, $strength:literal, $address:expr, $value:expr) => {
        write!(pair, $strength, "v2.f32", $address, $value)
    };
    (quad, $strength:literal, $address:expr, $value:expr) => {
        write!(quad, $strength, "v4.f32", $address, $value)
    };
}

macro_rules! stores {
    ($($value:ty: $element:ident $kind:ident;)*) => { $(
        impl Bytes for $value {
            #[inline(always)]
            unsafe fn store(address: *mut Self, value: Self, strength: Strength) {
                match strength {
                    None => st!($kind, "st.weak", address, value),
                    Some((Order::Relaxed, Scope::Cta)) => st!($kind, "st.relaxed.cta", address, value),
                    Some((Order::Relaxed, Scope::Gpu)) => st!($kind, "st.relaxed.gpu", address, value),
                    Some((Order::Relaxed, Scope::Sys)) => st!($kind, "st.relaxed.sys", address, value),
                    Some((_, Scope::Cta)) => st!($kind, "st.release.cta", address, value),
                    Some((_, Scope::Gpu)) => st!($kind, "st.release.gpu", address, value),
                    Some((_, Scope::Sys)) => st!($kind, "st.release.sys", address, value),
                }
            }
        }
    )* };
}
values!(stores);

macro_rules! impls {
    ($($op:ident $value:ty: $kind:ident $load:literal, $red:literal;)*) => { $(
        impl LoadReduce<$op> for $value {
            #[inline(always)]
            unsafe fn load_reduce(_: $op, address: *const Self, strength: Strength) -> Self {
                let bits = match strength {
                    None => ld_reduce!($kind, "weak", $load, address),
                    Some((Order::Relaxed, Scope::Cta)) => ld_reduce!($kind, "relaxed.cta", $load, address),
                    Some((Order::Relaxed, Scope::Gpu)) => ld_reduce!($kind, "relaxed.gpu", $load, address),
                    Some((Order::Relaxed, Scope::Sys)) => ld_reduce!($kind, "relaxed.sys", $load, address),
                    Some((_, Scope::Cta)) => ld_reduce!($kind, "acquire.cta", $load, address),
                    Some((_, Scope::Gpu)) => ld_reduce!($kind, "acquire.gpu", $load, address),
                    Some((_, Scope::Sys)) => ld_reduce!($kind, "acquire.sys", $load, address),
                };
                // SAFETY: values are plain bytes, and these are as many.
                unsafe { transmute_copy(&bits) }
            }
        }

        impl Red<$op> for $value {
            #[inline(always)]
            unsafe fn red(_: $op, address: *mut Self, value: Self, order: Order, scope: Scope) {
                match (order, scope) {
                    (Order::Relaxed, Scope::Cta) => write!($kind, "red.relaxed.cta", $red, address, value),
                    (Order::Relaxed, Scope::Gpu) => write!($kind, "red.relaxed.gpu", $red, address, value),
                    (Order::Relaxed, Scope::Sys) => write!($kind, "red.relaxed.sys", $red, address, value),
                    (_, Scope::Cta) => write!($kind, "red.release.cta", $red, address, value),
                    (_, Scope::Gpu) => write!($kind, "red.release.gpu", $red, address, value),
                    (_, Scope::Sys) => write!($kind, "red.release.sys", $red, address, value),
                }
            }
        }
    )* };
}
operations!(impls);
