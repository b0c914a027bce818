//! The first kernel, with many blocks.

// ANCHOR: kernel
use cuda_std::prelude::*;
use nccl_device::{BarrierIndex, Coop, DevComm, GridBarrier, MemoryOrder, Window};

/// Scales `x` as `normalize` does, with any number of blocks, the same on every rank. `sums` has an
/// element for each block of each rank.
///
/// # Safety
///
/// `word`, the grid barrier's, is on this GPU, was 0 before the first launch, and has no other use.
#[kernel(requires(
    block.x % 32 == 0,
    block.y * block.z == 1,
    x.len() <= out.len(),
    comm.n_ranks() as u64 * grid.count() <= sums.len() as u64,
))]
pub unsafe fn normalize_by_blocks(
    comm: DevComm,
    x: Window<f32>,
    sums: Window<f32>,
    out: Window<f32>,
    word: *mut u32,
    scale: f32,
) {
    let (team, coop) = (comm.lsa_team(), Coop::cta());
    let (block, blocks) = (thread::block_idx_x() as usize, thread::grid_dim_x() as usize);
    let mut ranks = comm.lsa_barrier(coop, BarrierIndex::this_block());
    // SAFETY: the caller passes a word that was 0 before the first launch, for this kernel alone.
    let mut grid = unsafe { GridBarrier::new(&comm, word) };

    let mut mine = 0.0;
    for i in thread::grid_strided(x.len()) {
        // SAFETY: the index is below the length, and no kernel writes x.
        let value = unsafe { x.local().load(i) };
        mine += value * value;
    }
    // SAFETY: all threads call it.
    let mine = unsafe { block_sum(mine) };

    // Every rank has begun, so it does not read the sums of the previous launch any more.
    ranks.sync(MemoryOrder::Acquire);
    for peer in coop.strided(team.n_ranks as u32) {
        let slot = team.rank as usize * blocks + block;
        // SAFETY: the launch has checked the length; each block of each rank has an element.
        unsafe { sums.lsa(peer as i32).store(slot, mine) };
    }
    // After the ranks' barrier the sums of this block in every rank are here; after the grid's
    // barrier, those of all blocks.
    ranks.sync(MemoryOrder::AcqRel);
    grid.sync();

    let mut total = 0.0;
    for slot in 0..team.n_ranks as usize * blocks {
        // SAFETY: the launch has checked the length of `sums`; the barriers order the accesses.
        total += unsafe { sums.local().load(slot) };
    }
    let factor = scale / total.sqrt();
    for i in thread::grid_strided(x.len()) {
        // SAFETY: the launch has checked the length of out.
        unsafe { out.local().store(i, x.local().load(i) * factor) };
    }
}
// ANCHOR_END: kernel
