//! GIN: shadows, resets, and waits that time out.

use cuda_std::prelude::*;
use nccl_device::gin::{CounterId, GinBackend, SignalId};
use nccl_device::{Coop, DevComm, MemoryOrder, Timeout, Window};

use crate::Extra;

const ORDER: MemoryOrder = MemoryOrder::Acquire;

/// A shadow follows what is expected: 6 words a thread in `out`. The left neighbour raises by 3, then by 4, then by `n`.
#[kernel(B = gin)]
pub unsafe fn gin_shadows<B: GinBackend>(
    comm: DevComm,
    _mail: Window<u64>,
    out: Window<u64>,
    extra: Extra,
    n: u32,
) {
    let (coop, world, gin) = (Coop::cta(), comm.world_team(), comm.gin::<B>(0));
    let (first, second) =
        (SignalId::of(&comm, extra.signals(), 0), SignalId::of(&comm, extra.signals(), 1));
    let right = (world.rank + 1) % world.n_ranks;
    let t = 6 * thread::thread_idx_x() as usize;
    let start = gin.signal_shadow(first);
    coop.sync();
    gin.signal(coop, world, right, first.add(3));
    if coop.thread_rank() == 0 {
        gin.expect(first, 3);
    }
    gin.wait_signal_meets_shadow(coop, first, ORDER);
    let met = gin.read_signal(first, ORDER) - start;
    gin.signal(coop, world, right, first.add(4));
    if coop.thread_rank() == 0 {
        gin.expect(first, 4);
    }
    let late = gin.wait_signal_meets_shadow_timeout(coop, first, ORDER, Timeout::millis(60_000));
    let shadow = gin.signal_shadow(first) - start;
    // The other signal: followed, by what came.
    let second_start = gin.signal_shadow(second);
    coop.sync();
    gin.signal(coop, world, right, second.add(n.into()));
    let (before, grown) = gin.wait_signal_follow_shadow(coop, second, n.into(), ORDER);
    gin.signal(coop, world, right, second.add(2));
    let limit = Timeout::millis(60_000);
    let more = gin.wait_signal_follow_shadow_timeout(coop, second, 2, ORDER, limit);
    // SAFETY: six words a thread.
    unsafe {
        out.local().store(t, met);
        out.local().store(t + 1, u64::from(late.is_err()));
        out.local().store(t + 2, shadow);
        out.local().store(t + 3, before - second_start);
        out.local().store(t + 4, grown);
        out.local()
            .store(t + 5, more.map_or(0, |(before, grown)| (before - second_start) * 100 + grown));
    }
}

/// Every wait for what never comes ends, in every thread: `out` has the timeouts as bits, a word a thread. Afterwards a reset sets a signal
/// and its shadow to 0.
#[kernel(B = gin)]
pub unsafe fn gin_never<B: GinBackend>(
    comm: DevComm,
    mail: Window<u64>,
    out: Window<u64>,
    extra: Extra,
    n: u32,
) {
    let (coop, gin) = (if n == 0 { Coop::cta() } else { Coop::warp() }, comm.gin::<B>(0));
    let (signal, counter) =
        (SignalId::of(&comm, extra.signals(), 0), CounterId::of(&comm, extra.counters(), 0));
    let soon = Timeout::micros(100);
    // SAFETY: the test makes the window for it, zeroed.
    let va = unsafe { nccl_device::gin::VaSignal::new(mail, 0) };
    if thread::thread_idx_x() == 0 {
        gin.expect(signal, 5);
    }
    Coop::cta().sync();
    let mut bits = 0;
    bits |= u64::from(gin.wait_signal_timeout(coop, signal, 1, ORDER, soon).is_err());
    bits |= u64::from(gin.wait_signal_timeout(coop, va, 1, ORDER, soon).is_err()) << 1;
    bits |= u64::from(gin.wait_counter_timeout(coop, counter, 1, ORDER, soon).is_err()) << 2;
    bits |=
        u64::from(gin.wait_signal_meets_shadow_timeout(coop, signal, ORDER, soon).is_err()) << 3;
    bits |= u64::from(gin.wait_signal_follow_shadow_timeout(coop, signal, 1, ORDER, soon).is_err())
        << 4;
    // What has come does not time out, and a flush of nothing is through.
    bits |= u64::from(gin.wait_signal_timeout(coop, signal, 0, ORDER, soon).is_err()) << 5;
    bits |= u64::from(gin.wait_counter_timeout(coop, counter, 0, ORDER, soon).is_err()) << 6;
    bits |= u64::from(gin.flush_timeout(coop, ORDER, Timeout::millis(60_000)).is_err()) << 7;
    bits |= gin.signal_shadow(signal) << 8;
    Coop::cta().sync();
    if thread::thread_idx_x() == 0 {
        gin.reset_signal(signal);
    }
    Coop::cta().sync();
    bits |= gin.signal_shadow(signal) << 16;
    // SAFETY: a word a thread.
    unsafe { out.local().store(thread::thread_idx_x() as usize, bits) };
}
