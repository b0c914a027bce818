//! Neither does an arrival.

use nccl_device::{BarrierIndex, Coop, DevComm, LsaBarrier, MemoryOrder};

fn kernel(comm: &DevComm) {
    let index = BarrierIndex::this_block();
    let arrival = LsaBarrier::with(Coop::cta(), comm, index, |barrier| barrier.arrive(MemoryOrder::Release));
    arrival.wait(MemoryOrder::Acquire);
}

fn main() {
    let _ = kernel as fn(_);
}
