//! The source does not say which instance of the kernel is meant.

use cuda_std::prelude::*;
use devcomm_host::Stream;

#[kernel(T = [f32, f16])]
unsafe fn clear<T: Copy>(_out: *mut T, _count: usize) {}

fn launch(stream: &Stream, address: u64) {
    // SAFETY: this is compiled, and never run.
    let _ = unsafe { clear::args(address, 7_usize).grid(1).block(32).launch(stream) };
}

fn main() {
    let _ = launch;
}
