use cuda_std::prelude::*;

type Numbers = &'static [u32];

#[kernel(requires(numbers.len() > 0, numbers[0] == 1))]
fn kernel(numbers: Numbers) {
    let _ = numbers;
}

fn main() {}
