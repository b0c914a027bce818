//! A put moves elements of one type.

use nccl_device::gin::GinBackend;
use nccl_device::{Coop, DevComm, Window};

fn kernel<B: GinBackend>(comm: &DevComm, target: Window<f32>, source: Window<u32>) {
    let gin = comm.gin::<B>(0);
    // SAFETY: this is compiled, and never run.
    unsafe { gin.put(comm.world_team(), 0, target.at(0), source.at(0), 1).post(Coop::cta()) };
}

fn main() {
    let _ = kernel::<nccl_device::gin::Proxy>;
}
