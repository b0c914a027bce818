//! A kernel is a type, not a value.

use devcomm_host::Context;
use devcomm_kernels::{gin_put_signal, lsa_allreduce};

fn resident(context: &Context) {
    let _ = context.resident_blocks::<lsa_allreduce<f32>>(128, 0);
    let _ = context.resident_blocks(gin_put_signal, 128, 0);
}

fn main() {
    let _ = resident;
}
