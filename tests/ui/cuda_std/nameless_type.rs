use cuda_std::prelude::*;

#[kernel(T = [[f32; 4]])]
fn k<T>(x: *mut T) {}

fn main() {}
