//! The implementation on the GPU: each function is one instruction or a few.
//!
//! `cuda_builder` marks every inline assembly call `convergent` before LLVM optimises, so barriers,
//! shuffles and votes keep their position in the control flow. Instructions that order memory are
//! not `nomem`: LLVM moves no access across them.

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
