use devcomm_host::{DevCommResource, Kernels, LaunchConfig, Stream, Window};
use devcomm_kernels as kernels;

/// A float where the kernel takes a count.
fn launch(kernels: &Kernels, stream: &Stream, comm: &DevCommResource, send: &Window<f32>, recv: &Window<f32>, other: &Window<f64>) {
    let config = LaunchConfig::new(1, 32);
    let _ = other;
    // SAFETY: never run.
    let _ = unsafe { kernels.launch(stream, kernels::lsa_allreduce::<f32>, config, (comm, send, recv, 1024.0)) };
}

fn main() {
    let _ = launch;
}
