//! Kernels of barriers of the LSA team, one after the other.

use cuda_std::prelude::*;
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};

/// Executes in every block `rounds` barriers with the same block of every rank.
///
/// Grid: any, up to the device communicator's LSA barriers, the same in every rank. Block: any,
/// one-dimensional, the same in every rank.
///
/// # Safety
///
/// Every rank passes the same `rounds`.
#[kernel]
pub unsafe fn lsa_barrier(comm: DevComm, rounds: u32) {
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    for _ in 0..rounds {
        barrier.sync(MemoryOrder::AcqRel);
    }
}

/// Executes the same barriers, with checks: between two barriers of a round, thread `p` of a block
/// writes the round's number to `table[block][rank]` of rank `p`. After the second barrier it
/// compares its own rank's `table[block][p]`, and counts mismatches in `wrong[block][p]`.
///
/// Grid and block as [`lsa_barrier`](fn@lsa_barrier)'s, with at least one thread per rank.
///
/// # Safety
///
/// Every rank passes the same `rounds`; both windows have an element for each block and rank, and
/// nothing else accesses them until the kernel has ended in every rank.
#[kernel]
pub unsafe fn lsa_barrier_checked(
    comm: DevComm,
    table: Window<u32>,
    wrong: Window<u32>,
    rounds: u32,
) {
    let team = comm.lsa_team();
    let peer = thread::thread_idx_x() as i32;
    let row = thread::block_idx_x() as usize * team.n_ranks as usize;
    let mut mismatches = 0;
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    for round in 1..rounds + 1 {
        barrier.sync(MemoryOrder::AcqRel);
        if peer < team.n_ranks {
            // SAFETY: the caller's table has the element, which is this rank's until the barrier.
            unsafe { table.lsa(peer).store(row + team.rank as usize, round) };
        }
        barrier.sync(MemoryOrder::AcqRel);
        if peer < team.n_ranks {
            // SAFETY: the caller's table has the element, which is this rank's until a barrier.
            let seen = unsafe { table.local().load(row + peer as usize) };
            mismatches += u32::from(seen != round);
        }
    }
    if peer < team.n_ranks {
        // SAFETY: the caller's `wrong` has the element; only this thread uses it.
        unsafe { wrong.local().store(row + peer as usize, mismatches) };
    }
}
