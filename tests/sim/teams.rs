//! Tests of NCCL's team functions in kernels, and of the device communicator's fields.

use crate::common::*;
use cuda_std::prelude::*;
use devcomm::{
    DevCommError, DevCommRequirements, Error, GinConnectionType, LsaBarriers, ResourceBuffer,
    Signals, Simulation, TeamMultimem,
};
use devcomm_testing::simulated::{read, simulate};
use nccl_device::raw::{self, Team};
use nccl_device::{DevComm, Window};

/// A window in which a kernel records numbers, and the index of the next number.
struct Notes(Window<i32>, usize);

impl Notes {
    fn add(&mut self, value: i32) {
        // SAFETY: the window is long enough.
        unsafe { self.0.local().store(self.1, value) };
        self.1 += 1;
    }
}

#[kernel]
unsafe fn notes_teams(comm: DevComm, out: Window<i32>) {
    let comm = comm.as_raw();
    let (world, lsa, rail) = (comm.world_team(), comm.lsa_team(), comm.rail_team());
    let mut notes = Notes(out, 0);
    // SAFETY: the arguments are a device communicator and its teams.
    unsafe {
        notes.add(raw::ncclDevComm_Rank(comm));
        notes.add(raw::ncclDevComm_NRanks(comm));
        notes.add(raw::ncclDevComm_LsaRank(comm));
        notes.add(raw::ncclDevComm_LsaSize(comm));
        for member in 0..rail.n_ranks {
            let rank = raw::ncclTeamRankToWorld(comm, &rail, member);
            notes.add(rank);
            notes.add(raw::ncclTeamRankToLsa(comm, &rail, member));
            notes.add(raw::ncclTeamRankIsMember(&lsa, &rail, member).into());
            notes.add(raw::ncclTeamRankToTeam(&world, &rail, member));
        }
        for index in 0..world.n_ranks - lsa.n_ranks {
            notes.add(raw::ncclTeamRankInDifference(&world, &lsa, index));
        }
    }
}

#[test]
fn teams_are_those_of_the_ranks() {
    let notes = simulate(Simulation::new(6).team_size(2), |gpu| {
        let comm = gpu.dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
        let out = gpu.window(&[0_i32; 20])?;
        gpu.launch(notes_teams::args(&comm, &out).grid(1).block(1))?;
        read(&out)
    });
    for (me, notes) in (0..6_i32).zip(notes) {
        let mut want = vec![me, 6, me % 2, 2];
        for member in 0..3 {
            let rank = member * 2 + me % 2;
            // For a rank outside the LSA team, the LSA rank is out of range.
            want.extend([rank, me % 2 + rank - me, i32::from(rank == me), rank]);
        }
        want.extend((0..6).filter(|rank| rank / 2 != me / 2));
        assert_eq!(notes, want, "rank {me}");
    }
}

/// Records whether there is a pointer to each rank of the world, and then of the rail.
#[kernel]
unsafe fn notes_peers(comm: DevComm, out: Window<i32>) {
    let mut notes = Notes(out, 0);
    for team in [comm.world_team(), comm.rail_team()] {
        for member in 0..team.n_ranks {
            notes.add(comm.has_peer_pointer(team, member).into());
        }
    }
}

#[test]
fn ranks_of_the_lsa_team_have_pointers() {
    let notes = simulate(Simulation::new(6).team_size(3), |gpu| {
        let comm = gpu.dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
        let out = gpu.window(&[0_i32; 8])?;
        gpu.launch(notes_peers::args(&comm, &out).grid(1).block(1))?;
        read(&out)
    });
    for (me, notes) in notes.into_iter().enumerate() {
        let in_world = (0..6).map(|rank| i32::from(rank / 3 == me / 3));
        // The rail has one rank of each LSA team.
        let in_rail = (0..2).map(|team| i32::from(team == me / 3));
        assert_eq!(notes, in_world.chain(in_rail).collect::<Vec<_>>(), "rank {me}");
    }
}

#[kernel]
unsafe fn notes_coops(out: Window<i32>) {
    let (rank, size) = match thread::thread_idx_x() {
        // SAFETY: the coop is valid.
        0 => (unsafe { raw::ncclCoopThreadRank(&thread_coop()) }, 1),
        _ => {
            let coop = cta();
            // SAFETY: the coop is valid.
            unsafe { (raw::ncclCoopThreadRank(&coop), raw::ncclCoopNumThreads(&coop)) }
        }
    };
    // SAFETY: the window has two elements per thread.
    unsafe {
        out.local().store(2 * thread::thread_idx_x() as usize, rank);
        out.local().store(2 * thread::thread_idx_x() as usize + 1, size);
    }
}

#[test]
fn coops_know_their_threads() {
    let notes = simulate(Simulation::new(1), |gpu| {
        let out = gpu.window(&[0_i32; 6])?;
        gpu.launch(notes_coops::args(&out).grid(1).block(3))?;
        read(&out)
    });
    assert_eq!(notes, [[0, 1, 1, 3, 2, 3]]);
}

#[kernel]
unsafe fn notes_sizes(out: Window<u64>) {
    // SAFETY: the functions have no contract; the window has three elements.
    unsafe {
        let sizes = [
            raw::ncclLsaBarrierSession_C_size(),
            raw::ncclGinBarrierSession_C_size(),
            raw::ncclBarrierSession_C_size(),
        ];
        sizes.into_iter().enumerate().for_each(|(i, size)| out.local().store(i, size as u64));
    }
}

