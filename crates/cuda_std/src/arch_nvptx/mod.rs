//! The implementation on the GPU: each function is one instruction or a few.
//!
//! `cuda_builder` marks every inline assembly call `convergent` before LLVM optimises, so barriers,
//! shuffles and votes keep their position in the control flow. Instructions that order memory are
//! not `nomem`: LLVM moves no access across them.

/// Defines functions from a table, each of one instruction or a few. The options of the assembly
/// come first. A function's template is followed by the operands that it reads, in `in(..)`, by
/// those that it writes, in `out(..)`, each after the class of its register, and by the function's
/// result.
///
/// An instruction of a table accesses memory only at the addresses that its function gets; all its
/// other effects are on the calling thread. What it needs in addition, such as valid addresses or
/// that all threads come to it, somebody must ensure: a comment in the table says who does.
macro_rules! instructions {
    ($options:tt) => {};
    ($options:tt $(#[$meta:meta])* fn $($rest:tt)*) => {
        instructions!(@item $options [$(#[$meta])*] [] $($rest)*);
    };
    ($options:tt $(#[$meta:meta])* unsafe fn $($rest:tt)*) => {
        instructions!(@item $options [$(#[$meta])*] [unsafe] $($rest)*);
    };
    (
        @item [$($option:ident)+] [$($meta:tt)*] [$($unsafe:tt)*]
        $name:ident($($params:tt)*) $(-> $returns:ty)?: $template:literal
        $(, in($($class:ident: $($operand:ident)+);+))?
        $(, out($out_class:ident: $($out:ident)+) => $result:expr)?;
        $($rest:tt)*
    ) => {
        $($meta)*
        pub(crate) $($unsafe)* fn $name($($params)*) $(-> $returns)? {
            $($(let $out;)+)?
            // SAFETY: the comments in the table say who ensures what the instruction needs.
            unsafe {
                asm!(
                    $template,
                    $($($($operand = in($class) $operand,)+)+)?
                    $($($out = out($out_class) $out,)+)?
                    options($($option),+),
                );
            }
            $($result)?
        }
        instructions!([$($option)+] $($rest)*);
    };
}

/// Defines functions from a table, each of one instruction that has a constant operand and accesses
/// no memory.
macro_rules! const_instructions {
    ($($name:ident $template:literal;)*) => { $(
        pub(crate) fn $name<const N: u32>() {
            // SAFETY: the instruction accesses no memory.
            unsafe { asm!($template, const N, options(nostack)) }
        }
    )* };
}

mod atomics;
mod bulk;
mod memory;
mod multimem;
mod numbers;
mod panic;
mod print;
mod tensor;
mod threads;

pub use crate::atomic::{Order, Scope};
pub use crate::warp::Shuffle;

pub(crate) use atomics::fence;
pub(crate) use bulk::*;
pub(crate) use memory::*;
pub(crate) use numbers::*;
pub(crate) use print::print;
pub(crate) use tensor::*;
pub use tensor::{Factor, Sums};
pub(crate) use threads::*;
