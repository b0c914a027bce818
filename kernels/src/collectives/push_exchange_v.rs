//! The long messages of an all-to-all with a length for each pair of ranks: every rank stores them
//! to the peers' windows.
//!
//! Only ranks that send or receive long messages launch this kernel, after `lamport_exchange_v`,
//! which tells them where a message goes and that the peer's memory may be written.

use super::prelude::*;
use super::push_exchange::Transfer;

/// Stores the messages `sent` of this rank to the ranks of the LSA team, and waits for those that
/// it receives: the messages of more than `longest` bytes, to other ranks.
///
/// `offers` has what `lamport_exchange_v` left there: where in the window `target` a peer has room
/// for the message of this rank, and for how many bytes. The kernel traps if the message has
/// another length, or if the place is in another window or not within the peer's window.
///
/// Grid: any, the same in every rank. Block: whole warps, at most 512 threads, one-dimensional.
/// Dependent launch: allowed. `longest` is the same in every rank.
///
/// # Safety
///
/// `input` has the parts that are sent, and `offers` two numbers for each rank. `target` has the
/// number of bytes that each rank has registered in the window `output`. Nothing else accesses
/// these, or what is received, until the kernel has ended. `flags` has an element for each block
/// and rank, 0 before the first launch; one launch at a time uses `flags`.
#[kernel(max_threads = 512, min_blocks = 2, requires(block.x.is_multiple_of(32)))]
pub unsafe fn push_exchange_v(
    comm: DevComm,
    input: *const u8,
    output: Window<u8>,
    target: GridConstant<Target>,
    longest: usize,
    sent: GridConstant<Parts>,
    received: GridConstant<Parts>,
    offers: *const u64,
    flags: Window<u32>,
) {
    let (team, coop) = (comm.lsa_team(), Coop::cta());
    // The flag of this block by which a rank tells that its message has arrived.
    let index =
        |source: i32| (source as u32 * thread::grid_dim_x() + thread::block_idx_x()) as usize;
    // SAFETY: the kernel's caller guarantees an element of `flags` for each block and rank.
    let flag = |source| unsafe { Flag::new(&comm, flags, index(source)) };
    grid::wait_for_previous();
    grid::launch_next();
    for distance in 1..team.n_ranks {
        let to = team.rotated(distance);
        let bytes = sent.bytes[to as usize];
        if bytes > longest {
            let offers = offers.wrapping_add(2 * to as usize);
            // SAFETY: the kernel's caller guarantees two numbers of `offers` for each rank.
            let [at, len] = [0, 1].map(|i| unsafe { mem::load(offers.add(i)) } as usize);
            assert!(len == bytes, "a rank sends another length than the peer receives");
            let at = target.place(to as usize, at, bytes);
            let from = input.wrapping_add(sent.at[to as usize]);
            let transfer = Transfer { from, into: output.lsa(to).as_ptr().wrapping_add(at), bytes };
            // SAFETY: nothing else accesses the message and its place, as the caller guarantees.
            unsafe { transfer.copy() };
            flag(team.rank).post(coop, to, 1);
        }
    }
    for distance in 1..team.n_ranks {
        let source = team.rotated(distance);
        if received.bytes[source as usize] > longest {
            flag(source).wait_at_least(coop, 1);
            if coop.thread_rank() == 0 {
                // For the peer's next message, which it sends only after a header from this rank.
                // SAFETY: `flags` has an element for each block and rank, as the caller guarantees.
                unsafe { flags.local().store_release(index(source), 0) };
            }
        }
    }
}
