use cuda_std::prelude::*;
use nccl_device::gin::GinBackend;

#[kernel(T = [f32])]
fn k<T: Copy, B: GinBackend>(_x: *mut T) {}

fn main() {}
