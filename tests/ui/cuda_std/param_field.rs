use cuda_std::prelude::*;

#[repr(C)]
#[derive(Clone, Copy, KernelParam)]
struct Job {
    patience: std::time::Duration,
}

fn main() {}
