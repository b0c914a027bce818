use cuda_std::prelude::*;

#[kernel]
fn k<T: Accumulate>(x: *mut T) {}

fn main() {}
