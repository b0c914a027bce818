//! Cooperation of threads, blocks and ranks: flags, barriers, sums, strided loops.

use cuda_std::collective::Summand;
use cuda_std::prelude::*;
use cuda_std::reduce::Number;
use nccl_device::{
    BarrierIndex, Coop, DevComm, Epoch, Flags, GridBarrier, MemoryOrder, NeighborBarrier, Timeout,
    Window,
};

/// Does this `steps` times: each block stores its `count` elements of `x`, plus 1, to `y` of the
/// next rank, and replaces them by its `y`. One flag per block signals that `y` was stored, another
/// that `y` was read.
#[kernel]
pub unsafe fn pass_on(
    comm: DevComm,
    x: Window<u32>,
    y: Window<u32>,
    flags: Window<u32>,
    epoch: *mut u32,
    count: usize,
    steps: u32,
) {
    let (team, coop, block) = (comm.lsa_team(), Coop::cta(), thread::block_idx_x());
    let first = block as usize * count;
    // SAFETY: the kernel's contract: two flags per block, and the words of an epoch.
    let (flags, epoch) =
        unsafe { (Flags::new(&comm, flags, 0, 2 * thread::grid_dim_x()), Epoch::begin(epoch)) };
    let (arrived, was_read) = (flags.at(2 * block), flags.at(2 * block + 1));
    let mut number = epoch.get().wrapping_sub(1).wrapping_mul(steps);
    for step in 0..steps {
        number = number.wrapping_add(1);
        // SAFETY: the kernel's contract; the flags order the accesses.
        unsafe {
            for i in coop.strided(count) {
                y.lsa(team.next()).store(first + i, x.local().load(first + i) + 1);
            }
            arrived.post(coop, team.next(), number);
            if step % 2 == 0 {
                arrived.wait_at_least(coop, number);
            } else {
                let limit = Timeout::millis(60_000);
                assert!(arrived.wait_at_least_timeout(coop, number, limit).is_ok());
            }
            for i in coop.strided(count) {
                x.local().store(first + i, y.local().load(first + i));
            }
        }
        was_read.post(coop, team.prev(), number);
        was_read.wait_at_least(coop, number);
    }
    // SAFETY: called once per launch.
    unsafe { epoch.end(coop) };
}

/// Does this `rounds` times: each block writes the round, and adds up what all blocks wrote.
#[kernel]
pub unsafe fn grid_meets(
    comm: DevComm,
    word: *mut u32,
    slots: *mut u32,
    sums: *mut u32,
    rounds: u32,
) {
    let (block, blocks) = (thread::block_idx_x() as usize, thread::grid_dim_x() as usize);
    // SAFETY: the kernel's contract: a barrier word, and one slot and sum per block.
    unsafe {
        let mut barrier = GridBarrier::new(&comm, word);
        let mut sum = 0;
        for round in 1..rounds + 1 {
            if thread::thread_idx_x() == 0 {
                mem::store(slots.add(block), round);
            }
            barrier.sync();
            if thread::thread_idx_x() == 0 {
                for other in 0..blocks {
                    sum += mem::load_volatile(slots.add(other));
                }
            }
            barrier.sync();
        }
        if thread::thread_idx_x() == 0 {
            mem::store(sums.add(block), sum);
        }
    }
}

/// Does this `rounds` times: each rank stores the round to `mail[block][2]` of its neighbours, and
/// after the barrier counts in `wrong[block]` its own elements that differ from the round.
#[kernel]
pub unsafe fn neighbors_meet(
    comm: DevComm,
    words: Window<u32>,
    mail: Window<u32>,
    wrong: *mut u32,
    rounds: u32,
) {
    let (team, coop, block) = (comm.lsa_team(), Coop::cta(), thread::block_idx_x() as usize);
    let first = block * NeighborBarrier::WORDS;
    let mut mismatches = 0;
    // SAFETY: the kernel's contract: barrier words, two of `mail` and one of `wrong` per block.
    unsafe {
        let mut barrier = NeighborBarrier::new(coop, &comm, team, words, first);
        for round in 1..rounds + 1 {
            if coop.thread_rank() == 0 {
                mail.lsa(team.next()).store(2 * block, round);
                mail.lsa(team.prev()).store(2 * block + 1, round);
            }
            match round % 3 {
                0 => barrier.sync(MemoryOrder::AcqRel),
                1 => barrier.arrive(MemoryOrder::Release).wait(MemoryOrder::Acquire),
                _ => {
                    let limit = Timeout::millis(60_000);
                    assert!(barrier.sync_timeout(MemoryOrder::AcqRel, limit).is_ok());
                }
            }
            if coop.thread_rank() == 0 {
                let own = mail.local();
                mismatches += u32::from(own.load(2 * block) != round);
                mismatches += u32::from(own.load(2 * block + 1) != round);
            }
            barrier.sync(MemoryOrder::AcqRel);
        }
        if coop.thread_rank() == 0 {
            mem::store(wrong.add(block), mismatches);
        }
    }
}

/// Computes the sums of `x` over each block's and each warp's threads, in `of_blocks` and
/// `of_warps`.
#[kernel(T = [f32, f64, i32, u64])]
pub unsafe fn sum_threads<T: Summand>(
    x: *const T,
    of_blocks: *mut T,
    of_warps: *mut T,
    count: usize,
) {
    let mut mine = T::ZERO;
    for i in thread::grid_strided(count) {
        // SAFETY: the test passes buffers with `count` elements.
        mine = mine.wrapping_add(unsafe { mem::load(x.add(i)) });
    }
    let block = thread::block_idx_x() as usize;
    // SAFETY: the kernel's contract: whole warps, two sums per block and one per warp.
    unsafe {
        let (of_warp, of_block) = (warp_sum(mine), block_sum(mine));
        // The second sum reuses the shared memory of the first.
        let again = block_sum(of_block);
        if warp::lane_id() == 0 {
            mem::store(of_warps.add(thread::index_1d() as usize / 32), of_warp);
        }
        if thread::thread_idx_x() == thread::block_dim_x() - 1 {
            mem::store(of_blocks.add(2 * block), of_block);
            mem::store(of_blocks.add(2 * block + 1), again);
        }
    }
}

/// Sums each block's vector of `x` over the ranks, in rank `block % n_ranks`, and stores the sum to
/// every rank's `y`.
#[kernel(T = [f32, f16])]
pub unsafe fn sum_vectors<T: Accumulate>(comm: DevComm, x: Window<T>, y: Window<T>) {
    let (team, block) = (comm.lsa_team(), thread::block_idx_x());
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire);
    if thread::thread_idx_x() == 0 && block % team.n_ranks as u32 == team.rank as u32 {
        let at = block as usize * Vec16::<T>::LANES;
        // SAFETY: the kernel's contract: one vector per block; between barriers one thread uses it.
        unsafe {
            let sum = match team.n_ranks {
                4 => x.sum_vec_of::<4>(team, at),
                _ => x.sum_vec(team, at),
            };
            y.store_vec_to_all(team, at, T::narrow(sum));
        }
    }
    barrier.sync(MemoryOrder::Release);
}
