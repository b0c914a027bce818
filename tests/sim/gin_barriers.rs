//! Tests of GIN barriers and hybrid barriers.

use core::mem::MaybeUninit;
use core::ptr::null_mut;
use devcomm_types::Kernel;

use crate::common::*;
use cuda_std::prelude::*;
use devcomm::sim::{Error, Waiting};
use devcomm::{DevCommRequirements, GinBarriers, GinConnectionType, Simulation};
use devcomm_testing::simulated::{Gpu, failure, read, run, simulate, world};
use nccl_device::raw::{self, BarrierSession, GinBarrierHandle, GinBarrierSession, Team};
use nccl_device::{DevComm, Window};

/// NCCL's fence levels.
const NO_FENCE: i32 = 0;
const PUT: i32 = 1;
const GET: i32 = 2;

/// Parameters of kernels: the barrier to use.
const WORLD: u32 = 0;
const RAIL: u32 = 1;

fn barrier_of(comm: &raw::DevComm, which: u32) -> (Team, GinBarrierHandle) {
    match which {
        WORLD => (comm.world_team(), comm.world_gin_barrier),
        _ => (comm.rail_team(), comm.rail_gin_barrier),
    }
}

/// Every rank puts the round's number to every rank of the team, synchronises and checks its words.
#[kernel]
unsafe fn puts_and_syncs(
    comm: DevComm,
    out: Window<u64>,
    which: u32,
    all_contexts: bool,
    rounds: u64,
) {
    let comm = comm.as_raw();
    let (team, barriers) = barrier_of(comm, which);
    let (coop, index) = (cta(), thread::block_idx_x());
    let contexts = if all_contexts { comm.gin_context_count } else { 1 };
    let mut session = MaybeUninit::<GinBarrierSession>::uninit();
    let session = session.as_mut_ptr();
    let members = team.n_ranks as usize;
    // Byte offset of the slot for puts by a block, on a context, from a member of the team.
    let offset = |context: u32, member: usize| {
        ((index * contexts + context) as usize * members + member + 1) * 8
    };
    // SAFETY: the window has the slots; the barriers order the accesses.
    unsafe {
        let mut net = gin(comm, 0);
        if all_contexts {
            raw::ncclGinBarrierSessionInitAllContexts(
                session, &coop, comm, &team, &barriers, index,
            );
        } else {
            raw::ncclGinBarrierSessionInit(session, &coop, &net, &team, &barriers, index);
        }
        for round in 1..=rounds {
            if thread::thread_idx_x() == 0 {
                for context in 0..contexts {
                    net = gin(comm, context);
                    for peer in 0..team.n_ranks {
                        let dst = (handle(&out), offset(context, team.rank as usize));
                        put_value(&mut net, &team, peer, dst, (round, 8), SignalMode::Nothing);
                    }
                }
            }
            raw::ncclGinBarrierSessionSync(session, &coop, ACQ_REL, PUT);
            if thread::thread_idx_x() == 0 {
                for context in 0..contexts {
                    for member in 0..members {
                        let seen = out.local().load(offset(context, member) / 8);
                        assert_eq!(seen, round, "context {context} member {member}");
                    }
                }
            }
            // No rank puts the next round's data before all have read this round's.
            raw::ncclGinBarrierSessionSync(session, &coop, ACQ_REL, NO_FENCE);
        }
        raw::ncclGinBarrierSessionDestroy(session);
    }
}

fn requirements(connection: GinConnectionType) -> DevCommRequirements {
    let world = if connection == GinConnectionType::Full { 2 } else { 0 };
    full()
        .gin_connection(connection)
        .gin_contexts(3)
        .world_gin_barriers(world)
        .rail_gin_barriers(2)
        .barriers(2)
}

#[test]
fn a_put_fence_makes_the_puts_of_every_member_visible() {
    for seed in 0..30 {
        simulate(Simulation::new(4).team_size(2).seed(seed), |gpu| {
            for (which, connection) in [
                (WORLD, GinConnectionType::Full),
                (RAIL, GinConnectionType::Full),
                (RAIL, GinConnectionType::Rail),
            ] {
                for all_contexts in [false, true] {
                    let comm = gpu.dev_comm(requirements(connection))?;
                    let out = gpu.window(&[0_u64; 64])?;
                    let args = (&comm, &out, which, all_contexts, 3_u64);
                    gpu.launch(puts_and_syncs::with_args(args).grid(2).block(3))?;
                    // The next launch continues the barriers' count.
                    gpu.launch(puts_and_syncs::with_args(args).grid(2).block(3))?;
                }
            }
            Ok(())
        });
    }
}

