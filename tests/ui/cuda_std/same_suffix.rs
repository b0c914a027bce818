use cuda_std::prelude::*;

mod other {
    #[allow(non_camel_case_types)]
    pub type f32 = u32;
}

#[kernel(T = [f32, other::f32])]
fn k<T>(x: *mut T) {}

fn main() {}
