//! The kernel is not instantiated for f64.

use devcomm_host::{DevCommResource, Kernels, LaunchConfig, Stream, Window};
use devcomm_kernels::lsa_allreduce;

fn launch(
    kernels: &Kernels,
    stream: &Stream,
    comm: &DevCommResource,
    send: &Window<f64>,
    recv: &Window<f64>,
) {
    let config = LaunchConfig::new(1, 32);
    // SAFETY: never run.
    let _ =
        unsafe { kernels.launch(stream, lsa_allreduce::<f64>, config, (comm, send, recv, 1024)) };
}

fn main() {
    let _ = launch;
}