#[test]
fn weak_signals_make_the_put_fence_void_as_on_a_gpu() {
    let fails = |seed: u64| {
        let world = world(Simulation::new(2).seed(seed));
        let result = run(&world, |gpu| {
            let weak = requirements(GinConnectionType::Full).gin_strong_signals(false);
            let (comm, out) = (gpu.dev_comm(weak)?, gpu.window(&[0_u64; 64])?);
            let args = (&comm, &out, WORLD, false, 3_u64);
            (0..10).try_for_each(|_| gpu.launch(puts_and_syncs::with_args(args).grid(1).block(1)))
        });
        let failure = world.simulated_machine().unwrap().failure();
        result.is_err() && matches!(failure.as_deref(), Some(Error::Panic { .. }))
    };
    assert!((0..100).any(fails));
}

/// Rank 0 gets from rank 1, then synchronises with it.
#[kernel]
unsafe fn gets_and_syncs(comm: DevComm, out: Window<u64>, all_contexts: bool, fence: i32) {
    let comm = comm.as_raw();
    let (team, barriers) = barrier_of(comm, WORLD);
    let mut session = MaybeUninit::<GinBarrierSession>::uninit();
    let (session, coop) = (session.as_mut_ptr(), thread_coop());
    // SAFETY: the window has three elements.
    unsafe {
        let mut net = gin(comm, 0);
        if all_contexts {
            raw::ncclGinBarrierSessionInitAllContexts(session, &coop, comm, &team, &barriers, 1);
            net = gin(comm, 2);
        } else {
            raw::ncclGinBarrierSessionInit(session, &coop, &net, &team, &barriers, 1);
        }
        if comm.rank == 0 {
            let (w, none) = (handle(&out), null_mut());
            raw::ncclGinGet(&mut net, &team, 1, w, 0, w, 8, 8, &coop, false, none, 0);
        }
        raw::ncclGinBarrierSessionSync(session, &coop, ACQ_REL, fence);
        let seen = out.local().load(1);
        out.local().store(2, seen);
    }
}

#[test]
fn a_get_fence_completes_this_ranks_gets() {
    let seen = |seed: u64, all_contexts: bool, fence: i32| {
        // Without a fence it is a race.
        let simulation = Simulation::new(2).seed(seed).races(fence != NO_FENCE);
        let seen = simulate(simulation, |gpu| {
            let comm = gpu.dev_comm(requirements(GinConnectionType::Full))?;
            let out = gpu.window(&[0_u64; 3])?;
            let sees = |_| {
                out.copy_from_host(&[5 + gpu.rank() as u64, 0, 0])?;
                gpu.barrier()?;
                gpu.launch(
                    gets_and_syncs::args(&comm, &out, all_contexts, fence).grid(1).block(1),
                )?;
                read(&out).map(|out| out[2])
            };
            (0..20).map(sees).collect::<Result<Vec<_>, _>>()
        });
        seen.into_iter().next().unwrap()
    };
    for all_contexts in [false, true] {
        assert!((0..5).all(|seed| !seen(seed, all_contexts, GET).contains(&0)));
        assert!((0..5).any(|seed| seen(seed, all_contexts, NO_FENCE).contains(&0)));
    }
}

/// Each rank stores to its LSA peers and puts to its rail peers, between hybrid barriers.
#[kernel]
unsafe fn meets_hybrid(comm: DevComm, out: Window<u64>, multimem: bool, fence: i32, rounds: u64) {
    let comm = comm.as_raw();
    let (lsa, rail, world) = (comm.lsa_team(), comm.rail_team(), comm.world_team());
    let mut session = MaybeUninit::<BarrierSession>::uninit();
    let (session, coop) = (session.as_mut_ptr(), cta());
    let (mut net, index) = (gin(comm, 0), thread::block_idx_x());
    let (inner, outer) = (&comm.hybrid_lsa_barrier, &comm.hybrid_rail_gin_barrier);
    let multicast = &comm.lsa_multimem;
    // SAFETY: the window has one element per rank.
    unsafe {
        raw::ncclBarrierSessionInit(
            session, &coop, &lsa, &rail, &net, inner, outer, index, multimem, multicast,
        );
        for round in 1..=rounds {
            if thread::thread_idx_x() == 0 {
                for peer in 0..lsa.n_ranks {
                    out.lsa(peer).store(world.rank as usize, round);
                }
                for peer in 0..rail.n_ranks {
                    if peer != rail.rank {
                        let dst = (handle(&out), world.rank as usize * 8);
                        put_value(&mut net, &rail, peer, dst, (round, 8), SignalMode::Nothing);
                    }
                }
            }
            raw::ncclBarrierSessionSync(session, &coop, ACQ_REL, fence);
            if thread::thread_idx_x() == 0 && fence & PUT != 0 {
                for rank in 0..world.n_ranks {
                    let (me, n) = (world.rank, lsa.n_ranks);
                    if rank / n == me / n || rank % n == me % n {
                        assert_eq!(out.local().load(rank as usize), round, "rank {rank}");
                    }
                }
            }
            raw::ncclBarrierSessionSync(session, &coop, ACQ_REL, NO_FENCE);
        }
        raw::ncclBarrierSessionDestroy(session);
    }
}

