//! An arrival does not outlive its session.

use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder};

fn kernel(comm: &DevComm) {
    let arrival = {
        let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
        barrier.arrive(MemoryOrder::Release)
    };
    arrival.wait(MemoryOrder::Acquire);
}

fn main() {
    let _ = kernel as fn(_);
}
