use cuda_std::prelude::*;

#[kernel]
async fn k(x: u32) {}

fn main() {}
