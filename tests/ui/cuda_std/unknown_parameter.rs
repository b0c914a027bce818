use cuda_std::prelude::*;

#[kernel(U = [f32])]
fn k(x: u32) {}

fn main() {}
