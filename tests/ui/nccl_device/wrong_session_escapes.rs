//! A session does not outlive its device communicator.

use nccl_device::{BarrierIndex, Coop, DevComm, LsaBarrier};

fn kernel<'a>(comm: DevComm) -> LsaBarrier<'a> {
    comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block())
}

fn main() {
    let _ = kernel as fn(_) -> _;
}
