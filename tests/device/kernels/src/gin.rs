//! Kernels that test GIN's operations: puts, gets, signals, counters, flushes.

use cuda_std::atomic::Scope;
use cuda_std::prelude::*;
use nccl_device::gin::{Gin, GinBackend, ResourceSharing, SignalId, VaSignal};
use nccl_device::{Coop, DevComm, MemoryOrder, Team, Window};

use crate::extra::{Extra, Words, share};

/// Returns word `i` of the data that rank `from` sends to rank `to`.
fn word(from: i32, to: i32, i: usize) -> u64 {
    (from as u64) << 40 | (to as u64) << 20 | i as u64
}

/// Writes what this rank sends to the ranks of `team`: `count` words per rank, from index `first`
/// of `window` on.
unsafe fn fill(comm: &DevComm, coop: Coop, team: Team, window: Words, first: usize, count: usize) {
    for i in share(coop, count * team.n_ranks as usize) {
        let to = team.to_world(comm.rank(), (i / count) as i32);
        // SAFETY: the caller passes words that are in the window, and nothing else accesses them.
        unsafe { window.local().store(first + i, word(comm.rank(), to, i % count)) };
    }
}

/// Returns how many words differ from the words that the ranks of `team` send to this rank.
unsafe fn count_wrong(
    comm: &DevComm,
    coop: Coop,
    team: Team,
    window: Words,
    first: usize,
    count: usize,
) -> u64 {
    let mut wrong = 0;
    for i in share(coop, count * team.n_ranks as usize) {
        let from = team.to_world(comm.rank(), (i / count) as i32);
        // SAFETY: the caller passes words that are in the window, and have arrived.
        let got = unsafe { window.local().load(first + i) };
        wrong += u64::from(got != word(from, comm.rank(), i % count));
    }
    wrong
}

/// Waits until a signal is `more` above `before`, its shadow, and raises the shadow by `more`. (A
/// fast peer may already have raised the signal; only this rank changes the shadow.)
fn wait_for<B: GinBackend>(
    gin: Gin<'_, B>,
    coop: Coop,
    signal: SignalId,
    before: u64,
    more: u64,
    order: MemoryOrder,
) {
    gin.wait_signal(coop, signal, before + more, order);
    if coop.thread_rank() == 0 {
        gin.expect(signal, more);
    }
    coop.sync();
}

/// Returns the team of the exchange: the world for `mode` 0, else the rail.
pub(crate) fn connected(comm: &DevComm, mode: u32) -> Team {
    if mode == 0 { comm.world_team() } else { comm.rail_team() }
}

/// Exchanges all-to-all by puts with a signal: block `b` puts `n >> 4` words per peer on context
/// `b`, from the first half of `mail` to its second half. `n & 1` selects the team. With `n & 2`
/// the kernel itself issues the release fence, and declares that only one block uses the context.
#[kernel(B = gin)]
pub unsafe fn gin_put<B: GinBackend>(comm: DevComm, mail: Words, out: Words, extra: Extra, n: u32) {
    let (coop, block, count) = (Coop::cta(), thread::block_idx_x(), (n >> 4) as usize);
    let team = connected(&comm, n & 1);
    let per_block = count * team.n_ranks as usize;
    let (source, target) =
        (block as usize * per_block, (thread::grid_dim_x() + block) as usize * per_block);
    let mut gin = comm.gin::<B>(block);
    assert!(gin.context_index() == block);
    if n & 2 != 0 {
        // SAFETY: the test gives each block its own context.
        gin = unsafe { gin.shared_by(ResourceSharing::Cta) };
    }
    let signal = extra.signal(&comm, 1);
    let before = gin.signal_shadow(signal);
    // SAFETY: each block has its own words in both halves; a target is read after its signal.
    unsafe {
        fill(&comm, coop, team, mail, source, count);
        if n & 2 != 0 {
            thread::grid_fence();
        }
        for p in 0..team.n_ranks {
            let to = mail.at(target + team.rank as usize * count);
            let put = gin.put(team, p, to, mail.at(source + p as usize * count), count);
            let put = if n & 2 != 0 { put.released_to(Scope::Gpu) } else { put };
            put.signal(signal.inc()).post(coop);
        }
        wait_for(gin, coop, signal, before, team.n_ranks as u64, MemoryOrder::Acquire);
        let wrong = count_wrong(&comm, coop, team, mail, target, count);
        gin.flush(coop, MemoryOrder::Relaxed);
        out.local().store(thread::index_1d() as usize, wrong);
    }
}

