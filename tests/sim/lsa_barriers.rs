//! Tests of LSA barriers for teams other than the LSA team.

use core::mem::MaybeUninit;
use devcomm_types::Kernel;

use crate::common::*;
use cuda_std::prelude::*;
use devcomm::sim::Error;
use devcomm::{DevCommRequirements, LsaBarriers, Simulation};
use devcomm_testing::simulated::{failure, run, world};
use nccl_device::raw::{self, LsaBarrierHandle, LsaBarrierSession, MultimemHandle, Team};
use nccl_device::{DevComm, Window};

/// Teams of `ranks` consecutive ranks synchronise, and check what the ranks of the team stored.
#[kernel]
unsafe fn pairs_meet(comm: DevComm, out: Window<u32>, buffer: u32, ranks: i32, rounds: u32) {
    let comm = comm.as_raw();
    let (team, coop) = (comm.lsa_team().inner_factor(ranks), cta());
    let barriers = LsaBarrierHandle { buffer, n_barriers: 2 };
    let mut session = MaybeUninit::<LsaBarrierSession>::uninit();
    let session = session.as_mut_ptr();
    // SAFETY: the window has one element per block; the barriers order the accesses.
    unsafe {
        let index = thread::block_idx_x();
        let none = MultimemHandle::NULL;
        raw::ncclLsaBarrierSessionInit(session, &coop, comm, &team, &barriers, index, false, &none);
        for round in 1..=rounds {
            if thread::thread_idx_x() == 0 {
                out.local().store(index as usize, round);
            }
            raw::ncclLsaBarrierSessionArrive(session, &coop, ACQ_REL);
            raw::ncclLsaBarrierSessionWait(session, &coop, ACQ_REL);
            for member in 0..team.n_ranks {
                let peer = raw::ncclTeamRankToLsa(comm, &team, member);
                assert_eq!(out.lsa(peer).load(index as usize), round);
            }
            raw::ncclLsaBarrierSessionSync(session, &coop, ACQ_REL);
        }
        raw::ncclLsaBarrierSessionDestroy(session);
    }
}

#[test]
fn teams_within_the_lsa_team_have_barriers_of_their_own() {
    for seed in 0..30 {
        let world = world(Simulation::new(8).team_size(4).seed(seed));
        let met = run(&world, |gpu| {
            let mut requirements = DevCommRequirements::new().lsa_barriers(2);
            let team = gpu.communicator()?.team_lsa()?.inner_factor(2);
            let key = requirements.add(LsaBarriers { team, count: 2 });
            let (comm, out) = (gpu.dev_comm(requirements)?, gpu.window(&[0_u32; 2])?);
            let args = (&comm, &out, comm.resource(key)?.buffer, 2, 3_u32);
            (0..2).try_for_each(|_| gpu.launch(pairs_meet::with_args(args).grid(2).block(3)))
        });
        met.unwrap();
        assert!(world.simulated_machine().unwrap().activity().open_sessions.is_empty());
    }
}

/// Opens an LSA barrier for a team that spans several LSA teams; `shift` also falsifies its rank.
#[kernel]
unsafe fn world_meets(comm: DevComm, shift: i32) {
    let comm = comm.as_raw();
    let team = Team { rank: comm.rank + shift, ..comm.world_team() };
    let mut session = MaybeUninit::<LsaBarrierSession>::uninit();
    let (session, coop, none) = (session.as_mut_ptr(), cta(), MultimemHandle::NULL);
    let barriers = &comm.lsa_barrier;
    // SAFETY: the simulator reports misuse.
    unsafe {
        raw::ncclLsaBarrierSessionInit(session, &coop, comm, &team, barriers, 0, false, &none);
    }
}

#[test]
fn a_barrier_of_ranks_that_load_and_store_do_not_reach_is_reported() {
    for shift in [0, 4, -1] {
        let error = failure(Simulation::new(4).team_size(2), |gpu| {
            let comm = gpu.dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
            gpu.launch(world_meets::args(&comm, shift).grid(1).block(1))
        });
        assert!(matches!(*error, Error::Misuse { .. }), "{error}");
        assert!(error.to_string().contains("a team that is not in the LSA team"), "{error}");
    }
}
