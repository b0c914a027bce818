//! A sum over GPUs.

use cuda_std::prelude::*;
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};

/// Adds up `send` over all GPUs, by plain loads over NVLink: `out[i]` is the sum of `send[i]`.
///
/// Grid: any, up to the device communicator's LSA barriers, the same on every GPU. Block: any.
#[kernel(requires(out.len() <= send.len()))]
pub fn sum_of_all(comm: DevComm, send: Window<f32>, out: Window<f32>) {
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    // Every GPU's input is there.
    barrier.sync(MemoryOrder::Acquire);
    for i in thread::grid_strided(out.len()) {
        // SAFETY: i is below the length of both windows, which the launch checks; nothing writes
        // `send` between the barriers, and one thread writes each element of `out`.
        unsafe {
            let parts = (0..comm.lsa_team().n_ranks).map(|peer| send.lsa(peer).load(i));
            out.local().store(i, parts.sum());
        }
    }
    // Every GPU has read what it needs.
    barrier.sync(MemoryOrder::Release);
}
