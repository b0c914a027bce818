use cuda_std::prelude::*;

#[kernel]
fn k(x: &f32) {}

fn main() {}
