//! Ping-pong over NVLink between two neighbouring ranks: a message is plain stores, then a flag.

use cuda_std::prelude::*;
use cuda_std::strided::Strided;
use cuda_std::vector::Vec16;
use nccl_device::{Coop, DevComm, Flag, LsaPtr, Window};

/// Makes `rounds` round trips: the even rank stores the first `bytes` bytes of its `send` to the
/// odd rank's `recv`, then the odd rank does the same to the even rank. Every block copies its own
/// part of a message, with its own flags.
///
/// `flags` has two elements for each block: the number of arrived messages, which the peer stores,
/// and the value of that number at the end of the previous launch. Both are initially 0.
///
/// Grid: any, the same in every rank. Block: any, one-dimensional.
///
/// # Safety
///
/// All ranks are in one LSA team. `send` and `recv` have `bytes` bytes in every rank and `flags`
/// two elements for each block, every rank passes the same `bytes` and `rounds`, and nothing else
/// accesses the windows until the kernel has ended in every rank.
#[kernel]
pub unsafe fn lsa_put(
    comm: DevComm,
    send: Window<u8>,
    recv: Window<u8>,
    flags: Window<u32>,
    bytes: usize,
    rounds: u32,
) {
    let (team, cta) = (comm.lsa_team(), Coop::cta());
    let peer = team.rank ^ 1;
    if peer >= team.n_ranks {
        return;
    }
    let block = thread::block_idx_x() as usize;
    let (saved, mine) = (thread::grid_dim_x() as usize + block, flags.local());
    let is_even = team.rank % 2 == 0; // It stores in the even steps, the odd rank in the others.
    // SAFETY: the caller's windows have the elements; only this block, and the same block of the
    // peer, use those below.
    unsafe {
        let arrived = Flag::new(&comm, flags, block);
        // Earlier launches have received this number of messages, and so has the peer.
        let base = mine.load(saved);
        let mut message = base;
        for step in 0..2 * rounds {
            if is_even == (step % 2 == 0) {
                copy_part(send.local(), recv.lsa(peer), bytes);
                arrived.post(cta, peer, message.wrapping_add(1));
            } else {
                arrived.wait_at_least(cta, message.wrapping_add(1));
            }
            // The two messages of a round trip have the same number.
            message = message.wrapping_add(step % 2);
        }
        thread::sync_threads();
        if cta.thread_rank() == 0 {
            mine.store(saved, base.wrapping_add(rounds));
        }
    }
}

/// Copies this block's part of `bytes` bytes.
///
/// # Safety
///
/// Both pointers have `bytes` bytes, aligned to 16, and nothing else accesses them meanwhile.
pub(crate) unsafe fn copy_part(from: LsaPtr<u8>, to: LsaPtr<u8>, bytes: usize) {
    /// Vectors in flight per thread.
    const UNROLL: usize = 4;
    const LANES: usize = Vec16::<u8>::LANES;
    let (row, thread) = (thread::block_dim_x() as usize, thread::thread_idx_x() as usize);
    let (blocks, block) = (thread::grid_dim_x() as usize, thread::block_idx_x() as usize);
    let vectors = bytes / LANES;
    let len = vectors.div_ceil(blocks.max(1)); // `max` spares the check of the division.
    let end = ((block + 1) * len).min(vectors);
    let mut at = block * len + thread;
    // SAFETY: the vectors and bytes lie below `bytes`, for which the caller's pointers have memory
    // that nothing else accesses; one thread accesses each.
    unsafe {
        let mut loaded = [Vec16::<u8>::from_bits([0; 4]); UNROLL];
        while at + (UNROLL - 1) * row < end {
            for (u, vector) in loaded.iter_mut().enumerate() {
                *vector = from.load_vec(LANES * (at + u * row));
            }
            for (u, vector) in loaded.iter().enumerate() {
                to.store_vec(LANES * (at + u * row), *vector);
            }
            at += UNROLL * row;
        }
        while at < end {
            to.store_vec(LANES * at, from.load_vec(LANES * at));
            at += row;
        }
        // The last block copies the bytes after the last whole vector.
        if block + 1 == blocks {
            for at in Strided::new(vectors * Vec16::<u8>::LANES + thread, bytes, row) {
                to.store(at, from.load(at));
            }
        }
    }
}
