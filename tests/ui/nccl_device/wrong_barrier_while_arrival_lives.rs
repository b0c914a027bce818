//! The barrier is not to be used between an arrival and its wait.

use nccl_device::{BarrierIndex, Coop, DevComm, LsaBarrier, MemoryOrder};

fn kernel(comm: &DevComm) {
    LsaBarrier::with(Coop::cta(), comm, BarrierIndex::this_block(), |barrier| {
        let arrival = barrier.arrive(MemoryOrder::Release);
        barrier.sync(MemoryOrder::AcqRel);
        arrival.wait(MemoryOrder::Acquire);
    });
}

fn main() {
    let _ = kernel as fn(_);
}
