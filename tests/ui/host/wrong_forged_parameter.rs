//! `KernelParam` is unsafe to implement: a type could hide that it holds a slice.

use devcomm_types::{KernelParam, Slice};

#[derive(Clone, Copy)]
#[repr(transparent)]
struct Hidden(&'static [u32]);

impl KernelParam for Hidden {
    type Abi = Slice<u32>;
    const HOLDS_SLICE: bool = false;
}

fn main() {}
