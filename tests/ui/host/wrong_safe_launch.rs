//! A kernel that is an `unsafe fn` is launched in unsafe code.

use devcomm_host::{DevCommResource, Stream, SymmetricBuffer, Window};
use devcomm_kernels::gin_put_signal;

type Nanos = SymmetricBuffer<u64>;

fn launch(stream: &Stream, comm: &DevCommResource, window: &Window<u8>, nanos: &Nanos) {
    let args = gin_put_signal::args(comm, window, window, 1024, 1, nanos);
    let _ = args.grid(1).block(32).launch(stream);
}

fn main() {
    let _ = launch;
}
