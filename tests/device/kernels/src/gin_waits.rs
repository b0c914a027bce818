//! Kernels that test GIN's signal shadows, resets, and waits with timeouts.

use cuda_std::prelude::*;
use nccl_device::gin::{GinBackend, VaSignal};
use nccl_device::{BarrierIndex, Coop, DevComm, FenceLevel, MemoryOrder, Timeout};

use crate::extra::{Extra, Words};

const ORDER: MemoryOrder = MemoryOrder::Acquire;

/// Waits for signals: the left neighbor raises the first by 3 and 4, and the second by `n` and 2.
/// Shadows are raised by `expect` (the first) and `follow_shadow` waits. Stores 6 words per thread
/// to `out`.
#[kernel(B = gin)]
pub unsafe fn gin_shadows<B: GinBackend>(
    comm: DevComm,
    _mail: Words,
    out: Words,
    extra: Extra,
    n: u32,
) {
    let (coop, world, gin) = (Coop::cta(), comm.world_team(), comm.gin::<B>(0));
    let (first, second) = (extra.signal(&comm, 0), extra.signal(&comm, 1));
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
    // These waits set the second signal's shadow to the signal's value.
    let second_start = gin.signal_shadow(second);
    coop.sync();
    gin.signal(coop, world, right, second.add(n.into()));
    let (before, grown) = gin.wait_signal_follow_shadow(coop, second, n.into(), ORDER);
    gin.signal(coop, world, right, second.add(2));
    // The next wait times out if the previous one has already seen both amounts.
    let limit = Timeout::millis(1_000);
    let more = gin.wait_signal_follow_shadow_timeout(coop, second, 2, ORDER, limit);
    // SAFETY: `out` has six words per thread.
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

/// Waits that can never succeed time out in every thread. Then a reset sets a signal and its shadow
/// to 0. Stores timeouts and shadows as bits of one word per thread.
#[kernel(B = gin)]
pub unsafe fn gin_never<B: GinBackend>(
    comm: DevComm,
    mail: Words,
    out: Words,
    extra: Extra,
    n: u32,
) {
    let (coop, gin) = (if n == 0 { Coop::cta() } else { Coop::warp() }, comm.gin::<B>(0));
    let (signal, counter) = (extra.signal(&comm, 0), extra.counter(&comm, 0));
    let soon = Timeout::micros(100);
    // SAFETY: the test registers the window for VA signals, zeroed.
    let va = unsafe { VaSignal::new(mail, 0) };
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
    // A wait whose condition holds does not time out, nor does a flush without operations.
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
    // SAFETY: `out` has one word per thread.
    unsafe { out.local().store(thread::thread_idx_x() as usize, bits) };
}

/// Signals have 64 bits and wrap around: the left neighbor raises a signal beyond 2^32 and beyond
/// 2^64, then a VA signal beyond each. Stores each thread's number of errors.
#[kernel(B = gin)]
pub unsafe fn gin_wraps<B: GinBackend>(
    comm: DevComm,
    mail: Words,
    out: Words,
    extra: Extra,
    n: u32,
) {
    const QUARTER: u64 = 1 << 62;
    let (coop, world, gin) = (Coop::cta(), comm.world_team(), comm.gin::<B>(0));
    let (signal, soon) = (extra.signal(&comm, 0), Timeout::micros(100));
    let right = (world.rank + 1) % world.n_ranks;
    let mut barrier = gin.world_barrier(coop, BarrierIndex::new(0));
    let mut expected = gin.signal_shadow(signal);
    let mut wrong = 0;
    for step in 0..8 {
        // The barrier keeps a rank from running ahead: a wait compares modulo 2^64, which is
        // correct only up to distances of 2^63.
        barrier.sync(ORDER, FenceLevel::None);
        // From 0 the sums cross 2^32, then 2^64 to just below 2^32, and cross 2^32 again.
        let amount = match step {
            0 => u32::MAX.into(),
            1 => 2,
            5 => QUARTER - 5,
            6 => 9,
            _ => QUARTER,
        };
        expected = expected.wrapping_add(amount);
        gin.signal(coop, world, right, signal.add(amount));
        if coop.thread_rank() == 0 {
            gin.expect(signal, amount);
        }
        gin.wait_signal_meets_shadow(coop, signal, ORDER);
        wrong += u64::from(gin.read_signal(signal, ORDER) != expected);
        wrong += u64::from(gin.signal_shadow(signal) != expected);
        let next = expected.wrapping_add(1);
        wrong += u64::from(gin.wait_signal_timeout(coop, signal, next, ORDER, soon).is_ok());
    }
    // SAFETY: after the barrier, these two words of the window are used only as signals.
    let (low, high) = unsafe { (VaSignal::new(mail, 0), VaSignal::new(mail, 1)) };
    let (low_start, high_start) = (u64::from(u32::MAX - 1), u64::MAX - 1);
    if coop.thread_rank() == 0 {
        // SAFETY: no rank signals them before the barrier below.
        unsafe {
            mail.local().store(0, low_start);
            mail.local().store(1, high_start);
        }
    }
    barrier.sync(ORDER, FenceLevel::None);
    for i in 0..2 * n {
        gin.signal(coop, world, right, if i % 2 == 0 { low.inc() } else { high.inc() });
    }
    let more = u64::from(n);
    gin.wait_signal(coop, low, low_start + more, ORDER);
    gin.wait_signal(coop, high, high_start.wrapping_add(more), ORDER);
    wrong += u64::from(gin.read_signal(low, ORDER) != low_start + more);
    wrong += u64::from(gin.read_signal(high, ORDER) != high_start.wrapping_add(more));
    gin.flush(coop, MemoryOrder::Relaxed);
    // SAFETY: `out` has one word per thread.
    unsafe { out.local().store(thread::thread_idx_x() as usize, wrong) };
}

/// Checks `n` times: a signal that was reset, and its shadow, count from 0 again, by increments and
/// by adds alternately. Stores each thread's number of errors.
#[kernel(B = gin)]
pub unsafe fn gin_resets<B: GinBackend>(
    comm: DevComm,
    _mail: Words,
    out: Words,
    extra: Extra,
    n: u32,
) {
    let (coop, world, gin) = (Coop::cta(), comm.world_team(), comm.gin::<B>(0));
    let signal = extra.signal(&comm, 0);
    let right = (world.rank + 1) % world.n_ranks;
    let mut barrier = gin.world_barrier(coop, BarrierIndex::new(0));
    let mut wrong = 0;
    for i in 0..2 * n {
        let (action, amount) = if i % 2 == 0 { (signal.inc(), 1) } else { (signal.add(10), 10) };
        gin.signal(coop, world, right, action);
        let (before, grown) = gin.wait_signal_follow_shadow(coop, signal, amount, ORDER);
        wrong += u64::from(before != 0 || grown != amount);
        wrong += u64::from(gin.read_signal(signal, ORDER) != amount);
        // After this barrier, all ranks have received their signals: resets race with no signal.
        barrier.sync(ORDER, FenceLevel::None);
        if coop.thread_rank() == 0 {
            gin.reset_signal(signal);
        }
        coop.sync();
        wrong += u64::from(gin.read_signal(signal, ORDER) != 0 || gin.signal_shadow(signal) != 0);
        barrier.sync(ORDER, FenceLevel::None);
    }
    // SAFETY: `out` has one word per thread.
    unsafe { out.local().store(thread::thread_idx_x() as usize, wrong) };
}
