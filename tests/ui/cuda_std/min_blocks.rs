use cuda_std::prelude::*;

#[kernel(min_blocks = 1)]
fn k() {}

fn main() {}
