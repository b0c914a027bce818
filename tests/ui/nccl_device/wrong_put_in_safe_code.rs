//! Operations that move data are unsafe.

use nccl_device::gin::GinBackend;
use nccl_device::{Coop, DevComm, Window};

fn kernel<B: GinBackend>(comm: &DevComm, target: Window<f32>, source: Window<f32>) {
    comm.gin::<B>(0).put(comm.world_team(), 0, target.at(0), source.at(0), 1).post(Coop::cta());
    source.local().store(0, 1.0);
}

fn main() {
    let _ = kernel::<nccl_device::gin::Proxy>;
}
