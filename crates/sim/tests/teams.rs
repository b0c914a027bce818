//! Teams in a kernel: NCCL's functions agree with the sets of ranks, and the device communicator with both.

mod common;

use common::*;
use cuda_std::prelude::*;
use devcomm_sim::{DevCommConfig, GinConnectionType, Simulator};
use nccl_device::raw;
use nccl_device::{DevComm, Window};

/// Numbers that a kernel notes for the test to compare.
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
    // SAFETY: valid structs.
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
    let sim = Simulator::builder().ranks(6).lsa_ranks(2).build().unwrap();
    let comm = sim.dev_comm(DevCommConfig { lsa_barriers: 1, ..Default::default() }).unwrap();
    let out = sim.window::<i32>(20).unwrap();
    run(&sim, notes_teams, 1, 1, |rank| (comm.rank(rank), out.rank(rank)));
    for me in 0..6_i32 {
        let mut want = vec![me, 6, me % 2, 2];
        for member in 0..3 {
            let rank = member * 2 + me % 2;
            // Out of reach by load and store, the LSA rank is out of its range.
            want.extend([rank, me % 2 + rank - me, i32::from(rank == me), rank]);
        }
        want.extend((0..6).filter(|rank| rank / 2 != me / 2));
        assert_eq!(out.read(me as usize), want, "rank {me}");
    }
}

#[kernel]
unsafe fn notes_coops(out: Window<i32>) {
    let (rank, size) = match thread::thread_idx_x() {
        // SAFETY: a coop.
        0 => (unsafe { raw::ncclCoopThreadRank(&thread_coop()) }, 1),
        _ => {
            let coop = cta();
            // SAFETY: a coop.
            unsafe { (raw::ncclCoopThreadRank(&coop), raw::ncclCoopNumThreads(&coop)) }
        }
    };
    // SAFETY: the window has two elements a thread.
    unsafe {
        out.local().store(2 * thread::thread_idx_x() as usize, rank);
        out.local().store(2 * thread::thread_idx_x() as usize + 1, size);
    }
}

#[test]
fn coops_know_their_threads() {
    let sim = Simulator::new(1).unwrap();
    let out = sim.window::<i32>(6).unwrap();
    run(&sim, notes_coops, 1, 3, |rank| (out.rank(rank),));
    assert_eq!(out.read(0), [0, 1, 1, 3, 2, 3]);
}

#[kernel]
unsafe fn notes_sizes(out: Window<u64>) {
    // SAFETY: constants; the window has three elements.
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
    let sim = Simulator::new(1).unwrap();
    let out = sim.window::<u64>(3).unwrap();
    run(&sim, notes_sizes, 1, 1, |rank| (out.rank(rank),));
    assert_eq!(out.read(0), [80, 96, 368]);
}

/// What rank `rank`'s kernels get.
fn struct_of(comm: &devcomm_sim::DevComm, rank: usize) -> raw::DevComm {
    devcomm_types::IntoArg::into_arg(comm.rank(rank))
}

