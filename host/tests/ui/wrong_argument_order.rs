use devcomm_host::{DevCommResource, Kernels, LaunchConfig, Stream, Window};
use devcomm_kernels as kernels;

/// The communicator comes first.
fn launch(kernels: &Kernels, stream: &Stream, comm: &DevCommResource, send: &Window<f32>, recv: &Window<f32>, other: &Window<f64>) {
    let config = LaunchConfig::new(1, 32);
    let _ = other;
    // SAFETY: never run.
    let _ = unsafe { kernels.launch(stream, kernels::lsa_allreduce::<f32>, config, (send, comm, recv, 1024)) };
}

fn main() {
    let _ = launch;
}
