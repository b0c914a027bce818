//! Kernels that test the LL all-to-all.

use bytemuck::Pod;
use cuda_std::prelude::*;
use nccl_device::{Coop, DevComm, LlA2a, LlA2aBuffer, Timeout};

use crate::extra::{Extra, Words};

macro_rules! elements {
    ($($name:ident $bytes:literal),*) => { $(
        #[doc = concat!("An element; size in bytes: ", $bytes, ".")]
        pub type $name = [u8; $bytes];
    )* };
}

elements!(B1 1, B4 4, B6 6, B8 8, B12 12, B16 16, B29 29, B64 64);

/// Returns an element whose bytes encode its sender, receiver, number in its epoch, and round
/// (epoch).
fn element<T: Pod>(from: u32, to: u32, number: u32, round: u32) -> T {
    let mut value = T::zeroed();
    let start = (&raw mut value).cast::<u8>();
    for i in 0..size_of::<T>() {
        let byte = from * 7 + to * 31 + number * 3 + round * 101 + i as u32 * 13;
        // SAFETY: `i` is within `value`, for which any bytes are valid.
        unsafe { start.add(i).write(byte as u8) };
    }
    value
}

/// Returns whether two elements have the same bytes.
fn same<T: Pod>(a: &T, b: &T) -> bool {
    let (a, b) = ((&raw const *a).cast::<u8>(), (&raw const *b).cast::<u8>());
    let mut same = true;
    for i in 0..size_of::<T>() {
        // SAFETY: `i` is within both elements.
        same &= unsafe { a.add(i).read() == b.add(i).read() };
    }
    same
}

/// Elements that a rank sends to each peer in an epoch.
const EACH: u32 = 3;

/// Exchanges in `n & 0xff` epochs: each rank sends three elements to every peer and checks those
/// that it receives. The mode is `n >> 8`: 0 send and receive, 1 broadcast, 2 broadcast by
/// multicast, 3 `receive_each`. Each block opens a session.
#[kernel(T = [B1, B4, B6, B8, B12, B16, B29, B64])]
pub unsafe fn ll_exchange<T: Pod>(comm: DevComm, _mail: Words, out: Words, extra: Extra, n: u32) {
    let (team, coop, block) = (comm.lsa_team(), Coop::cta(), thread::block_idx_x());
    let (me, ranks, t) = (team.rank as u32, team.n_ranks as u32, thread::thread_idx_x());
    let (rounds, mode) = (n & 0xff, n >> 8);
    // SAFETY: the host created the buffer for the LSA team, for these blocks and elements.
    let mut buffer = unsafe { LlA2aBuffer::new(&comm, team, extra.ll, thread::grid_dim_x()) };
    if let (2, Some(handle)) = (mode, comm.lsa_multimem()) {
        // SAFETY: this is the multicast mapping of the LSA team.
        buffer = unsafe { buffer.over_multimem(handle) };
    }
    let mut wrong = 0;
    buffer.with(coop, block, EACH * ranks, |session: &mut LlA2a<'_, T>| {
        for round in 0..rounds {
            let mut i = t;
            while i < EACH * ranks {
                let (peer, number) = (i / EACH, i % EACH);
                if matches!(mode, 1 | 2) {
                    if peer == 0 {
                        session.broadcast(EACH * me + number, element::<T>(me, 0, number, round));
                    }
                } else {
                    let value = element::<T>(me, peer + 1, number, round);
                    session.send(peer as i32, EACH * me + number, value);
                }
                i += coop.size();
            }
            let mut i = t;
            while i < ranks {
                let to = if matches!(mode, 1 | 2) { 0 } else { me + 1 };
                let mine = [EACH * i, EACH * i + 1, EACH * i + 2];
                let got = if mode == 3 {
                    session.receive_each(mine)
                } else {
                    [session.receive(mine[0]), session.receive(mine[1]), session.receive(mine[2])]
                };
                for number in 0..EACH {
                    let expected = element::<T>(i, to, number, round);
                    wrong += u64::from(!same(&got[number as usize], &expected));
                }
                i += coop.size();
            }
            session.end_epoch();
        }
    });
    // SAFETY: `out` has one word per thread.
    unsafe { out.local().store(thread::index_1d() as usize, wrong) };
}

/// Reduces in each of `n` epochs: a thread sums one number over the ranks by `receive_reduce`.
#[kernel]
pub unsafe fn ll_reduce(comm: DevComm, _mail: Words, out: Words, extra: Extra, n: u32) {
    let (team, coop) = (comm.lsa_team(), Coop::cta());
    let (t, threads) = (thread::thread_idx_x(), thread::block_dim_x());
    // SAFETY: the host created the buffer for the LSA team, with one element per thread and rank.
    let buffer = unsafe { LlA2aBuffer::new(&comm, team, extra.ll, thread::grid_dim_x()) };
    let mut sum = 0;
    buffer.with(coop, thread::block_idx_x(), threads * team.n_ranks as u32, |session| {
        for round in 0..n {
            session.broadcast(team.rank as u32 * threads + t, (team.rank as u32 + 1) * (t + round));
            sum += session.receive_reduce::<u64, 2>(
                t,
                team.n_ranks as u32,
                threads,
                |value: u32| value.into(),
                |a, b| a + b,
            );
            session.end_epoch();
        }
    });
    // SAFETY: `out` has one word per thread.
    unsafe { out.local().store(thread::index_1d() as usize, sum) };
}

/// Sets each block's epoch to `n` before the last value. It runs before the kernel that opens
/// sessions.
#[kernel]
pub unsafe fn ll_near_the_end(comm: DevComm, _mail: Words, out: Words, extra: Extra, n: u32) {
    // A block has a line of 16 bytes with its epoch, then two lines per slot.
    let line = thread::block_idx_x() * (1 + 2 * extra.ll.n_slots);
    let header = comm.resource_buffer(extra.ll.buffer).local::<u32>();
    if thread::thread_idx_x() == 0 {
        // SAFETY: this word contains the epoch minus 2, and no session is open.
        unsafe { header.store(4 * line as usize, u32::MAX - 2 - n) };
    }
    // SAFETY: `out` has one word per thread.
    unsafe { out.local().store(thread::index_1d() as usize, 0) };
}

/// Receives an element that no rank sends, which times out; then elements arrive as usual.
#[kernel]
pub unsafe fn ll_late(comm: DevComm, _mail: Words, out: Words, extra: Extra, _n: u32) {
    let (team, coop) = (comm.lsa_team(), Coop::cta());
    let (t, ranks) = (thread::thread_idx_x(), team.n_ranks as u32);
    // SAFETY: the host created the buffer for the LSA team.
    let buffer = unsafe { LlA2aBuffer::new(&comm, team, extra.ll, thread::grid_dim_x()) };
    let found = buffer.with(coop, 0, ranks + 1, |session| {
        let early = session.receive_timeout(ranks, Timeout::micros(100)).is_err();
        coop.sync();
        if t == 0 {
            session.broadcast(team.rank as u32, 5_u64);
        }
        let mut sum = 0;
        for from in 0..ranks {
            sum += session.receive_timeout(from, Timeout::millis(60_000)).unwrap_or(1000);
        }
        session.end_epoch();
        sum * 2 + u64::from(early)
    });
    // SAFETY: `out` has one word per thread.
    unsafe { out.local().store(t as usize, found) };
}
