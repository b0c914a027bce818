//! A wait with a timeout may not have waited.
#![deny(unused_must_use)]

use nccl_device::{BarrierIndex, Coop, DevComm, LsaBarrier, MemoryOrder, Timeout};

fn kernel(comm: &DevComm) {
    LsaBarrier::with(Coop::cta(), comm, BarrierIndex::this_block(), |barrier| {
        barrier.sync_timeout(MemoryOrder::AcqRel, Timeout::millis(1));
    });
}

fn main() {
    let _ = kernel as fn(_);
}
