use cuda_std::prelude::*;

#[derive(Clone, Copy, KernelParam)]
struct Job {
    count: usize,
}

fn main() {}