#[test]
fn a_hybrid_barrier_meets_lsa_team_and_rail() {
    for seed in 0..30 {
        let world = world(Simulation::new(6).team_size(3).seed(seed));
        let met = run(&world, |gpu| {
            for multimem in [false, true] {
                let asked = requirements(GinConnectionType::Rail).lsa_multimem(multimem);
                let (comm, out) = (gpu.dev_comm(asked)?, gpu.window(&[0_u64; 6])?);
                let args = (&comm, &out, multimem, PUT | GET, 3_u64);
                gpu.launch(meets_hybrid::with_args(args).grid(1).block(2))?;
                gpu.launch(meets_hybrid::with_args(args).grid(1).block(2))?;
            }
            Ok(())
        });
        met.unwrap();
        assert!(world.simulated_machine().unwrap().activity().open_sessions.is_empty());
    }
}

#[test]
fn the_hybrid_barrier_that_does_nothing_is_reported() {
    for (connection, does) in [
        (GinConnectionType::Full, "does nothing here"),
        (GinConnectionType::CustomStride, "synchronises the LSA team only here"),
    ] {
        let meet = |gpu: &Gpu<'_>, fence: i32, rounds: u64| {
            let comm = gpu.dev_comm(requirements(connection).gin_custom_stride(2))?;
            let args = (&comm, &gpu.window(&[0_u64; 8])?, false, fence, rounds);
            gpu.launch(meets_hybrid::with_args(args).grid(1).block(1))
        };
        let simulation = Simulation::new(8).team_size(4);
        let error = failure(simulation.clone(), |gpu| meet(gpu, PUT, 1));
        assert!(matches!(*error, Error::Misuse { .. }), "{error}");
        assert!(error.to_string().contains(&format!("NCCL's hybrid barrier {does}")), "{error}");
        // With a fence that does not include puts, the hybrid barrier works. It completes no puts,
        // so those of a second round would race with them.
        simulate(simulation, |gpu| meet(gpu, GET, 1));
    }
}

/// All ranks except rank 1 arrive at the barrier.
#[kernel]
unsafe fn one_stays_away(comm: DevComm, ranks: i32, index: u32, signal0: u32) {
    let comm = comm.as_raw();
    if comm.rank == 1 {
        return;
    }
    let team = Team { n_ranks: ranks, ..comm.world_team() };
    let handle = GinBarrierHandle { signal0, unused: 0 };
    let mut session = MaybeUninit::<GinBarrierSession>::uninit();
    let (session, coop) = (session.as_mut_ptr(), cta());
    // SAFETY: the simulator reports misuse.
    unsafe {
        raw::ncclGinBarrierSessionInit(session, &coop, &gin(comm, 0), &team, &handle, index);
        raw::ncclGinBarrierSessionSync(session, &coop, ACQ_REL, NO_FENCE);
    }
}

#[test]
fn a_gin_barrier_names_the_ranks_that_have_not_arrived() {
    let error = failure(Simulation::new(3), |gpu| {
        let mut asked = requirements(GinConnectionType::Full);
        let team = gpu.communicator()?.team_world()?;
        let key = asked.add(GinBarriers { team, count: 2 });
        let comm = gpu.dev_comm(asked)?;
        let signal0 = comm.resource(key)?.signal0;
        gpu.launch(one_stays_away::args(&comm, 3, 1_u32, signal0).grid(1).block(4))
    });
    let text = error.to_string();
    let Error::Deadlock(stall) = &*error else { panic!("{text}") };
    let named = stall.waiters.iter().filter(|w| matches!(w.what, Waiting::For(_))).count();
    assert_eq!(named, 2);
    assert!(text.contains("GIN barrier 1 on context 0, where rank 1 has not arrived"), "{text}");
    assert!(text.contains("the rest of its coop in a GIN barrier"), "{text}");
}

#[test]
fn a_gin_barrier_that_was_not_made_is_reported() {
    for (ranks, index, beyond, want) in [
        (2, 0_u32, 0, "a team of 2 ranks, made for 3"),
        (3, 2, 0, "GIN barrier 2: the device communicator was made with 2"),
        (3, 0, 1, "not of this device communicator"),
    ] {
        let error = failure(Simulation::new(3), |gpu| {
            let comm = gpu.dev_comm(requirements(GinConnectionType::Full))?;
            let first = comm.dev_comm()?.world_gin_barrier.signal0 + beyond;
            gpu.launch(one_stays_away::args(&comm, ranks, index, first).grid(1).block(1))
        });
        assert!(error.to_string().contains(want), "{error}");
    }
}
