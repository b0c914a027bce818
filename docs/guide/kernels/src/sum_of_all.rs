//! The kernel of the README, which shows the function as it is here.

// ANCHOR: kernel
use cuda_std::prelude::*;
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};

/// Adds up `send` over all GPUs, by plain loads over NVLink: `out[i]` is the sum of `send[i]`.
#[kernel(requires(out.len() <= send.len()))]
pub fn sum_of_all(comm: DevComm, send: Window<f32>, out: Window<f32>) {
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire); // every GPU's input is there, and may be loaded
    for i in thread::grid_strided(out.len()) {
        // SAFETY: `requires` keeps i below both lengths, and the barriers order the accesses.
        let parts = (0..comm.lsa_team().n_ranks).map(|peer| unsafe { send.lsa(peer).load(i) });
        // SAFETY: i is below the length of `out`, and one thread writes the element.
        unsafe { out.local().store(i, parts.sum()) };
    }
    barrier.sync(MemoryOrder::Release); // every GPU has read what it needs
}
// ANCHOR_END: kernel
