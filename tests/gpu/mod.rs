//! What the GPU tests share. Each file of them is one program, and includes this.

use devcomm::{Error, World};

/// Runs `body` with a world of `wanted` GPUs, one thread a rank, or skips the test. Prints which, for `cargo xtask test`.
pub fn with_gpus(name: &str, wanted: usize, body: impl FnOnce(World)) {
    match World::threads(wanted) {
        Ok(world) => {
            body(world);
            println!("GPU-TEST {name}: ran");
        }
        Err(reason @ (Error::NoDriver { .. } | Error::NoGpu | Error::TooFewGpus { .. })) => {
            println!("GPU-TEST {name}: skipped ({reason})")
        }
        Err(error) => panic!("{error}"),
    }
}
