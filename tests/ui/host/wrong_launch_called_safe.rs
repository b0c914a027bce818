//! A launch of a kernel that is an `unsafe fn` cannot be declared safe.

use devcomm_host::{DevCommResource, Stream, SymmetricBuffer, Window};
use devcomm_kernels::gin_put_signal;
use devcomm_types::launch::Unset;
use devcomm_types::{Launch, Safe};

type Nanos = SymmetricBuffer<u64>;

fn launch(stream: &Stream, comm: &DevCommResource, window: &Window<u8>, nanos: &Nanos) {
    let args = (comm, window, window, 1024, 1, nanos);
    let launch = Launch::<gin_put_signal, _, Safe, Unset, Unset>::new(args);
    let _ = launch.grid(1).block(32).launch(stream);
}

fn main() {
    let _ = launch;
}
