use cuda_std::prelude::*;

#[kernel]
fn k((x, y): (u32, u32)) {}

fn main() {}
