//! All-to-all of short messages within the LSA team, by NCCL's low-latency (LL) protocol, without a
//! barrier.

use cuda_std::prelude::*;
use cuda_std::strided::Strided;
use devcomm_types::nccl::LlA2aHandle;
use half::{bf16, f16};
use nccl_device::{Coop, DevComm, Element, LlA2aBuffer, LsaPtr, Window};

/// Exchanges messages: `recv[p * count + i]` of rank `r` becomes `send[r * count + i]` of rank `p`,
/// for `i < count`: every rank of the LSA team has `count` elements for every rank.
///
/// `exchange` is the LL all-to-all that the host reserved, with 8-byte elements. Each block of the
/// grid needs at least one of these per rank of the team; with more, it sends more before it waits.
///
/// Grid: any, the same in every rank. Block: any, one-dimensional. `count` is in elements, the same
/// in every rank.
///
/// # Safety
///
/// Nothing else accesses this rank's windows until the kernel has ended. `exchange` belongs to this
/// device communicator. The launch checks the windows' lengths.
#[kernel(
    T = [f32, f16, bf16],
    requires(
        count.saturating_mul(comm.lsa_team().n_ranks as usize) <= send.len(),
        count.saturating_mul(comm.lsa_team().n_ranks as usize) <= recv.len()
    )
)]
pub unsafe fn ll_alltoall<T: Element>(
    comm: DevComm,
    exchange: LlA2aHandle,
    send: Window<T>,
    recv: Window<T>,
    count: usize,
) {
    let (team, coop) = (comm.lsa_team(), Coop::cta());
    let (n_ranks, me) = (team.n_ranks as u32, team.rank as u32);
    // SAFETY: a team has at least one rank. (This saves the divisions' checks.)
    unsafe { core::hint::assert_unchecked(n_ranks > 0) };
    // A message consists of 8-byte words, and its words are divided into chunks, which the blocks
    // take round-robin. In an epoch a block exchanges one chunk with each peer.
    let words = count.div_ceil(lanes::<T>());
    let chunk = exchange.n_slots / n_ranks;
    assert!(chunk > 0, "the LL all-to-all has fewer elements than ranks");
    // SAFETY: `exchange` belongs to `comm`, as the kernel's caller guarantees.
    let buffer = unsafe { LlA2aBuffer::new(&comm, team, exchange, thread::grid_dim_x()) };
    buffer.with(coop, thread::block_idx_x(), chunk * n_ranks, |session| {
        let stride = thread::grid_dim_x() as usize * chunk as usize;
        for first in Strided::new(thread::block_idx_x() as usize * chunk as usize, words, stride) {
            let n = chunk.min((words - first) as u32);
            for i in coop.strided(n * n_ranks) {
                // Each rank starts with the next rank, so that the ranks send to different peers.
                let (peer, at) = (team.rotated(1 + (i / n) as i32), i % n);
                let message = Message { first: peer as usize * count, count };
                // SAFETY: the launch checks that the window has the message, which nothing else
                // accesses.
                let word = unsafe { message.load(send.local(), first + at as usize) };
                session.send(peer, me * chunk + at, word);
            }
            for i in coop.strided(n * n_ranks) {
                let (peer, at) = (i / n, i % n);
                let message = Message { first: peer as usize * count, count };
                let word = session.receive(peer * chunk + at);
                // SAFETY: the launch checks that the window has the message, which nothing else
                // accesses.
                unsafe { message.store(recv.local(), first + at as usize, word) };
            }
            session.end_epoch();
        }
    });
}

/// Returns the number of elements in a word of 8 bytes.
const fn lanes<T>() -> usize {
    size_of::<u64>() / size_of::<T>()
}

/// A message between two ranks: `count` elements from index `first` on. The last word may be
/// partial.
#[derive(Clone, Copy)]
struct Message {
    first: usize,
    count: usize,
}

impl Message {
    /// Loads word `at`.
    ///
    /// # Safety
    ///
    /// `from` points to memory that contains the message, and nothing writes it.
    unsafe fn load<T: Element>(self, from: LsaPtr<T>, at: usize) -> u64 {
        let mut word = 0;
        let lane = (&raw mut word).cast::<T>();
        let begin = at * lanes::<T>();
        for i in 0..lanes::<T>() {
            if begin + i < self.count {
                // SAFETY: the element is in the message, by the caller's contract.
                unsafe { lane.add(i).write(from.load(self.first + begin + i)) };
            }
        }
        word
    }

    /// Stores word `at`.
    ///
    /// # Safety
    ///
    /// `to` points to memory that contains the message, and nothing else accesses it.
    unsafe fn store<T: Element>(self, to: LsaPtr<T>, at: usize, word: u64) {
        let lane = (&raw const word).cast::<T>();
        let begin = at * lanes::<T>();
        for i in 0..lanes::<T>() {
            if begin + i < self.count {
                // SAFETY: the element is in the message, by the caller's contract.
                unsafe { to.store(self.first + begin + i, lane.add(i).read()) };
            }
        }
    }
}
