//! A flush is waited for on the back end that it was begun on.

use nccl_device::gin::{Gdaki, Proxy};
use nccl_device::{DevComm, MemoryOrder};

fn kernel(comm: &DevComm) {
    let request = comm.gin::<Proxy>(0).flush_async(comm.world_team(), 0);
    comm.gin::<Gdaki>(0).wait_request(request, MemoryOrder::Acquire);
}

fn main() {
    let _ = kernel as fn(_);
}
