//! A launch's bytes become parameters in unsafe code: they could be a slice that does not exist.

use devcomm_types::{KernelArgs, Slice};

type Parameters = (&'static [u32], u32);

fn main() {
    let (numbers, at) = Parameters::from_abi((Slice::new(16, 1 << 40), 7));
    println!("{}", numbers[at as usize]);
}
