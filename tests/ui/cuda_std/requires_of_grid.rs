use cuda_std::prelude::*;

#[kernel(requires(grid > 0))]
fn kernel(grid: u32) {
    let _ = grid;
}

fn main() {}