/// Puts a value to every rank, and raises the signal by an amount that encodes the sender. Stores
/// the received values, one word per rank in `out`.
#[kernel(B = gin)]
pub unsafe fn gin_put_value<B: GinBackend>(
    comm: DevComm,
    mail: Words,
    out: Words,
    extra: Extra,
    _n: u32,
) {
    let (coop, world) = (Coop::warp(), comm.world_team());
    let gin = comm.gin::<B>(0);
    let signal = extra.signal(&comm, 0);
    let before = gin.signal_shadow(signal);
    let (me, n_ranks) = (comm.rank() as usize, comm.n_ranks() as u64);
    for p in 0..world.n_ranks {
        let value = word(comm.rank(), p, 3);
        // SAFETY: every rank has one word for each sender, and reads it after the signal.
        unsafe {
            gin.put_value(world, p, mail.at(me), value)
                .signal(signal.add(10 + me as u64))
                .post(coop)
        };
    }
    let sum = n_ranks * 10 + n_ranks * (n_ranks - 1) / 2;
    wait_for(gin, coop, signal, before, sum, MemoryOrder::Acquire);
    for p in share(coop, comm.n_ranks() as usize) {
        // SAFETY: the words have arrived.
        unsafe { out.local().store(p, mail.local().load(p)) };
    }
    gin.flush(coop, MemoryOrder::Relaxed);
}

/// Puts values of 1, 2, 4 and 8 bytes into the right neighbor's words.
#[kernel(B = gin)]
pub unsafe fn gin_value_sizes<B: GinBackend>(
    comm: DevComm,
    mail: Words,
    out: Words,
    extra: Extra,
    _n: u32,
) {
    let (coop, world) = (Coop::thread(), comm.world_team());
    if thread::thread_idx_x() > 0 {
        return;
    }
    let gin = comm.gin::<B>(0);
    let signal = extra.signal(&comm, 0);
    let before = gin.signal_shadow(signal);
    let right = (world.rank + 1) % world.n_ranks;
    // SAFETY: only this rank writes these four words of the neighbor; every offset is aligned.
    unsafe {
        gin.put_value(world, right, cast::<u8>(mail).at(0), 0xab_u8)
            .signal(signal.inc())
            .post(coop);
        gin.put_value(world, right, cast::<f16>(mail).at(5), f16::from_bits(0x1234))
            .signal(signal.inc())
            .post(coop);
        gin.put_value(world, right, cast::<i32>(mail).at(5), -2).signal(signal.inc()).post(coop);
        gin.put_value(world, right, cast::<f64>(mail).at(3), 1.5).signal(signal.inc()).post(coop);
    }
    wait_for(gin, coop, signal, before, 4, MemoryOrder::Acquire);
    for i in 0..4 {
        // SAFETY: the signals have arrived, so that the peer's puts to `mail` have, too.
        unsafe { out.local().store(i, mail.local().load(i)) };
    }
    gin.flush(coop, MemoryOrder::Relaxed);
}

/// Returns the same window with another element type.
pub(crate) unsafe fn cast<T>(window: Words) -> Window<T> {
    // SAFETY: a window is the same handle for every element type.
    unsafe { core::mem::transmute::<Words, Window<T>>(window) }
}

/// Gets from every peer, from the first half of `mail` to the second. Signals tell when the peers
/// have written the first half.
#[kernel(B = gin)]
pub unsafe fn gin_get<B: GinBackend>(comm: DevComm, mail: Words, out: Words, extra: Extra, n: u32) {
    let (coop, world, count) = (Coop::cta(), comm.world_team(), n as usize);
    let (half, gin) = (count * world.n_ranks as usize, comm.gin::<B>(0));
    let ready = extra.signal(&comm, 0);
    let before = gin.signal_shadow(ready);
    // SAFETY: the first half is written before the signals, the second only by this rank's gets.
    unsafe {
        fill(&comm, coop, world, mail, 0, count);
        for p in 0..world.n_ranks {
            gin.signal(coop, world, p, ready.inc());
        }
        wait_for(gin, coop, ready, before, world.n_ranks as u64, MemoryOrder::Acquire);
        for p in 0..world.n_ranks {
            let from = mail.at(world.rank as usize * count);
            gin.get(world, p, from, mail.at(half + p as usize * count), count).post(coop);
        }
        gin.flush(coop, MemoryOrder::Acquire);
        let wrong = count_wrong(&comm, coop, world, mail, half, count);
        out.local().store(thread::index_1d() as usize, wrong);
    }
}

