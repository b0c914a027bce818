//! Printing by CUDA's `vprintf`.

use core::arch::nvptx::vprintf;
use core::marker::PhantomData;

use crate::io::{Arguments, FORMAT, Pieces, printf_format};

struct Format<P, A>(PhantomData<(P, A)>);

impl<P: Pieces, A: Arguments> Format<P, A> {
    const TEXT: &'static [u8; FORMAT] = &printf_format::<P, A>();
}

pub(crate) fn print<P: Pieces, A: Arguments>(arguments: A) {
    arguments.with_slots(|slots| {
        // SAFETY: the format ends in 0, and its specifiers, each for an 8-byte value, match the
        // slots.
        unsafe { vprintf(Format::<P, A>::TEXT.as_ptr(), slots.as_ptr().cast()) };
    });
}
