//! A minimal all-to-all of 8-byte elements within the LSA team by the low-latency protocol, to
//! measure the cost of an LL all-to-all session (`LlA2a`).

use cuda_std::prelude::*;
use nccl_device::raw::LlA2aHandle;
use nccl_device::{Coop, DevComm, LlA2a, LlA2aBuffer, LsaPtr, Team, Window};

/// Exchanges messages: `recv[rank * count + i]` of a peer becomes this rank's `send[peer * count +
/// i]`, for `i < count`. Every block has its own session, with space for one element per rank and
/// thread.
///
/// Grid: any, up to the number of blocks that `lines` was created for, the same in every rank.
/// Block: any, one-dimensional, the same in every rank. `count` is in elements.
///
/// # Safety
///
/// `lines` belongs to this device communicator. Both windows have `count` elements for each rank,
/// and nothing else accesses them until the kernel has ended in every rank.
#[kernel]
pub unsafe fn ll_exchange(
    comm: DevComm,
    lines: LlA2aHandle,
    send: Window<u64>,
    recv: Window<u64>,
    count: usize,
) {
    let team = comm.lsa_team();
    let (threads, thread) = (thread::block_dim_x(), thread::thread_idx_x());
    let (block, blocks) = (thread::block_idx_x(), thread::grid_dim_x());
    let (from, to) = (send.local(), recv.local());
    // SAFETY: the host made the lines for this grid, and the windows for `count`.
    let buffer = unsafe { LlA2aBuffer::new(&comm, team, lines, thread::grid_dim_x()) };
    buffer.with(Coop::cta(), block, team.n_ranks as u32 * threads, |session| {
        // An epoch moves one element per thread from each rank to each rank.
        let mut first = block as usize * threads as usize;
        while first < count {
            let at = first + thread as usize;
            if at < count {
                // SAFETY: the host made the lines for this grid, and the windows for `count`.
                unsafe {
                    match team.n_ranks {
                        2 => exchange::<2>(session, team, from, to, at, count),
                        4 => exchange::<4>(session, team, from, to, at, count),
                        8 => exchange::<8>(session, team, from, to, at, count),
                        _ => exchange_with_many(session, team, from, to, at, count),
                    }
                }
            }
            session.end_epoch();
            first += blocks as usize * threads as usize;
        }
    });
}

/// Sends this thread's elements to the `N` ranks of the team, and receives theirs. All loads are in
/// flight at once, and so are all polls.
///
/// # Safety
///
/// The contract of [`ll_exchange`] holds, and `at` is below `count`.
unsafe fn exchange<const N: usize>(
    session: &LlA2a<'_, u64>,
    team: Team,
    from: LsaPtr<u64>,
    to: LsaPtr<u64>,
    at: usize,
    count: usize,
) {
    // Own rank first, then upwards, so that ranks send to different peers at any time.
    let peer = |i: usize| (team.rank as usize + i) % N;
    // SAFETY: the caller passes an element that the windows have, of this thread alone.
    let elements: [u64; N] = core::array::from_fn(|i| unsafe { from.load(peer(i) * count + at) });
    for (i, element) in elements.iter().enumerate() {
        session.send(peer(i) as i32, slot(team.rank), *element);
    }
    let received = session.receive_each(core::array::from_fn::<_, N, _>(|i| slot(i as i32)));
    for (i, element) in received.iter().enumerate() {
        // SAFETY: the caller passes an element that the windows have, of this thread alone.
        unsafe { to.store(i * count + at, *element) };
    }
}

/// Does the same as [`exchange`], for any number of ranks.
///
/// # Safety
///
/// The contract of [`exchange`] holds.
unsafe fn exchange_with_many(
    session: &LlA2a<'_, u64>,
    team: Team,
    from: LsaPtr<u64>,
    to: LsaPtr<u64>,
    at: usize,
    count: usize,
) {
    for peer in team.all_from_self() {
        // SAFETY: the caller passes an element that the windows have, of this thread alone.
        session.send(peer, slot(team.rank), unsafe { from.load(peer as usize * count + at) });
    }
    for rank in 0..team.n_ranks {
        // SAFETY: the caller passes an element that the windows have, of this thread alone.
        unsafe { to.store(rank as usize * count + at, session.receive(slot(rank))) };
    }
}

/// Returns the index, among an epoch's elements, of this thread's element from `rank`.
fn slot(rank: i32) -> u32 {
    rank as u32 * thread::block_dim_x() + thread::thread_idx_x()
}
