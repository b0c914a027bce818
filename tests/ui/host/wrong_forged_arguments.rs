//! `LaunchArgs` is unsafe to implement: an `impl` could pass a closed window as an open one.

use devcomm_types::{ArgInfo, LaunchArgs, Window};

struct Forged(Window<f32>);

impl LaunchArgs<(nccl_device::Window<f32>,)> for Forged {
    fn into_abi(self) -> (Window<f32>,) {
        (self.0,)
    }

    fn info(&self) -> ArgInfo<'_> {
        ArgInfo::default()
    }
}

fn main() {}
