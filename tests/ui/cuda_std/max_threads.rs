use cuda_std::prelude::*;

#[kernel(max_threads = 2048)]
fn k() {}

fn main() {}
