//! The barrier is not to be used between an arrival and its wait.

use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder};

fn kernel(comm: &DevComm) {
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    let arrival = barrier.arrive(MemoryOrder::Release);
    barrier.sync(MemoryOrder::AcqRel);
    arrival.wait(MemoryOrder::Acquire);
}

fn main() {
    let _ = kernel as fn(_);
}
