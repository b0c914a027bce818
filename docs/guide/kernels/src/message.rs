//! A few numbers of all ranks, without a barrier.

// ANCHOR: kernel
use cuda_std::prelude::*;
use nccl_device::{Coop, DevComm, LlA2aBuffer, LlA2aHandle};

/// As `normalize`, of `x` in place, without a window: a rank's sum of squares is a message.
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
    let coop = Coop::cta();
    let mut mine = 0.0;
    for i in coop.strided(len) {
        // SAFETY: the caller's promise.
        let value = unsafe { mem::load(x.add(i)) };
        mine += value * value;
    }
    // SAFETY: all threads call it; the memory is as the caller promises.
    let (mine, buffer) =
        unsafe { (block_sum(mine), LlA2aBuffer::new(&comm, comm.lsa_team(), exchange, 1)) };
    let total = buffer.all_reduce(coop, 0, mine, |a, b| a + b);
    let factor = scale / total.sqrt();
    for i in coop.strided(len) {
        // SAFETY: as above; this thread alone has loaded the element.
        unsafe { mem::store(x.add(i), mem::load(x.add(i)) * factor) };
    }
}
// ANCHOR_END: kernel
