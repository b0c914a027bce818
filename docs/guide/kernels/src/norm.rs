//! The first kernel: a vector that is spread over the ranks, scaled to a given length.

// ANCHOR: kernel
use cuda_std::prelude::*;
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};

/// Scales a vector: `out[i] = x[i] * scale / sqrt(sum of the squares of all ranks' x)`.
///
/// Grid: one block. Block: whole warps.
#[kernel(requires(
    grid.count() == 1,
    block.x % 32 == 0,
    block.y * block.z == 1,
    x.len() <= out.len(),
    comm.n_ranks() as usize <= sums.len(),
))]
pub fn normalize(comm: DevComm, x: Window<f32>, sums: Window<f32>, out: Window<f32>, scale: f32) {
    let (team, coop) = (comm.lsa_team(), Coop::cta());
    let mut barrier = comm.lsa_barrier(coop, BarrierIndex::this_block());

    // Each thread squares every block_dim-th element; the block adds them up.
    let mut mine = 0.0;
    for i in coop.strided(x.len()) {
        // SAFETY: the index is below the length, and no kernel writes x.
        let value = unsafe { x.local().load(i) };
        mine += value * value;
    }
    // SAFETY: all threads call it.
    let mine = unsafe { block_sum(mine) };

    // Every rank has begun, so it no longer reads the sums of an earlier launch.
    barrier.sync(MemoryOrder::Acquire);
    for peer in coop.strided(team.n_ranks as u32) {
        // SAFETY: the launch has checked the length; each rank writes an element of its own.
        unsafe { sums.lsa(peer as i32).store(team.rank as usize, mine) };
    }
    // Every rank's sum is here.
    barrier.sync(MemoryOrder::AcqRel);

    let mut total = 0.0;
    for rank in 0..team.n_ranks as usize {
        // SAFETY: the launch has checked the length of `sums`; the barrier orders the accesses.
        total += unsafe { sums.local().load(rank) };
    }
    let factor = scale / total.sqrt();
    for i in coop.strided(x.len()) {
        // SAFETY: the launch has checked the length of out.
        unsafe { out.local().store(i, x.local().load(i) * factor) };
    }
}
// ANCHOR_END: kernel
