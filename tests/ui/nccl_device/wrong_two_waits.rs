//! An arrival is waited for once.

use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder};

fn kernel(comm: &DevComm) {
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    let arrival = barrier.arrive(MemoryOrder::Release);
    arrival.wait(MemoryOrder::Acquire);
    arrival.wait(MemoryOrder::Acquire);
}

fn main() {
    let _ = kernel as fn(_);
}
