//! All-reduce (sum) of ranks that do not all reach each other by load and store: within each LSA team by load and store, between the
//! teams over the network.

use cuda_std::hint::opaque;
use cuda_std::prelude::*;
use cuda_std::reduce::Sum;
use half::{bf16, f16};
use nccl_device::gin::GinBackend;
use nccl_device::reduce_copy::{local_reduce, lsa_copy, lsa_reduce};
use nccl_device::{BarrierIndex, Coop, DevComm, FenceLevel, HybridBarrier, MemoryOrder, Window};

/// `recv[i] = sum over all ranks of send[i]`, for `i < count`, in every rank.
///
/// Three steps, for a slice of the elements in each rank of a team: it sums its slice over its team; exchanges that partial sum with
/// the ranks of its rail, which have the same slice in the other teams; and stores the sum of the partial sums to its team. f16 and
/// bf16 are summed in f32 and rounded twice: the partial sums, which cross the network, and the result. All ranks get the same bits.
/// `recv` may be `send`.
///
/// Grid: any, up to the signals and hybrid barriers that the host reserved, the same in every rank. Block: any, one-dimensional, the
/// same in every rank. `count` is in elements, the same in every rank. Connections: RAIL or FULL.
///
/// # Safety
///
/// `send` and `recv` have at least `count` elements in every rank, `partial` has [`hybrid_allreduce_partials`], and nothing else
/// touches them until the kernel has ended in every rank.
#[kernel(T = [f32, f16, bf16], B = gin)]
pub unsafe fn hybrid_allreduce<T: Accumulate, B: GinBackend>(
    comm: DevComm,
    send: Window<T>,
    recv: Window<T>,
    partial: Window<T>,
    count: usize,
) {
    let (lsa, rail, coop, block) =
        (comm.lsa_team(), comm.rail_team(), Coop::cta(), thread::block_idx_x());
    let context = |block: u32| comm.gin::<B>(block % comm.n_gin_contexts().max(1));

    // Every rank's input is there, and nobody reads its partial sums of an earlier launch.
    HybridBarrier::with(coop, context(block), BarrierIndex::this_block(), |barrier| {
        barrier.sync(MemoryOrder::Acquire, FenceLevel::None);
    });

    // SAFETY: the kernel's contract; an element is reduced by one block of one rank of a team, and a partial sum is read after its
    // signal.
    unsafe {
        let Part { row, begin, first, len } = Part::of(&comm, block, count);
        let own = partial.local().as_ptr().add(rail.rank as usize * row + begin);
        lsa_reduce(coop, Sum, send, first, own, len, lsa);
    }
    // What follows is computed behind the reduction, which needs the registers.
    let block = opaque(block);
    let Part { row, begin, first, len } = Part::of(&comm, block, count);
    let gin = context(block);
    if len > 0 {
        let (came, own) = (comm.signal(block), partial.at(rail.rank as usize * row + begin));
        // A thread a peer.
        coop.sync();
        let mut i = 1 + coop.thread_rank() as i32;
        while i < rail.n_ranks {
            let peer = (rail.rank + i) % rail.n_ranks;
            // SAFETY: as above.
            let put = unsafe { gin.put(rail, peer, own, own, len) };
            put.signal(came.inc().weak()).post(Coop::thread());
            i += coop.size() as i32;
        }
        let others = (rail.n_ranks - 1) as u64;
        gin.wait_signal_follow_shadow(coop, came, others, MemoryOrder::Acquire);
    }
    // SAFETY: as above.
    unsafe {
        let (rows, sum) = (partial.local().as_ptr().add(begin), recv.local().as_ptr().add(first));
        local_reduce(coop, Sum, rail.n_ranks as usize, rows, row, sum, len);
        coop.sync();
        lsa_copy(coop, sum, recv, first, len, lsa);
    }
    gin.flush(coop, MemoryOrder::Relaxed);
    HybridBarrier::with(coop, gin, BarrierIndex::this_block(), |barrier| {
        barrier.lsa().sync(MemoryOrder::Release);
    });
}

/// What a block sums: a part of its rank's slice.
struct Part {
    /// Elements of a slice, and of a row of partial sums: a row for each team.
    row: usize,
    /// Where the part begins in its row.
    begin: usize,
    /// Where it begins in the whole.
    first: usize,
    /// Elements.
    len: usize,
}

impl Part {
    #[inline(always)]
    fn of(comm: &DevComm, block: u32, count: usize) -> Self {
        let lsa = comm.lsa_team();
        let row = slice(count, lsa.n_ranks as usize);
        let each = slice(row, thread::grid_dim_x() as usize);
        let begin = (block as usize * each).min(row);
        let first = (lsa.rank as usize * row + begin).min(count);
        Self { row, begin, first, len: each.min(row - begin).min(count - first) }
    }
}

/// Elements of `partial` that [`hybrid_allreduce`] of `count` elements needs in every rank, with `n_teams` teams of `team_ranks`
/// ranks: a slice for each team.
#[must_use]
pub const fn hybrid_allreduce_partials(count: usize, team_ranks: usize, n_teams: usize) -> usize {
    slice(count, team_ranks) * n_teams
}

/// Parts are multiples of so many elements: whole vectors of every type, so that they are moved by vectors.
const GRAIN: usize = 8;

/// Elements of each of `parts` parts. The last ones may be shorter.
#[inline(always)]
const fn slice(count: usize, parts: usize) -> usize {
    let parts = if parts == 0 { 1 } else { parts };
    count.div_ceil(parts).next_multiple_of(GRAIN)
}
