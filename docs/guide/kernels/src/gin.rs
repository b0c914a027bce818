//! A put over the network.

// ANCHOR: ring
use cuda_std::prelude::*;
use nccl_device::gin::GinBackend;
use nccl_device::{BarrierIndex, Coop, DevComm, FenceLevel, MemoryOrder, Window};

/// Puts `source` to the next rank's `target`, and doubles the elements that arrive in this rank's.
///
/// Grid: one block. Connections: `GinConnectionType::Full`.
#[kernel(B = gin, requires(source.len() <= target.len(), grid.count() == 1))]
pub fn ring<B: GinBackend>(comm: DevComm, source: Window<f32>, target: Window<f32>) {
    let (world, coop) = (comm.world_team(), Coop::cta());
    let gin = comm.gin::<B>(0);
    let arrived = comm.signal(0);

    // The next rank's kernel has begun, so its target may be written.
    let mut barrier = gin.world_barrier(coop, BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire, FenceLevel::None);

    // SAFETY: the lengths are checked; the target is read after the signal, and the source is not
    // written.
    let put = unsafe { gin.put(world, world.next(), target.at(0), source.at(0), source.len()) };
    put.signal(arrived.inc()).post(coop);

    // One more increment than at the last launch: the shadow keeps what this rank has seen.
    gin.wait_signal_follow_shadow(coop, arrived, 1, MemoryOrder::Acquire);
    for i in coop.strided(source.len()) {
        let mine = target.local();
        // SAFETY: the previous rank's data has arrived, and each thread has its own elements.
        unsafe { mine.store(i, 2.0 * mine.load(i)) };
    }
    // The put has read the source: the host may write it again.
    gin.flush(coop, MemoryOrder::Relaxed);
}
// ANCHOR_END: ring