#[test]
fn sessions_have_nccls_sizes() {
    let sizes = simulate(Simulation::new(1), |gpu| {
        let out = gpu.window(&[0_u64; 3])?;
        gpu.launch(notes_sizes::args(&out).grid(1).block(1))?;
        read(&out)
    });
    assert_eq!(sizes, [[80, 96, 368]]);
}

#[test]
fn the_device_communicator_is_filled_as_nccl_fills_it() {
    simulate(Simulation::new(6).team_size(3), |gpu| {
        let plain = gpu.dev_comm(DevCommRequirements::new().lsa_barriers(2))?;
        let dev = plain.dev_comm()?;
        let me = gpu.rank() as i32;
        assert_eq!((dev.magic, dev.version), (0xcafe_beef, 23203));
        assert_eq!((dev.rank, dev.n_ranks, dev.lsa_rank, dev.lsa_size), (me, 6, me % 3, 3));
        assert_eq!((dev.gin_connection_count, dev.gin_context_count), (0, 0));
        assert!(dev.gin_handles[0].is_null() && dev.lsa_multimem.base.is_null());
        assert_eq!(dev.lsa_size_rcp32, u32::MAX / 3);

        let asked = full().lsa_multimem(true).barriers(3).rail_gin_barriers(4).gin_contexts(7);
        let full = gpu.dev_comm(asked.clone().world_gin_barriers(5))?;
        let dev = full.dev_comm()?;
        assert_eq!((dev.gin_connection_count, dev.backend_index), (1, 0));
        // 2 is PROXY.
        assert_eq!(dev.gin_net_device_types, [2, 0, 0, 0]);
        assert_eq!((dev.gin_context_count, dev.gin_counter_count), (7, 4));
        // The user's signals come first, then those of hybrid rail, rail, world and hybrid dense
        // barriers.
        let first = |barrier: raw::GinBarrierHandle| barrier.signal0;
        assert_eq!(first(dev.hybrid_rail_gin_barrier), 16);
        assert_eq!(first(dev.rail_gin_barrier), 16 + 3 * 2);
        assert_eq!(first(dev.world_gin_barrier), 16 + 3 * 2 + 4 * 2);
        assert_eq!(first(dev.hybrid_dense_gin_barrier), 16 + 3 * 2 + 4 * 2 + 5 * 6);
        assert_eq!(dev.gin_signal_count, 16 + 3 * 2 + 4 * 2 + 5 * 6 + 3 * 6);
        assert_eq!((dev.gin_connection_stride, dev.gin_context_stride), (1, 1));
        // NCCL has this value for a stride of 1.
        assert_eq!(dev.gin_connection_stride_rcp32, 0);
        assert_eq!(dev.hybrid_lsa_barrier.n_barriers, 3);
        assert!(dev.gin_strong_legacy_signals && !dev.lsa_multimem.base.is_null());

        let rail = asked.gin_connection(GinConnectionType::Rail).gin_strong_signals(false);
        let rail = gpu.dev_comm(rail)?;
        let dev = rail.dev_comm()?;
        assert_eq!((dev.gin_connection_stride, dev.gin_context_stride), (1, 3));
        assert!(!dev.gin_strong_legacy_signals);
        assert_eq!(dev.gin_signal_count, 16 + 3 * 2 + 4 * 2 + 3 * 2);
        Ok(())
    });
}

#[test]
fn requirements_that_make_no_sense_are_refused() {
    simulate(Simulation::new(4).team_size(2), |gpu| {
        let none = DevCommRequirements::new;
        let comm = gpu.communicator()?;
        let (world, lsa) = (comm.team_world()?, comm.team_lsa()?);
        let with = |add: &dyn Fn(&mut DevCommRequirements)| {
            let mut requirements = full();
            add(&mut requirements);
            requirements
        };
        for (requirements, why) in [
            (none().gin_signals(1), "need a network connection"),
            (none().barriers(1), "need a network connection"),
            (none().lsa_barriers(u32::MAX), "LSA barriers"),
            (full().gin_contexts(0), "gin_contexts(0)"),
            (
                full().gin_connection(GinConnectionType::Rail).world_gin_barriers(1),
                "does not reach every rank",
            ),
            (
                full().gin_connection(GinConnectionType::CustomStride).gin_custom_stride(3),
                "gin_custom_stride(3)",
            ),
            (with(&|r| _ = r.add(LsaBarriers { team: world, count: 1 })), "team"),
            (with(&|r| _ = r.add(TeamMultimem { team: world, multimem: true })), "team"),
            (
                with(&|r| _ = r.add(LsaBarriers { team: Team { stride: 0, ..lsa }, count: 1 })),
                "its stride not 0",
            ),
            (with(&|r| _ = r.add(Signals { count: u32::MAX })), "signals"),
            (with(&|r| _ = r.add(ResourceBuffer { bytes: 1, align: 3 })), "power of two"),
            (with(&|r| _ = r.add(ResourceBuffer { bytes: usize::MAX, align: 1 })), "bytes"),
        ] {
            match gpu.dev_comm(requirements) {
                Err(Error::DevComm(DevCommError::Refused { why: said, .. })) => {
                    assert!(said.contains(why), "{said}")
                }
                other => panic!("{why}: {other:?}"),
            }
        }
        Ok(())
    });
}
