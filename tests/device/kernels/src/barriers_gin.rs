//! Kernels that test GIN barriers and hybrid barriers.

use cuda_std::prelude::*;
use nccl_device::gin::{Gin, GinBackend};
use nccl_device::{
    BarrierIndex, Coop, DevComm, FenceLevel, GinBarriers, MemoryOrder, Team, Timeout,
};

use crate::extra::{Extra, Words, share};

const ORDER: MemoryOrder = MemoryOrder::AcqRel;
/// The number that words for gets have in place of a round: beyond every round.
const SERVED: u32 = 999;

fn fence(n: u32) -> FenceLevel {
    match n {
        0 => FenceLevel::None,
        1 => FenceLevel::Put,
        2 => FenceLevel::Get,
        _ => FenceLevel::PutGet,
    }
}

/// Repeats `rounds` times: this rank puts a word to every rank of `team` and gets one from it,
/// alternating over the contexts that the barrier covers; calls `sync`; and checks the words whose
/// arrival `fence` guarantees: its bit 0 is for puts, its bit 1 for gets. Returns the number of
/// errors. The coop's words in `mail` begin at index `first`: 4 rows, of one word per rank.
#[allow(clippy::too_many_arguments)]
unsafe fn rounds<B: GinBackend>(
    comm: &DevComm,
    gin: Gin<'_, B>,
    contexts: u32,
    mail: Words,
    coop: Coop,
    first: usize,
    team: Team,
    rounds: u32,
    fence: FenceLevel,
    mut sync: impl FnMut(u32),
) -> u64 {
    let (me, ranks) = (team.rank as usize, team.n_ranks as usize);
    let (sources, targets, gets, served) =
        (first, first + ranks, first + 2 * ranks, first + 3 * ranks);
    let value =
        |from: i32, to: i32, round: u32| (from as u64) << 32 | (to as u64) << 16 | u64::from(round);
    let world = |member: usize| team.to_world(comm.rank(), member as i32);
    let mut wrong = 0;
    // The words that peers get are written once, before the first barrier.
    for p in share(coop, ranks) {
        // SAFETY: only this coop has these rows.
        unsafe {
            mail.local().store(served + p, value(comm.rank(), world(p), SERVED));
            mail.local().store(gets + p, 0);
        }
    }
    // Barrier 0 orders these writes; each round has two barriers. `sync` is called in one place
    // only, so that it is inlined.
    let mut step = 0;
    while step <= 2 * rounds {
        let (round, puts) = (step / 2, !step.is_multiple_of(2));
        if puts {
            for p in share(coop, ranks) {
                // SAFETY: the puts have read their sources, by the fence or by the flush below.
                unsafe {
                    mail.local().store(sources + p, value(comm.rank(), world(p), round));
                }
            }
            for p in 0..ranks {
                let ctx =
                    if contexts > 1 { comm.gin::<B>((p as u32 + round) % contexts) } else { gin };
                // SAFETY: barriers separate the reads of the targets from the next puts to them.
                unsafe {
                    // Without a fence of puts no read of the targets would be ordered after these.
                    if fence as i32 & 1 != 0 {
                        ctx.put(team, p as i32, mail.at(targets + me), mail.at(sources + p), 1)
                            .post(coop);
                    }
                    ctx.get(team, p as i32, mail.at(served + me), mail.at(gets + p), 1).post(coop);
                }
            }
        }
        sync(step);
        if puts {
            for p in share(coop, ranks) {
                // SAFETY: the fence guarantees that these words have arrived.
                unsafe {
                    if fence as i32 & 1 != 0 {
                        let got = mail.local().load(targets + p);
                        wrong += u64::from(got != value(world(p), comm.rank(), round));
                    }
                    if fence as i32 & 2 != 0 {
                        let got = mail.local().load(gets + p);
                        wrong += u64::from(got != value(world(p), comm.rank(), SERVED));
                        mail.local().store(gets + p, 0);
                    }
                }
            }
            // The next round overwrites the sources.
            for c in 0..contexts {
                let ctx = if contexts > 1 { comm.gin::<B>(c) } else { gin };
                ctx.flush(coop, ORDER);
            }
        }
        step += 1;
    }
    wrong
}

/// Tests world barriers (`n & 0xc` = 0), rail barriers (4), or additional barriers that the host
/// created (8), with fence `n & 3`, in `n >> 8` rounds. With `n & 16` barriers cover all contexts.
/// With `n & 32` the kernel alternates between a sync with a timeout, arrive and wait, and arrive
/// and wait with a timeout. Each block has one barrier.
#[kernel(B = gin)]
pub unsafe fn gin_barrier<B: GinBackend>(
    comm: DevComm,
    mail: Words,
    out: Words,
    extra: Extra,
    n: u32,
) {
    let (coop, gin, index) = (Coop::cta(), comm.gin::<B>(0), BarrierIndex::this_block());
    let (team, set) = match n & 0xc {
        0 => (comm.world_team(), gin.world_barriers()),
        4 => (comm.rail_team(), gin.rail_barriers()),
        // SAFETY: the host created these barriers for the world team.
        _ => (comm.world_team(), unsafe { GinBarriers::new(gin, comm.world_team(), extra.gin) }),
    };
    let over_all = n & 16 != 0;
    let contexts = if over_all { comm.n_gin_contexts() } else { 1 };
    let set = if over_all { set.over_all_contexts() } else { set };
    let mut barrier = set.barrier(coop, index);
    let first = 4 * team.n_ranks as usize * index.get() as usize;
    // SAFETY: `mail` has four rows of words per block.
    let wrong = unsafe {
        rounds(&comm, gin, contexts, mail, coop, first, team, n >> 8, fence(n & 3), |i| {
            let (fence, limit) = (fence(n & 3), Timeout::millis(60_000));
            match i % 3 {
                _ if n & 32 == 0 => barrier.sync(ORDER, fence),
                0 => assert!(barrier.sync_timeout(ORDER, fence, limit).is_ok()),
                1 => barrier.arrive(MemoryOrder::Release, fence).wait(MemoryOrder::Acquire),
                _ => assert!(barrier.arrive(ORDER, fence).wait_timeout(ORDER, limit).is_ok()),
            }
        })
    };
    // SAFETY: `out` has one word per thread.
    unsafe { out.local().store(thread::index_1d() as usize, wrong) };
}

