//! A session does not outlive its scope: it would lose its epoch.

use nccl_device::{BarrierIndex, Coop, DevComm, LsaBarrier, MemoryOrder};

fn kernel(comm: &DevComm) {
    let barrier = LsaBarrier::with(Coop::cta(), comm, BarrierIndex::this_block(), |barrier| barrier);
    barrier.sync(MemoryOrder::AcqRel);
}

fn main() {
    let _ = kernel as fn(_);
}
