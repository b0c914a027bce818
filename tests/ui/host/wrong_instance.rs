//! The kernel is not instantiated for f64.

use devcomm_host::{DevCommResource, Stream, Window};
use devcomm_kernels::lsa_allreduce;

fn launch(stream: &Stream, comm: &DevCommResource, send: &Window<f64>, recv: &Window<f64>) {
    let _ = lsa_allreduce::args(comm, send, recv, 1024).grid(1).block(32).launch(stream);
}

fn main() {
    let _ = launch;
}
