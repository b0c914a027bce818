//! A target launches kernels in unsafe code, also one whose own launch would be safe.

use devcomm_host::{DevCommResource, LaunchConfig, LaunchTarget, Stream, Window};
use devcomm_kernels::lsa_allreduce;

fn launch(stream: &Stream, comm: &DevCommResource, send: &Window<f32>, recv: &Window<f32>) {
    let (config, args) = (LaunchConfig::new(1, 32), (comm, send, recv, 1024));
    let _ = stream.launch_kernel::<lsa_allreduce<f32>, _>(config, args, true);
}

fn main() {
    let _ = launch;
}