/// Posts `n` puts without signals to the right neighbor, then a strong signal (by 2^33, beyond 32
/// bits), before which all puts must have arrived.
#[kernel(B = gin)]
pub unsafe fn gin_strong<B: GinBackend>(
    comm: DevComm,
    mail: Words,
    out: Words,
    extra: Extra,
    n: u32,
) {
    let (coop, world, gin) = (Coop::cta(), comm.world_team(), comm.gin::<B>(0));
    let signal = extra.signal(&comm, 0);
    let before = gin.signal_shadow(signal);
    let right = (world.rank + 1) % world.n_ranks;
    let left = (world.rank + world.n_ranks - 1) % world.n_ranks;
    for i in share(coop, n as usize) {
        // SAFETY: only this rank accesses its first `n` words.
        unsafe { mail.local().store(i, word(comm.rank(), right, i)) };
    }
    for i in 0..n as usize {
        // SAFETY: the neighbor reads its second `n` words after the signal.
        unsafe { gin.put(world, right, mail.at(n as usize + i), mail.at(i), 1).post(coop) };
    }
    gin.signal(coop, world, right, signal.add(1 << 33).strong());
    wait_for(gin, coop, signal, before, 1 << 33, MemoryOrder::Acquire);
    let mut wrong = 0;
    for i in share(coop, n as usize) {
        // SAFETY: the words have arrived.
        let got = unsafe { mail.local().load(n as usize + i) };
        wrong += u64::from(got != word(left, comm.rank(), i));
    }
    gin.flush(coop, MemoryOrder::Relaxed);
    // SAFETY: `out` has one word per thread.
    unsafe { out.local().store(thread::index_1d() as usize, wrong) };
}

/// Posts puts with weak signals: when all these signals have arrived, so has all data. Also raises
/// VA signals in the window, by one and by another amount, and stores their values to `out`.
#[kernel(B = gin)]
pub unsafe fn gin_weak_and_va<B: GinBackend>(
    comm: DevComm,
    mail: Words,
    out: Words,
    extra: Extra,
    _n: u32,
) {
    let (coop, world, gin) = (Coop::cta(), comm.world_team(), comm.gin::<B>(0));
    let (me, ranks) = (world.rank as usize, world.n_ranks as usize);
    let signal = extra.signal(&comm, 0);
    let before = gin.signal_shadow(signal);
    // SAFETY: the test registers the window for VA signals; the two words after the data are
    // signals, and start at 0.
    let (by_one, by_more) =
        unsafe { (VaSignal::new(mail, 2 * ranks), VaSignal::new(mail, 2 * ranks + 1)) };
    // SAFETY: this rank writes one word per rank, and each peer one, read after the signals.
    unsafe {
        if coop.thread_rank() == 0 {
            mail.local().store(me, word(comm.rank(), 0, 1));
        }
        for p in 0..world.n_ranks {
            gin.put(world, p, mail.at(ranks + me), mail.at(me), 1)
                .signal(signal.inc().weak())
                .post(coop);
            gin.signal(coop, world, p, by_one.inc());
            gin.signal(coop, world, p, by_more.add(100 + me as u64));
        }
        wait_for(gin, coop, signal, before, ranks as u64, MemoryOrder::Acquire);
        gin.wait_signal(coop, by_one, ranks as u64, MemoryOrder::Acquire);
        let sum = (100 * ranks + ranks * (ranks - 1) / 2) as u64;
        gin.wait_signal(coop, by_more, sum, MemoryOrder::Acquire);
        let mut wrong = 0;
        for p in 0..ranks {
            wrong += u64::from(mail.local().load(ranks + p) != word(p as i32, 0, 1));
        }
        let t = thread::thread_idx_x() as usize;
        out.local().store(3 * t, wrong);
        out.local().store(3 * t + 1, gin.read_signal(by_one, MemoryOrder::Acquire));
        out.local().store(3 * t + 2, gin.read_signal(by_more, MemoryOrder::Acquire));
        coop.sync();
        if coop.thread_rank() == 0 {
            gin.reset_signal(by_one);
            gin.reset_signal(by_more);
            out.local()
                .store(1, out.local().load(1) * 10 + gin.read_signal(by_one, MemoryOrder::Relaxed));
        }
        gin.flush(coop, MemoryOrder::Relaxed);
    }
}

