use cuda_std::prelude::*;

#[kernel(T = [4])]
fn k<T>(x: *mut T) {}

fn main() {}
