//! Printing from kernels, for debugging: the implementation of [`print!`](crate::print) and
//! [`println!`](crate::println).
//!
//! The macros translate Rust's `{}` to a printf format at compile time. As with CUDA's `printf`, a
//! call writes one record to the printf buffer, and the host formats it. The text appears when the
//! host synchronises; the buffer is circular, so new records overwrite the oldest.
//!
//! # Safety model
//!
//! Safe: the format and the arguments come from one macro call and match by type. A call prints at
//! most 8 values. Values that are not [`Printable`] do not compile:
//!
//! ```compile_fail,E0277
//! cuda_std::println!("{}", "text");
//! ```
//!
//! # Example
//!
//! ```
//! use cuda_std::{println, thread};
//! fn report(sum: f32) {
//!     println!("thread {} has {sum}", thread::thread_idx_x());
//! }
//! ```

use core::fmt;

use half::{bf16, f16};

use crate::arch;
use crate::convert::{bf16_to_f32, f16_to_f32};

/// The text around the arguments: one piece more than there are arguments.
#[doc(hidden)]
pub trait Pieces {
    const PIECES: &'static [&'static str];
}

/// A value that can be printed: a number (also `f16` or `bf16`), a `bool` or a raw pointer.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be printed from a kernel",
    note = "numbers, `bool` and raw pointers can"
)]
pub trait Printable: Copy {
    /// The printf conversion specifier.
    #[doc(hidden)]
    const SPECIFIER: &'static str;
    /// Returns the value's 8 bytes in printf's argument list.
    #[doc(hidden)]
    fn slot(self) -> u64;
    /// Writes the value's text, on the host.
    #[doc(hidden)]
    fn text(self, f: &mut dyn fmt::Write) -> fmt::Result;
}

macro_rules! printable {
    ($specifier:literal, |$v:ident| $slot:expr, $shown:expr; $($type:ty)*) => { $(
        impl Printable for $type {
            const SPECIFIER: &'static str = $specifier;

            fn slot(self) -> u64 {
                let $v = self;
                $slot
            }

            fn text(self, f: &mut dyn fmt::Write) -> fmt::Result {
                let $v = self;
                write!(f, "{}", $shown)
            }
        }
    )* };
}

printable!("%llu", |v| v as u64, v; u8 u16 u32 u64 usize);
printable!("%lld", |v| v as i64 as u64, v; i8 i16 i32 i64 isize);
printable!("%g", |v| f64::from(v).to_bits(), v; f32);
printable!("%g", |v| v.to_bits(), v; f64);
printable!("%g", |v| f64::from(f16_to_f32(v)).to_bits(), v; f16);
printable!("%g", |v| f64::from(bf16_to_f32(v)).to_bits(), v; bf16);
printable!("%s", |v| if v { c"true" } else { c"false" }.as_ptr() as u64, v; bool);

macro_rules! printable_pointers {
    ($($type:ty),*) => { $(
        impl<T> Printable for $type {
            const SPECIFIER: &'static str = "%p";

            fn slot(self) -> u64 {
                self as u64
            }

            fn text(self, f: &mut dyn fmt::Write) -> fmt::Result {
                write!(f, "{self:p}")
            }
        }
    )* };
}

printable_pointers!(*const T, *mut T);

/// The arguments of one call.
#[doc(hidden)]
pub trait Arguments: Copy {
    const SPECIFIERS: &'static [&'static str];
    fn with_slots<R>(self, f: impl FnOnce(&[u64]) -> R) -> R;
    fn write(self, pieces: &[&str], f: &mut dyn fmt::Write) -> fmt::Result;
}

macro_rules! arguments {
    ($($type:ident $index:tt),*) => {
        impl<$($type: Printable),*> Arguments for ($($type,)*) {
            const SPECIFIERS: &'static [&'static str] = &[$($type::SPECIFIER),*];

            fn with_slots<R>(self, f: impl FnOnce(&[u64]) -> R) -> R {
                f(&[$(self.$index.slot()),*])
            }

            fn write(self, pieces: &[&str], f: &mut dyn fmt::Write) -> fmt::Result {
                $(
                    f.write_str(pieces[$index])?;
                    self.$index.text(f)?;
                )*
                f.write_str(pieces[Self::SPECIFIERS.len()])
            }
        }
    };
}

arguments!();
arguments!(A 0);
arguments!(A 0, B 1);
arguments!(A 0, B 1, C 2);
arguments!(A 0, B 1, C 2, D 3);
arguments!(A 0, B 1, C 2, D 3, E 4);
arguments!(A 0, B 1, C 2, D 3, E 4, F 5);
arguments!(A 0, B 1, C 2, D 3, E 4, F 5, G 6);
arguments!(A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7);

/// Prints the pieces, with the arguments between them.
#[doc(hidden)]
pub fn print<P: Pieces, A: Arguments>(arguments: A) {
    arch::print::<P, A>(arguments);
}

/// The maximum length of a format in bytes, including the terminating 0.
pub(crate) const FORMAT: usize = 512;

/// Returns the printf format of the pieces and arguments, terminated by 0.
#[cfg_attr(not(any(test, target_arch = "nvptx64")), expect(dead_code, reason = "the host formats"))]
pub(crate) const fn printf_format<P: Pieces, A: Arguments>() -> [u8; FORMAT] {
    let mut out = [0; FORMAT];
    let mut len = 0;
    let mut i = 0;
    while i < P::PIECES.len() {
        len = append(&mut out, len, P::PIECES[i], true);
        if i < A::SPECIFIERS.len() {
            len = append(&mut out, len, A::SPECIFIERS[i], false);
        }
        i += 1;
    }
    out
}

/// Appends `text`. In plain text, as opposed to a specifier, `%` is doubled.
const fn append(out: &mut [u8; FORMAT], mut len: usize, text: &str, plain: bool) -> usize {
    let text = text.as_bytes();
    let mut i = 0;
    while i < text.len() {
        let times = if plain && text[i] == b'%' { 2 } else { 1 };
        let mut n = 0;
        while n < times {
            assert!(len < FORMAT - 1, "the printed text is longer than 511 bytes");
            out[len] = text[i];
            len += 1;
            n += 1;
        }
        i += 1;
    }
    len
}

#[cfg(test)]
mod tests;
