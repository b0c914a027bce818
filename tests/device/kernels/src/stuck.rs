//! Kernels in which one rank is absent, so that the others wait until the host aborts them.
//!
//! Each thread stores 2 to its word of `out` before its wait, and 3 after it: threads that exit in
//! the wait leave 2.

use cuda_std::prelude::*;
use nccl_device::gin::{GinBackend, VaSignal};
use nccl_device::{BarrierIndex, Coop, DevComm, FenceLevel, LlA2a, LlA2aBuffer, MemoryOrder};

use crate::extra::{Extra, Words};

const ORDER: MemoryOrder = MemoryOrder::AcqRel;

/// Returns whether this is the absent rank.
fn is_absent(comm: &DevComm) -> bool {
    comm.rank() == comm.n_ranks() - 1
}

/// Stores `step` to the thread's word.
///
/// # Safety
///
/// `out` has one word per thread.
unsafe fn store_step(out: Words, step: u64) {
    // SAFETY: `out` has one word per thread.
    unsafe { out.local().store(thread::index_1d() as usize, step) };
}

/// Waits for a peer's stores. `n` selects the wait: 0 a CTA coop at its block's barrier, 1 warp
/// coops at one barrier per warp, 2 an LL all-to-all, 3 a poll by `wait_until`.
#[kernel]
pub unsafe fn stuck_lsa(comm: DevComm, mail: Words, out: Words, extra: Extra, n: u32) {
    if is_absent(&comm) {
        return;
    }
    let cta = Coop::cta();
    // SAFETY: `out` has one word per thread; the test creates the resources.
    unsafe {
        store_step(out, 2);
        match n {
            0 => comm.lsa_barrier(cta, BarrierIndex::this_block()).sync(ORDER),
            1 => {
                let index = BarrierIndex::new(thread::index_1d() / 32);
                comm.lsa_barrier(Coop::warp(), index).sync(ORDER);
            }
            2 => {
                let buffer =
                    LlA2aBuffer::new(&comm, comm.lsa_team(), extra.ll, thread::grid_dim_x());
                let block = thread::block_idx_x();
                buffer.with(cta, block, 1, |session: &mut LlA2a<'_, u64>| {
                    session.receive(0);
                });
            }
            _ => comm.wait_until(cta, || mail.local().load_acquire(0) == 7),
        }
        store_step(out, 3);
    }
}

/// Waits in a loop: all ranks sync 5 times, then the absent rank returns, and the others wait in
/// their loops.
#[kernel]
pub unsafe fn stuck_in_a_loop(comm: DevComm, _mail: Words, out: Words, _extra: Extra, _n: u32) {
    // SAFETY: `out` has one word per thread.
    unsafe { store_step(out, 2) };
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    for round in 0..100 {
        if round == 5 && is_absent(&comm) {
            return;
        }
        barrier.sync(ORDER);
    }
    // SAFETY: `out` has one word per thread.
    unsafe { store_step(out, 3) };
}

/// Waits for GIN. `n` selects what the kernel waits for: 0 a signal, 1 a VA signal, 2 a counter, 3
/// a signal relative to its shadow, 4 a world barrier, 5 a hybrid barrier, 6 a hybrid barrier with
/// a fence.
#[kernel(B = gin)]
pub unsafe fn stuck_gin<B: GinBackend>(
    comm: DevComm,
    mail: Words,
    out: Words,
    extra: Extra,
    n: u32,
) {
    if is_absent(&comm) {
        return;
    }
    let (coop, gin, index) = (Coop::cta(), comm.gin::<B>(0), BarrierIndex::this_block());
    let signal = extra.signal(&comm, 0);
    // SAFETY: `out` has one word per thread; the test creates the resources.
    unsafe {
        store_step(out, 2);
        match n {
            0 => gin.wait_signal(coop, signal, 3, ORDER),
            1 => gin.wait_signal(coop, VaSignal::new(mail, 5), 4, ORDER),
            2 => gin.wait_counter(coop, extra.counter(&comm, 1), 5, ORDER),
            3 => {
                gin.wait_signal_follow_shadow(coop, signal, 1 << 40, ORDER);
            }
            4 => gin.world_barrier(coop, index).sync(ORDER, FenceLevel::None),
            5 => gin.hybrid_barrier(coop, index).sync(ORDER, FenceLevel::None),
            _ => gin.hybrid_barrier(coop, index).sync(ORDER, FenceLevel::PutGet),
        }
        store_step(out, 3);
    }
}
