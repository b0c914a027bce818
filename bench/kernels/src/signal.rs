//! Ping-pong of signals without data between two neighbouring ranks: over NVLink by flags, and over
//! the network by signals of GIN's PROXY back end.

use cuda_std::prelude::*;
use nccl_device::gin::Proxy;
use nccl_device::{Coop, DevComm, Flag, MemoryOrder, Window};

/// Makes `rounds` round trips: the even rank signals the odd rank, which then signals the even one.
///
/// `words` has three elements: the signals that this launch has received, which it writes; the flag
/// that the peer sets; and the value of the flag at the end of the previous launch. The last two
/// are initially 0.
///
/// Grid: one block. Block: any, one-dimensional.
///
/// # Safety
///
/// All ranks are in one LSA team, every rank passes the same `rounds`, and nothing else accesses
/// the window until the kernel has ended in every rank.
#[kernel(requires(words.len() >= 3))]
pub unsafe fn lsa_signal(comm: DevComm, words: Window<u32>, rounds: u32) {
    let (team, cta, mine) = (comm.lsa_team(), Coop::cta(), words.local());
    let peer = team.rank ^ 1;
    if peer >= team.n_ranks {
        return;
    }
    // SAFETY: `requires` gives the window three words, and the peer's flag is one of them.
    unsafe {
        let flag = Flag::new(&comm, words, 1);
        let base = mine.load(2);
        for round in 1..rounds + 1 {
            let value = base.wrapping_add(round);
            if team.rank % 2 == 0 {
                flag.post(cta, peer, value);
                flag.wait_at_least(cta, value);
            } else {
                flag.wait_at_least(cta, value);
                flag.post(cta, peer, value);
            }
        }
        thread::sync_threads();
        if cta.thread_rank() == 0 {
            mine.store(0, flag.get().wrapping_sub(base));
            mine.store(2, base.wrapping_add(rounds));
        }
    }
}

/// Does the same as [`lsa_signal`](fn@lsa_signal), by signal 0, whose shadow counts the signals of
/// all launches. `words` has one element.
///
/// Grid: one block. Block: one warp.
///
/// # Safety
///
/// Every rank passes the same `rounds`, nothing else accesses the window or the signal until the
/// kernel has ended in every rank, and the GIN type of the device communicator is PROXY.
#[kernel(requires(words.len() >= 1))]
pub unsafe fn gin_signal(comm: DevComm, words: Window<u32>, rounds: u32) {
    let (world, warp) = (comm.world_team(), Coop::warp());
    let peer = world.rank ^ 1;
    if peer >= world.n_ranks {
        return;
    }
    let gin = comm.gin::<Proxy>(0);
    let arrived = comm.signal(0);
    // All lanes read the shadow before the first lane changes it below.
    let base = gin.signal_shadow(arrived);
    warp.sync();
    // The even rank signals in the even steps, and the odd rank in the odd ones.
    let is_even = world.rank % 2 == 0;
    for step in 0..2 * rounds {
        if is_even == (step % 2 == 0) {
            gin.signal(warp, world, peer, arrived.inc().weak());
        } else {
            if warp.thread_rank() == 0 {
                gin.expect(arrived, 1);
            }
            // It begins with a barrier, after which all lanes see the new shadow.
            gin.wait_signal_meets_shadow(warp, arrived, MemoryOrder::Acquire);
        }
    }
    gin.flush(warp, MemoryOrder::Acquire);
    if warp.thread_rank() == 0 {
        let received = gin.read_signal(arrived, MemoryOrder::Acquire) - base;
        // SAFETY: `requires` gives the window a word, which one thread writes.
        unsafe { words.local().store(0, received as u32) };
    }
}
