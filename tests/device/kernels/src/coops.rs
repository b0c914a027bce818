//! A kernel that tests coops: rank, size, sync and votes.

use cuda_std::prelude::*;
use nccl_device::{Coop, DevComm};

use crate::extra::{Extra, Words};

/// Returns the calling thread's coop, of kind `n`, in a block of 96 threads.
fn coop_of(n: u32) -> Coop {
    let (t, lane) = (thread::thread_idx_x(), warp::lane_id());
    match n {
        0 => Coop::thread(),
        1 => Coop::warp(),
        2 if lane.is_multiple_of(2) => Coop::lanes(0x5555_5555),
        2 => Coop::lanes(0xaaaa_aaaa),
        3 if lane < 5 => Coop::lanes(0x1f),
        3 => Coop::lanes(!0x1f),
        4 if t < 64 => Coop::warp_span(0, 2, 3),
        4 => Coop::warp_span(2, 1, 14),
        _ => Coop::cta(),
    }
}

/// Stores the results of each thread's calls on its coop, 6 words per thread of `out`. `mail` has
/// one word per thread.
#[kernel]
pub unsafe fn coops(_comm: DevComm, mail: Words, out: Words, _extra: Extra, n: u32) {
    let coop = coop_of(n);
    let t = thread::thread_idx_x() as usize;
    let (rank, size) = (coop.thread_rank(), coop.size());
    let own = out.local();
    // SAFETY: a thread has one word in `mail` and 6 in `out`; threads of a coop read each other's
    // words, ordered by `sync` and `any`.
    unsafe {
        own.store(6 * t, rank.into());
        own.store(6 * t + 1, size.into());
        own.store(6 * t + 2, coop.any(false).into());
        own.store(6 * t + 3, coop.any(rank == size - 1).into());
        mail.local().store(t, 7 + t as u64);
        // Every thread reads what the last thread of its coop wrote.
        coop.sync();
        let last = last_of(n, t);
        own.store(6 * t + 4, mail.local().load(last));
        coop.sync();
        mail.local().store(t, 9 + t as u64);
        // `any` orders memory as `sync` does.
        coop.any(false);
        own.store(6 * t + 5, mail.local().load(last));
    }
}

/// Returns the last thread of thread `t`'s coop.
fn last_of(n: u32, t: usize) -> usize {
    let warp = t / 32 * 32;
    match n {
        0 => t,
        1 => warp + 31,
        2 => warp + 30 + t % 2,
        3 if t % 32 < 5 => warp + 4,
        3 => warp + 31,
        4 if t < 64 => 63,
        _ => 95,
    }
}
