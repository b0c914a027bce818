//! Signals and counters are different numbers.

use nccl_device::gin::GinBackend;
use nccl_device::{Coop, DevComm, MemoryOrder};

fn kernel<B: GinBackend>(comm: &DevComm) {
    comm.gin::<B>(0).wait_counter(Coop::cta(), comm.signal(0), 1, MemoryOrder::Relaxed);
}

fn main() {
    let _ = kernel::<nccl_device::gin::Proxy>;
}
