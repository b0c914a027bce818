use cuda_std::prelude::*;

#[repr(C, align(16))]
#[derive(Clone, Copy, KernelParam)]
struct Job {
    first: u64,
    last: u64,
}

fn main() {}
