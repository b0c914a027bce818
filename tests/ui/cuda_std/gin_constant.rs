use cuda_std::prelude::*;

#[kernel(B = gin)]
fn k<const B: u32>(x: u32) {}

fn main() {}
