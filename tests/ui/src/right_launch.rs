//! All arguments fit.

use devcomm_host::{DevCommResource, Kernels, LaunchConfig, Stream, Window};
use devcomm_kernels::lsa_allreduce;

fn launch(
    kernels: &Kernels,
    stream: &Stream,
    comm: &DevCommResource,
    send: &Window<f32>,
    recv: &Window<f32>,
) {
    let config = LaunchConfig::new(1, 32);
    // SAFETY: never run.
    let _ =
        unsafe { kernels.launch(stream, lsa_allreduce::<f32>, config, (comm, send, recv, 1024)) };
}

fn main() {
    let _ = launch;
}
