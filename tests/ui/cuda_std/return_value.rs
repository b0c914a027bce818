use cuda_std::prelude::*;

#[kernel]
fn k(x: u32) -> u32 {
    x
}

fn main() {}
