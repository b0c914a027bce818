//! A sum over the ranks of the LSA team, without a barrier.

// ANCHOR: kernel
use cuda_std::prelude::*;
use nccl_device::{Coop, DevComm, LlA2aBuffer, LlA2aHandle};

/// Scales `x` as `normalize` does, in place and without a window: ranks send each other their sums
/// of squares as messages.
///
/// # Safety
///
/// `exchange` is for one block and an element of 4 bytes per rank, and `x` has `len` elements.
#[kernel(requires(grid.count() == 1, block.x % 32 == 0, block.y * block.z == 1))]
pub unsafe fn normalize_by_message(
    comm: DevComm,
    exchange: LlA2aHandle,
    x: *mut f32,
    len: usize,
    scale: f32,
) {
    let (coop, block, blocks) = (Coop::cta(), 0, 1);
    let mut mine = 0.0;
    for i in coop.strided(len) {
        // SAFETY: the index is below `len`, and the caller passes a pointer to `len` elements.
        let value = unsafe { mem::load(x.add(i)) };
        mine += value * value;
    }
    // SAFETY: all threads call it; the caller passes a handle for one block.
    let (mine, buffer) =
        unsafe { (block_sum(mine), LlA2aBuffer::new(&comm, comm.lsa_team(), exchange, blocks)) };
    let total = buffer.all_reduce(coop, block, mine, |a, b| a + b);
    let factor = scale / total.sqrt();
    for i in coop.strided(len) {
        // SAFETY: the index is below `len`; this thread alone has loaded the element.
        unsafe { mem::store(x.add(i), mem::load(x.add(i)) * factor) };
    }
}
// ANCHOR_END: kernel
