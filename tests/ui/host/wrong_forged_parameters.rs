//! `KernelArgs` is unsafe to implement: parameters could have other sizes than the kernel's.

use std::ffi::c_void;

use devcomm_types::KernelArgs;
use devcomm_types::kernel::MemoryRef;

#[derive(Clone, Copy)]
struct Forged;

impl KernelArgs for Forged {
    type Abi = u32;
    const TAKES_DEV_COMM: bool = false;
    const HOLD_SLICE: bool = false;
    const SIZES: &'static [usize] = &[1 << 20];
    const MEMORY: &'static [&'static [MemoryRef]] = &[];

    unsafe fn from_abi(_abi: u32) -> Self {
        Self
    }

    unsafe fn read(_addresses: &[*const c_void]) -> u32 {
        0
    }

    fn with_pointers<R>(_abi: &u32, f: impl FnOnce(&mut [*mut c_void]) -> R) -> R {
        f(&mut [])
    }
}

fn main() {}
