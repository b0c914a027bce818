//! A wait with a timeout may not have waited.
#![deny(unused_must_use)]

use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Timeout};

fn kernel(comm: &DevComm) {
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync_timeout(MemoryOrder::AcqRel, Timeout::millis(1));
}

fn main() {
    let _ = kernel as fn(_);
}
