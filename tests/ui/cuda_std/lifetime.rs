use cuda_std::prelude::*;

#[kernel]
fn k<'a>(x: &'a [u32]) {}

fn main() {}
