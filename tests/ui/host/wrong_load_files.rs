//! Machine code of a file runs under the name of a kernel: loading it is unsafe.

use devcomm_host::{Context, Kernels};

fn load(context: &Context) {
    let _ = Kernels::load_files(context, &["sum.cubin"]);
}

fn main() {
    let _ = load;
}
