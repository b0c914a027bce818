use cuda_std::prelude::*;

#[kernel(T = [])]
fn k<T>(x: *mut T) {}

fn main() {}
