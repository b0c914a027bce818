//! A launch has a grid.

use devcomm_host::{DevCommResource, Stream, Window};
use devcomm_kernels::lsa_allreduce;

fn launch(stream: &Stream, comm: &DevCommResource, send: &Window<f32>, recv: &Window<f32>) {
    let _ = lsa_allreduce::<f32>::args(comm, send, recv, 1024).block(32).launch(stream);
}

fn main() {
    let _ = launch;
}