/// Tests hybrid barriers with fence `n & 3` in `n >> 8` rounds, with puts and gets between the
/// ranks of the rail (`n & 4`) or between all ranks. With `n & 32` it alternates as `gin_barrier`.
#[kernel(B = gin)]
pub unsafe fn hybrid_barrier<B: GinBackend>(
    comm: DevComm,
    mail: Words,
    out: Words,
    _extra: Extra,
    n: u32,
) {
    let (coop, gin, index) = (Coop::cta(), comm.gin::<B>(0), BarrierIndex::this_block());
    let team = if n & 4 != 0 { comm.rail_team() } else { comm.world_team() };
    let first = 4 * team.n_ranks as usize * index.get() as usize;
    let mut barrier = gin.hybrid_barrier(coop, index);
    // SAFETY: `mail` has four rows of words per block.
    let wrong = unsafe {
        rounds(&comm, gin, 1, mail, coop, first, team, n >> 8, fence(n & 3), |i| {
            let (fence, limit) = (fence(n & 3), Timeout::millis(60_000));
            match i % 4 {
                0 => barrier.sync(ORDER, fence),
                _ if n & 32 == 0 => barrier.sync(ORDER, fence),
                1 => assert!(barrier.sync_timeout(ORDER, fence, limit).is_ok()),
                2 => barrier.arrive(MemoryOrder::Release, fence).wait(MemoryOrder::Acquire),
                _ => assert!(barrier.arrive(ORDER, fence).wait_timeout(ORDER, limit).is_ok()),
            }
        })
    };
    // SAFETY: `out` has one word per thread.
    unsafe { out.local().store(thread::index_1d() as usize, wrong) };
}

/// Tests hybrid barriers without puts: `n` times, checks that stores within the LSA team are
/// visible after the inner (LSA) barrier, the hybrid barrier, or the inner and the outer (rail)
/// barrier.
#[kernel(B = gin)]
pub unsafe fn hybrid_parts<B: GinBackend>(
    comm: DevComm,
    mail: Words,
    out: Words,
    _extra: Extra,
    n: u32,
) {
    let (coop, gin, lsa) = (Coop::cta(), comm.gin::<B>(0), comm.lsa_team());
    let t = thread::thread_idx_x();
    let mut wrong = 0;
    let mut barrier = gin.hybrid_barrier(coop, BarrierIndex::this_block());
    for round in 0..u64::from(n) {
        if (t as i32) < lsa.n_ranks {
            // SAFETY: each rank of the team has one word, which it writes between two barriers.
            unsafe { mail.lsa(t as i32).store(lsa.rank as usize, round) };
        }
        match round % 3 {
            0 => barrier.lsa().sync(ORDER),
            1 => barrier.sync(ORDER, FenceLevel::None),
            _ => {
                barrier.lsa().sync(ORDER);
                barrier.rail().sync(ORDER, FenceLevel::None);
            }
        }
        if (t as i32) < lsa.n_ranks {
            // SAFETY: the window has a word for each thread.
            wrong += u64::from(unsafe { mail.local().load(t as usize) } != round);
        }
        barrier.sync(ORDER, FenceLevel::None);
    }
    // SAFETY: `out` has one word per thread.
    unsafe { out.local().store(thread::index_1d() as usize, wrong) };
}

/// Waits at GIN barriers, at which world rank 0 never arrives. Each thread of other ranks stores a
/// word, whose bits tell which waits timed out.
#[kernel(B = gin)]
pub unsafe fn gin_barrier_never<B: GinBackend>(
    comm: DevComm,
    _mail: Words,
    out: Words,
    _extra: Extra,
    _n: u32,
) {
    let (coop, gin, index) = (Coop::cta(), comm.gin::<B>(0), BarrierIndex::this_block());
    if comm.rank() == 0 {
        return;
    }
    let soon = Timeout::micros(300);
    let mut world = gin.world_barrier(coop, index);
    let mut bits = u64::from(world.sync_timeout(ORDER, FenceLevel::None, soon).is_err());
    bits |= u64::from(world.sync_timeout(ORDER, FenceLevel::PutGet, soon).is_err()) << 1;
    let mut barrier = gin.hybrid_barrier(coop, index);
    bits |= u64::from(barrier.sync_timeout(ORDER, FenceLevel::PutGet, soon).is_err()) << 2;
    // SAFETY: `out` has one word per thread.
    unsafe { out.local().store(thread::thread_idx_x() as usize, bits) };
}
