use cuda_std::prelude::*;

#[kernel(arch = "hopper")]
fn k() {}

fn main() {}
