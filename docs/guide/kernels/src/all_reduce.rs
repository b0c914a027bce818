//! All-reduces in one step and in two.

// ANCHOR: one_shot
use cuda_std::prelude::*;
use cuda_std::reduce::Sum;
use nccl_device::reduce_copy::{lsa_reduce, lsa_reduce_copy};
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};

/// Returns part `part` of `count` elements that are divided in `parts`, in whole vectors of 16
/// bytes (4 elements): the index of its first element, and its number of elements.
fn share(count: usize, part: usize, parts: usize) -> (usize, usize) {
    let len = count.div_ceil(parts).next_multiple_of(4);
    let first = (part * len).min(count);
    (first, len.min(count - first))
}

/// Loads all ranks' elements, and adds them up in every rank.
///
/// Grid and block: any.
#[kernel(requires(x.len() <= out.len()))]
pub fn one_shot(comm: DevComm, x: Window<f32>, out: Window<f32>) {
    let team = comm.lsa_team();
    let (block, blocks) = (thread::block_idx_x() as usize, thread::grid_dim_x() as usize);
    let (first, len) = share(x.len(), block, blocks);
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire); // the peers' x is there
    // SAFETY: the launch has checked the lengths; each block writes its share.
    unsafe {
        let to = out.local().as_ptr().add(first);
        lsa_reduce(Coop::cta(), Sum, x, first, to, len, team);
    }
    barrier.sync(MemoryOrder::Release); // the peers have read this rank's x
}
// ANCHOR_END: one_shot

// ANCHOR: two_shot
/// Adds up a part of the elements in each rank, and stores the sums to all ranks.
///
/// Grid and block: any.
#[kernel(requires(x.len() <= out.len()))]
pub fn two_shot(comm: DevComm, x: Window<f32>, out: Window<f32>) {
    let team = comm.lsa_team();
    let (block, blocks) = (thread::block_idx_x() as usize, thread::grid_dim_x() as usize);
    // The part of this block among the blocks of all ranks.
    let part = team.rank as usize * blocks + block;
    let (first, len) = share(x.len(), part, team.n_ranks as usize * blocks);
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire); // the peers' x is there, and their out may be written
    // SAFETY: the launch has checked the lengths; one block of one rank writes a part.
    unsafe { lsa_reduce_copy(Coop::cta(), Sum, x, first, out, first, len, team) };
    barrier.sync(MemoryOrder::Release); // every rank has stored its sums, also to this one
}
// ANCHOR_END: two_shot
