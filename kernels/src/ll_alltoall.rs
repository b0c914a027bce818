//! All-to-all of short messages within the LSA team, by NCCL's low-latency protocol: no barrier,
//! one trip over NVLink.

use cuda_std::prelude::*;
use cuda_std::strided::Strided;
use devcomm_types::nccl::LlA2aHandle;
use half::{bf16, f16};
use nccl_device::{Coop, DevComm, Element, LlA2aBuffer, LsaPtr, Window};

/// `recv[p * count + i]` of rank `r` becomes `send[r * count + i]` of rank `p`, for `i < count`:
/// every rank of the LSA team has `count` elements for every other.
///
/// `exchange` is an LL all-to-all that the host asked for: for as many blocks as the grid has, with
/// elements of 8 bytes, at least one for each rank of the team. A multiple of that lets a block
/// send more before it waits.
///
/// Grid: any, the same in every rank. Block: any, one-dimensional. `count` is in elements, the same
/// in every rank.
///
/// # Safety
///
/// Nothing else touches this rank's windows until the kernel has ended. `exchange` is this device
/// communicator's. The launch checks the windows' lengths.
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
    // SAFETY: a team has at least one rank. (A check here would be a branch to a trap.)
    unsafe { core::hint::assert_unchecked(n_ranks > 0) };
    // Messages are cut into words of 8 bytes. The blocks take them in turn, a chunk for each peer
    // in an epoch.
    let words = count.div_ceil(lanes::<T>());
    let chunk = exchange.n_slots / n_ranks;
    assert!(chunk > 0, "an LL all-to-all has an element a rank");
    // SAFETY: the kernel's contract.
    let buffer = unsafe { LlA2aBuffer::new(&comm, team, exchange, thread::grid_dim_x()) };
    buffer.with(coop, thread::block_idx_x(), chunk * n_ranks, |session| {
        let turn = thread::grid_dim_x() as usize * chunk as usize;
        for first in Strided::new(thread::block_idx_x() as usize * chunk as usize, words, turn) {
            let n = chunk.min((words - first) as u32);
            for i in coop.strided(n * n_ranks) {
                // Every rank starts with its neighbour, so that no two send to the same one.
                let (peer, at) = (team.rotated(1 + (i / n) as i32), i % n);
                let message = Message { first: peer as usize * count, count };
                // SAFETY: the kernel's contract.
                let word = unsafe { message.load(send.local(), first + at as usize) };
                session.send(peer, me * chunk + at, word);
            }
            for i in coop.strided(n * n_ranks) {
                let (peer, at) = (i / n, i % n);
                let message = Message { first: peer as usize * count, count };
                let word = session.receive(peer * chunk + at);
                // SAFETY: the kernel's contract.
                unsafe { message.store(recv.local(), first + at as usize, word) };
            }
            session.end_epoch();
        }
    });
}

/// Elements in a word of 8 bytes.
const fn lanes<T>() -> usize {
    size_of::<u64>() / size_of::<T>()
}

/// What one rank has for another: `count` elements from `first` on. The last word may be short.
#[derive(Clone, Copy)]
struct Message {
    first: usize,
    count: usize,
}

impl Message {
    /// Word `at`.
    ///
    /// # Safety
    ///
    /// The message lies behind `from`, and nobody writes it.
    #[inline(always)]
    unsafe fn load<T: Element>(self, from: LsaPtr<T>, at: usize) -> u64 {
        let mut word = 0;
        let lane = (&raw mut word).cast::<T>();
        let begin = at * lanes::<T>();
        for i in 0..lanes::<T>() {
            if begin + i < self.count {
                // SAFETY: an element of the message, by the caller's; a lane of the word.
                unsafe { lane.add(i).write(from.load(self.first + begin + i)) };
            }
        }
        word
    }

    /// Stores word `at`.
    ///
    /// # Safety
    ///
    /// The message lies behind `to`, and nobody else touches it.
    #[inline(always)]
    unsafe fn store<T: Element>(self, to: LsaPtr<T>, at: usize, word: u64) {
        let lane = (&raw const word).cast::<T>();
        let begin = at * lanes::<T>();
        for i in 0..lanes::<T>() {
            if begin + i < self.count {
                // SAFETY: an element of the message, by the caller's; a lane of the word.
                unsafe { to.store(self.first + begin + i, lane.add(i).read()) };
            }
        }
    }
}
