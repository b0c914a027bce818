use cuda_std::prelude::*;

#[kernel(B = net)]
fn k<B: Copy>(x: u32) {}

fn main() {}
