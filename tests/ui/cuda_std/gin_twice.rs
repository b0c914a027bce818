use cuda_std::prelude::*;

#[kernel(A = gin, B = gin)]
fn k<A: Copy, B: Copy>(x: u32) {}

fn main() {}
