use cuda_std::prelude::*;

#[kernel]
extern "C" fn k() {}

fn main() {}