#[test]
fn the_device_communicator_is_filled_as_nccl_fills_it() {
    let sim = Simulator::builder().ranks(6).lsa_ranks(3).build().unwrap();
    let config = DevCommConfig { lsa_barriers: 2, ..Default::default() };
    let plain = struct_of(&sim.dev_comm(config).unwrap(), 4);
    assert_eq!((plain.magic, plain.version), (0xcafe_beef, 23203));
    assert_eq!((plain.rank, plain.n_ranks, plain.lsa_rank, plain.lsa_size), (4, 6, 1, 3));
    assert_eq!((plain.gin_connection_count, plain.gin_context_count), (0, 0));
    assert!(plain.gin_handles[0].is_null() && plain.lsa_multimem.base.is_null());
    assert!(plain.abort_flag.is_null());
    assert_eq!(plain.lsa_size_rcp32, u32::MAX / 3);

    let full = DevCommConfig {
        lsa_multimem: true,
        barriers: 3,
        rail_gin_barriers: 4,
        world_gin_barriers: 5,
        gin_contexts: 7,
        gin_connection: GinConnectionType::Full,
        ..full()
    };
    let comm = sim.dev_comm(full.clone()).unwrap();
    let it = struct_of(&comm, 4);
    assert_eq!((it.gin_connection_count, it.backend_index), (1, 0));
    assert_eq!(it.gin_net_device_types, [2, 0, 0, 0]);
    assert_eq!((it.gin_context_count, it.gin_counter_count), (7, 4));
    // The user's signals, then the barriers': along the rail, of the rail, of the world, dense.
    let first = |barrier: raw::GinBarrierHandle| barrier.signal0;
    assert_eq!(first(it.hybrid_rail_gin_barrier), 16);
    assert_eq!(first(it.rail_gin_barrier), 16 + 3 * 2);
    assert_eq!(first(it.world_gin_barrier), 16 + 3 * 2 + 4 * 2);
    assert_eq!(first(it.hybrid_dense_gin_barrier), 16 + 3 * 2 + 4 * 2 + 5 * 6);
    assert_eq!(it.gin_signal_count, 16 + 3 * 2 + 4 * 2 + 5 * 6 + 3 * 6);
    assert_eq!((it.gin_connection_stride, it.gin_context_stride), (1, 1));
    // As NCCL has it for 1.
    assert_eq!(it.gin_connection_stride_rcp32, 0);
    assert_eq!(it.hybrid_lsa_barrier.n_barriers, 3);
    assert!(it.gin_strong_legacy_signals && !it.lsa_multimem.base.is_null());

    let rail = DevCommConfig {
        gin_connection: GinConnectionType::Rail,
        world_gin_barriers: 0,
        gin_strong_signals: false,
        ..full
    };
    let it = struct_of(&sim.dev_comm(rail).unwrap(), 0);
    assert_eq!((it.gin_connection_stride, it.gin_context_stride), (3, 3));
    assert!(!it.gin_strong_legacy_signals);
    assert_eq!(it.gin_signal_count, 16 + 3 * 2 + 4 * 2 + 3 * 2);
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    use devcomm_sim::{Error, LsaBarriers, ResourceBuffer, Signals, TeamMultimem};
    let sim = Simulator::builder().ranks(4).lsa_ranks(2).build().unwrap();
    let refused = |config: DevCommConfig| match sim.dev_comm(config) {
        Err(Error::Settings(reason)) => reason,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("not refused"),
    };
    let none = DevCommConfig::default;
    let with = |change: fn(&mut DevCommConfig)| {
        let mut config = full();
        change(&mut config);
        refused(config)
    };
    assert!(refused(DevCommConfig { gin_signals: 1, ..none() }).contains("gin_connection is none"));
    assert!(refused(DevCommConfig { barriers: 1, ..none() }).contains("gin_connection is none"));
    assert!(refused(DevCommConfig { lsa_barriers: u32::MAX, ..none() }).contains("LSA barriers"));
    assert!(refused(DevCommConfig { gin_contexts: 0, ..full() }).contains("without contexts"));
    assert!(
        with(|c| {
            c.gin_connection = GinConnectionType::Rail;
            c.world_gin_barriers = 1;
        })
        .contains("only ranks 2 apart")
    );
    assert!(
        with(|c| {
            c.gin_connection = GinConnectionType::CustomStride;
            c.gin_custom_stride = 3;
        })
        .contains("custom stride of 3")
    );
    assert!(with(|c| _ = c.add(LsaBarriers { ranks: 3, count: 1 })).contains("cannot be cut"));
    assert!(with(|c| _ = c.add(TeamMultimem { ranks: 2, stride: 2 })).contains("cannot be cut"));
    assert!(with(|c| _ = c.add(Signals { count: u32::MAX })).contains("signals"));
    assert!(with(|c| _ = c.add(ResourceBuffer { bytes: 1, align: 3 })).contains("power of two"));
    assert!(with(|c| _ = c.add(ResourceBuffer { bytes: usize::MAX, align: 1 })).contains("bytes"));
}
