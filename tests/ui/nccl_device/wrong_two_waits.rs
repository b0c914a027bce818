//! An arrival is waited for once.

use nccl_device::{BarrierIndex, Coop, DevComm, LsaBarrier, MemoryOrder};

fn kernel(comm: &DevComm) {
    LsaBarrier::with(Coop::cta(), comm, BarrierIndex::this_block(), |barrier| {
        let arrival = barrier.arrive(MemoryOrder::Release);
        arrival.wait(MemoryOrder::Acquire);
        arrival.wait(MemoryOrder::Acquire);
    });
}

fn main() {
    let _ = kernel as fn(_);
}
