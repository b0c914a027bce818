//! The GPU's side: each function is an instruction or a few.
//!
//! The builder marks every call of inline assembly convergent before LLVM optimises, so barriers,
//! shuffles and votes keep their place in the control flow. What orders memory has no `nomem`: LLVM
//! moves no access across it.

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
pub(crate) use threads::*;
