//! A launch with a slice is unsafe, also if the slice is in a struct.

use cuda_std::prelude::*;
use devcomm_host::Stream;
use devcomm_types::Slice;

#[repr(C)]
#[derive(Clone, Copy, KernelParam)]
struct Job {
    numbers: &'static [u32],
}

#[kernel]
fn read(_job: Job) {}

fn launch(stream: &Stream) {
    let job = JobArgs { numbers: Slice::new(16, 1 << 40) };
    let _ = read::args(job).grid(1).block(32).launch(stream);
}

fn main() {
    let _ = launch;
}
