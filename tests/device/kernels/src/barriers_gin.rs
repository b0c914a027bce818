//! Barriers over the network, and over both.

use cuda_std::prelude::*;
use nccl_device::gin::{Gin, GinBackend};
use nccl_device::{
    BarrierIndex, Coop, DevComm, FenceLevel, GinBarriers, MemoryOrder, Team, Timeout,
};

use crate::extra::{Extra, Words, share};

const ORDER: MemoryOrder = MemoryOrder::AcqRel;

#[inline(always)]
fn fence(n: u32) -> FenceLevel {
    match n {
        0 => FenceLevel::None,
        1 => FenceLevel::Put,
        2 => FenceLevel::Get,
        _ => FenceLevel::PutGet,
    }
}

/// `rounds` times: this rank puts a word to every member of `team`, on the contexts that the
/// barrier covers in turn, and gets one; meets all; and checks what the fence says is here. `first`
/// is where the coop's words start in `mail`: 4 rows of `ranks`.
#[inline(always)]
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
    mut meet: impl FnMut(u32),
) -> u64 {
    let (me, ranks) = (team.rank as usize, team.n_ranks as usize);
    let (sources, targets, gets, statics) =
        (first, first + ranks, first + 2 * ranks, first + 3 * ranks);
    let value =
        |from: i32, to: i32, round: u32| (from as u64) << 32 | (to as u64) << 16 | u64::from(round);
    let world = |member: usize| team.to_world(comm.rank(), member as i32);
    let mut wrong = 0;
    // What peers get: written once. The first barrier orders it.
    for p in share(coop, ranks) {
        // SAFETY: the caller's rows.
        unsafe {
            mail.local().store(statics + p, value(comm.rank(), world(p), 999));
            mail.local().store(gets + p, 0);
        }
    }
    // Meeting 0 orders that; then two a round. One call of `meet`, so that it is inlined.
    let mut step = 0;
    while step <= 2 * rounds {
        let (round, posts) = (step / 2, !step.is_multiple_of(2));
        if posts {
            for p in share(coop, ranks) {
                // SAFETY: the sources were read: by the fence, or by the flush below.
                unsafe {
                    mail.local().store(sources + p, value(comm.rank(), world(p), round));
                }
            }
            for p in 0..ranks {
                let on =
                    if contexts > 1 { comm.gin::<B>((p as u32 + round) % contexts) } else { gin };
                // SAFETY: the targets are read between two barriers, and not in the round in which
                // they are written again.
                unsafe {
                    on.put(team, p as i32, mail.at(targets + me), mail.at(sources + p), 1)
                        .post(coop);
                    on.get(team, p as i32, mail.at(statics + me), mail.at(gets + p), 1).post(coop);
                }
            }
        }
        meet(step);
        if posts {
            for p in share(coop, ranks) {
                // SAFETY: as the fence says.
                unsafe {
                    if fence as i32 & 1 != 0 {
                        let got = mail.local().load(targets + p);
                        wrong += u64::from(got != value(world(p), comm.rank(), round));
                    }
                    if fence as i32 & 2 != 0 {
                        let got = mail.local().load(gets + p);
                        wrong += u64::from(got != value(world(p), comm.rank(), 999));
                        mail.local().store(gets + p, 0);
                    }
                }
            }
            // The next round writes the sources again.
            for c in 0..contexts {
                let on = if contexts > 1 { comm.gin::<B>(c) } else { gin };
                on.flush(coop, ORDER);
            }
        }
        step += 1;
    }
    wrong
}

/// The barriers of world (`n & 0xc` 0) or rail (4), or those that the host made in addition (8),
/// with fence `n & 3`; `n & 16`: over all contexts; `n & 32`: the ways to meet take turns: with a
/// timeout that is not needed, arrive and wait, and both. `n >> 8` rounds. A block a barrier.
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
        // SAFETY: barriers of the world that the host made.
        _ => (comm.world_team(), unsafe { GinBarriers::new(gin, comm.world_team(), extra.gin) }),
    };
    let over_all = n & 16 != 0;
    let contexts = if over_all { comm.n_gin_contexts() } else { 1 };
    let set = if over_all { set.over_all_contexts() } else { set };
    let mut barrier = set.barrier(coop, index);
    let first = 4 * team.n_ranks as usize * index.get() as usize;
    // SAFETY: four rows of words per block.
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
    // SAFETY: a word per thread.
    unsafe { out.local().store(thread::index_1d() as usize, wrong) };
}

/// The hybrid barrier with fence `n & 3`, puts and gets along the rail (`n & 4`) or to all;
/// `n & 32`: the ways to meet take turns. `n >> 8` rounds.
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
    // SAFETY: four rows of words per block.
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
    // SAFETY: a word per thread.
    unsafe { out.local().store(thread::index_1d() as usize, wrong) };
}

/// A rendezvous of all ranks by the hybrid barrier alone: `n` times, everybody's number is seen
/// over load and store within the LSA team, and the inner and outer barrier work by themselves.
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
            // SAFETY: a word a rank of the team, written between two barriers.
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
            // SAFETY: as above.
            wrong += u64::from(unsafe { mail.local().load(t as usize) } != round);
        }
        barrier.sync(ORDER, FenceLevel::None);
    }
    // SAFETY: a word per thread.
    unsafe { out.local().store(thread::index_1d() as usize, wrong) };
}

/// World rank 0 never comes to barriers over the network: the timeouts, as bits, a word per thread.
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
    // SAFETY: a word per thread.
    unsafe { out.local().store(thread::thread_idx_x() as usize, bits) };
}
