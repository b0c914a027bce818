use cuda_std::prelude::*;
use cuda_std::tma::GridConstant;

#[repr(C)]
#[derive(Clone, Copy, KernelParam)]
struct Job {
    count: GridConstant<u64>,
}

#[kernel]
unsafe fn count(_job: Job) {}

fn main() {}
