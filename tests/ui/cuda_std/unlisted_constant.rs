use cuda_std::prelude::*;

#[kernel(T = [f32])]
fn k<T, const N: usize>(x: *mut T) {}

fn main() {}
