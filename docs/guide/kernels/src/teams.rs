//! Teams, windows and barriers.

// ANCHOR: teams
use cuda_std::prelude::*;
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};

/// Writes what a kernel knows about its rank: `[rank, ranks, LSA rank, LSA ranks, rail rank, rail
/// ranks]`. One thread.
#[kernel(requires(6 <= out.len()))]
pub fn who_am_i(comm: DevComm, out: Window<i32>) {
    let (lsa, rail) = (comm.lsa_team(), comm.rail_team());
    let about = [comm.rank(), comm.n_ranks(), lsa.rank, lsa.n_ranks, rail.rank, rail.n_ranks];
    for (i, number) in about.into_iter().enumerate() {
        // SAFETY: the launch has checked the length.
        unsafe { out.local().store(i, number) };
    }
}
// ANCHOR_END: teams

// ANCHOR: gather
/// Gathers every rank's `x` in every rank's `out`, by loads: `out[rank * x.len() + i]` is `x[i]`
/// of that rank.
///
/// Grid and block: any.
#[kernel(requires(x.len() * comm.n_ranks() as usize <= out.len()))]
pub fn gather(comm: DevComm, x: Window<f32>, out: Window<f32>) {
    let team = comm.lsa_team();
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire); // the peers' x is there
    for peer in team.all_from_self() {
        let first = peer as usize * x.len();
        for i in thread::grid_strided(x.len()) {
            // SAFETY: the launch has checked the lengths; each thread has elements of its own.
            unsafe { out.local().store(first + i, x.lsa(peer).load(i)) };
        }
    }
    barrier.sync(MemoryOrder::Release); // the peers have read this rank's x
}
// ANCHOR_END: gather

// ANCHOR: split
/// Stores `x` to the next rank's inbox, and works on this rank's `x` while the store arrives:
/// `out[i] = work(x[i]) + inbox[i]`.
///
/// Grid and block: any.
#[kernel(requires(x.len() <= inbox.len(), x.len() <= out.len()))]
pub fn pass_on(comm: DevComm, x: Window<f32>, inbox: Window<f32>, out: Window<f32>) {
    let team = comm.lsa_team();
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire); // the next rank no longer reads its inbox
    for i in thread::grid_strided(x.len()) {
        // SAFETY: the launch has checked the lengths; each thread has elements of its own.
        unsafe { inbox.lsa(team.next()).store(i, x.local().load(i)) };
    }
    let arrival = barrier.arrive(MemoryOrder::Release);
    for i in thread::grid_strided(x.len()) {
        // SAFETY: i is below both lengths, and this thread alone accesses the element of `out`.
        unsafe { out.local().store(i, work(x.local().load(i))) };
    }
    arrival.wait(MemoryOrder::Acquire);
    for i in thread::grid_strided(x.len()) {
        // SAFETY: i is below the lengths; the previous rank's elements have arrived.
        unsafe { out.local().store(i, out.local().load(i) + inbox.local().load(i)) };
    }
}

fn work(x: f32) -> f32 {
    10.0 * x
}
// ANCHOR_END: split