/// Posts `n` puts to the right neighbor from one word. A counter tells when the word can be
/// overwritten.
#[kernel(B = gin)]
pub unsafe fn gin_counter<B: GinBackend>(
    comm: DevComm,
    mail: Words,
    out: Words,
    extra: Extra,
    n: u32,
) {
    let (coop, world, gin) = (Coop::warp(), comm.world_team(), comm.gin::<B>(0));
    let (counter, signal) = (extra.counter(&comm, 1), extra.signal(&comm, 0));
    let right = (world.rank + 1) % world.n_ranks;
    let left = (world.rank + world.n_ranks - 1) % world.n_ranks;
    let before = gin.signal_shadow(signal);
    for i in 0..n as usize {
        // SAFETY: word 0 is written after the previous put has read it; the targets are the
        // neighbor's next `n` words.
        unsafe {
            if coop.thread_rank() == 0 {
                mail.local().store(0, word(comm.rank(), right, i));
            }
            gin.put(world, right, mail.at(1 + i), mail.at(0), 1)
                .signal(signal.inc())
                .counter(counter)
                .post(coop);
        }
        gin.wait_counter(coop, counter, i as u64 + 1, MemoryOrder::Relaxed);
    }
    wait_for(gin, coop, signal, before, u64::from(n), MemoryOrder::Acquire);
    let mut wrong = 0;
    for i in 0..n as usize {
        // SAFETY: the words have arrived.
        wrong += u64::from(unsafe { mail.local().load(1 + i) } != word(left, comm.rank(), i));
    }
    let counted = gin.read_counter(counter, MemoryOrder::Relaxed);
    coop.sync();
    if coop.thread_rank() == 0 {
        gin.reset_counter(counter);
    }
    coop.sync();
    let after = gin.read_counter(counter, MemoryOrder::Relaxed);
    let t = 3 * thread::thread_idx_x() as usize;
    // SAFETY: `out` has three words per thread.
    unsafe {
        out.local().store(t, wrong);
        out.local().store(t + 1, counted);
        out.local().store(t + 2, after);
    }
    gin.flush(coop, MemoryOrder::Relaxed);
}

/// Puts, in thread `t`, `n` times to rank `t` from one word. An asynchronous flush to that peer
/// tells when the word can be overwritten.
#[kernel(B = gin)]
pub unsafe fn gin_requests<B: GinBackend>(
    comm: DevComm,
    mail: Words,
    out: Words,
    extra: Extra,
    n: u32,
) {
    let (world, gin, single) = (comm.world_team(), comm.gin::<B>(0), Coop::thread());
    let signal = extra.signal(&comm, 0);
    let (ranks, me) = (world.n_ranks as usize, world.rank as usize);
    let before = gin.signal_shadow(signal);
    Coop::cta().sync();
    let t = thread::thread_idx_x() as usize;
    if t < ranks {
        for i in 0..n as usize {
            // SAFETY: a thread overwrites its source word after the flush; a rank has `n` target
            // words.
            unsafe {
                mail.local().store(t, word(comm.rank(), t as i32, i));
                let target = mail.at(ranks + me * n as usize + i);
                gin.put(world, t as i32, target, mail.at(t), 1).signal(signal.inc()).post(single);
            }
            let request = gin.flush_async(world, t as i32);
            if i % 2 == 0 {
                gin.wait_request(request, MemoryOrder::Relaxed);
            } else {
                let limit = nccl_device::Timeout::millis(60_000);
                assert!(gin.wait_request_timeout(&request, MemoryOrder::Relaxed, limit).is_ok());
            }
        }
    }
    wait_for(gin, Coop::cta(), signal, before, ranks as u64 * u64::from(n), MemoryOrder::Acquire);
    // SAFETY: `out` has one word per thread; the targets have arrived.
    unsafe {
        let wrong = count_wrong(&comm, Coop::cta(), world, mail, ranks, n as usize);
        out.local().store(t, wrong);
    }
}

/// Signals on every context, which has its own signals: thread `c` raises the signal of context `c`
/// by `c + 1`, at every rank.
#[kernel(B = gin)]
pub unsafe fn gin_contexts<B: GinBackend>(
    comm: DevComm,
    _mail: Words,
    out: Words,
    extra: Extra,
    _n: u32,
) {
    let (world, single, t) = (comm.world_team(), Coop::thread(), thread::thread_idx_x());
    if t >= comm.n_gin_contexts() {
        return;
    }
    let gin: Gin<'_, B> = comm.gin(t);
    let signal = extra.signal(&comm, 0);
    let before = gin.signal_shadow(signal);
    for p in 0..world.n_ranks {
        gin.signal(single, world, p, signal.add(u64::from(t) + 1));
    }
    let wanted = (u64::from(t) + 1) * world.n_ranks as u64;
    wait_for(gin, single, signal, before, wanted, MemoryOrder::Relaxed);
    let seen = gin.read_signal(signal, MemoryOrder::Relaxed) - before;
    // SAFETY: `out` has one word per thread.
    unsafe { out.local().store(t as usize, seen) };
    gin.flush(single, MemoryOrder::Relaxed);
}
