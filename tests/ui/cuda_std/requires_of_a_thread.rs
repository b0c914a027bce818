use cuda_std::prelude::*;

#[kernel(requires(thread::block_dim_x() == 32))]
fn kernel(_x: u32) {}

fn main() {}
