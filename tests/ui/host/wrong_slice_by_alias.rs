//! A launch with a slice is unsafe, also if the parameter's type is an alias.

use cuda_std::prelude::*;
use devcomm_host::Stream;
use devcomm_types::Slice;

type Numbers = &'static [u32];

#[kernel]
fn read(_numbers: Numbers) {}

fn launch(stream: &Stream) {
    let _ = read::args(Slice::new(16, 1 << 40)).grid(1).block(32).launch(stream);
}

fn main() {
    let _ = launch;
}
