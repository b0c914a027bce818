//! A kernel that is an `unsafe fn` is launched in unsafe code.

use devcomm_host::{DevCommResource, Stream, Window};
use devcomm_kernels::gin_alltoall;

fn launch(stream: &Stream, comm: &DevCommResource, send: &Window<f32>, recv: &Window<f32>) {
    let _ = gin_alltoall::args(comm, send, recv, 1024).grid(1).block(32).launch(stream);
}

fn main() {
    let _ = launch;
}
