//! A put that is not posted is not sent.
#![deny(unused_must_use)]

use nccl_device::gin::GinBackend;
use nccl_device::{DevComm, Window};

fn kernel<B: GinBackend>(comm: &DevComm, target: Window<f32>, source: Window<f32>) {
    let gin = comm.gin::<B>(0);
    // SAFETY: this is compiled, and never run.
    unsafe {
        gin.put(comm.world_team(), 0, target.at(0), source.at(0), 1);
        gin.put_value(comm.world_team(), 0, target.at(0), 1.0);
        gin.get(comm.world_team(), 0, source.at(0), target.at(0), 1);
    }
    gin.flush_async(comm.world_team(), 0);
}

fn main() {
    let _ = kernel::<nccl_device::gin::Proxy>;
}
