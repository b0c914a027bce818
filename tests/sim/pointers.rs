//! Tests of addresses in windows and resource buffers: the rank that each refers to, and reports
//! of invalid ones.

use core::ffi::c_void;

use crate::common::*;
use cuda_std::prelude::*;
use devcomm::{
    Counters, DevCommRequirements, GinBarriers, LlA2a, LsaBarriers, ResourceBuffer, Signals,
    Simulation,
};
use devcomm_testing::simulated::{failure, read, simulate};
use nccl_device::raw::{self, Team};
use nccl_device::{DevComm, Window};

/// Stores this rank plus 1 at `at`.
///
/// # Safety
///
/// `at` is valid for a write.
#[track_caller]
unsafe fn store_rank(at: *mut c_void, comm: &raw::DevComm) {
    // SAFETY: the test passes the address of a word.
    unsafe { mem::store(at.cast(), comm.rank as u32 + 1) };
}

/// Stores the rank through each kind of pointer, each time to another element.
#[kernel]
unsafe fn leaves_names(comm: DevComm, out: Window<u32>, buffer: u32) {
    let comm = comm.as_raw();
    let (w, lsa) = (handle(&out), comm.lsa_team());
    let other = (lsa.rank + 1) % lsa.n_ranks;
    let reversed = Team { rank: lsa.n_ranks - 1 - lsa.rank, stride: -1, ..lsa };
    // SAFETY: the window and the buffer have eight elements, each of which one rank stores to.
    unsafe {
        store_rank(raw::ncclGetLocalPointer(w, 0), comm);
        store_rank(raw::ncclGetLsaPointer(w, 4, other), comm);
        store_rank(raw::ncclGetPeerPointer(w, 8, comm.rank - lsa.rank + other), comm);
        store_rank(raw::ncclGetPeerPointerTeam(w, 12, &lsa, other), comm);
        store_rank(raw::ncclGetPeerPointerTeam(w, 16, &reversed, lsa.n_ranks - 1 - other), comm);

        let local = raw::ncclGetResourceBufferLocalPointer(comm, buffer);
        store_rank(local, comm);
        let by_lsa = raw::ncclGetResourceBufferLsaPointer(comm, buffer, other);
        store_rank(by_lsa.byte_add(4), comm);
        let by_team = raw::ncclGetResourceBufferPeerPointer(comm, buffer, &lsa, other);
        store_rank(by_team.byte_add(8), comm);
        assert_eq!(by_lsa, by_team);
        assert_eq!(raw::ncclGetResourceBufferOffset(buffer), buffer as usize * 128);
        assert_eq!(
            raw::ncclGetLsaPointer(comm.resource_window, buffer as usize * 128, lsa.rank),
            local
        );
        let base = local.cast::<u32>();
        (0..3).for_each(|i| out.local().store(5 + i, mem::load(base.add(i))));
    }
}

#[test]
fn every_pointer_leads_to_its_rank() {
    // The detection of races is off: ranks store elements that others load.
    let names = simulate(Simulation::new(6).team_size(3).races(false), |gpu| {
        let mut requirements = DevCommRequirements::new().lsa_barriers(1);
        let scratch = requirements.add(ResourceBuffer { bytes: 32, align: 256 });
        let (comm, out) = (gpu.dev_comm(requirements)?, gpu.window(&[0_u32; 8])?);
        let buffer = comm.resource(scratch)?;
        assert_eq!(buffer % 2, 0, "aligned to 256 bytes");
        gpu.launch(leaves_names::args(&comm, &out, buffer).grid(1).block(1))?;
        // The second launch reads what all ranks stored in the first.
        gpu.launch(leaves_names::args(&comm, &out, buffer).grid(1).block(1))?;
        read(&out)
    });
    for (rank, names) in (0..6_u32).zip(names) {
        let before = rank / 3 * 3 + (rank % 3 + 2) % 3 + 1;
        let want = [rank + 1, before, before, before, before, rank + 1, before, before];
        assert_eq!(names, want, "rank {rank}");
    }
}

/// Uses the invalid pointer with number `which`.
#[kernel]
unsafe fn mistakes_with_pointers(comm: DevComm, out: Window<u32>, which: u32) {
    let comm = comm.as_raw();
    let (w, lsa) = (handle(&out), comm.lsa_team());
    let (mut id, mut offset) = (0, 0);
    // SAFETY: the simulator reports invalid pointers.
    unsafe {
        match which {
            0 => store_rank(raw::ncclGetPeerPointer(w, 0, 2), comm),
            1 => store_rank(raw::ncclGetPeerPointerTeam(w, 0, &lsa, -1), comm),
            2 => store_rank(raw::ncclGetResourceBufferLsaPointer(comm, 1, 2), comm),
            3 => store_rank(raw::ncclGetResourceBufferLocalPointer(comm, 1000), comm),
            4 => store_rank(raw::ncclGetLocalPointer(core::ptr::null_mut(), 0), comm),
            5 => raw::ncclGetCftLeInfo(w, 0, 0, &lsa, comm, &mut id, &mut offset),
            6 => raw::ncclGetPeerLeInfo(w, 0, 0, comm, &mut id, &mut offset),
            7 => raw::ncclGetMultimemLeInfo(w, 0, comm, &mut id, &mut offset),
            8 => raw::ncclGetResourceBufferCftLeInfo(comm, 1, 0, &mut id, &mut offset),
            9 => raw::ncclGetResourceBufferPeerLeInfo(comm, 1, 0, &mut id, &mut offset),
            _ => raw::ncclGetResourceBufferMultimemLeInfo(comm, 1, &mut id, &mut offset),
        }
    }
}

#[test]
fn what_no_pointer_reaches_is_reported() {
    let wants = [
        "rank 2, which is not in the LSA team",
        "rank -1, which is not in the LSA team",
        "rank 2, which is not in the LSA team",
        "after the end of barriers and buffers of device communicator",
        "the window is NULL",
    ];
    for which in 0..11 {
        // Two ranks make the same mistake.
        let error = failure(Simulation::new(4).team_size(2).races(false), |gpu| {
            let comm = gpu.dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
            gpu.launch(
                mistakes_with_pointers::args(&comm, &gpu.window(&[0_u32; 2])?, which as u32)
                    .grid(1)
                    .block(1),
            )
        });
        let want = wants.get(which).unwrap_or(&"CFT is not simulated");
        assert!(error.to_string().contains(want), "{which}: {error}");
        assert!(error.to_string().contains("pointers.rs"), "{error}");
    }
}

#[test]
fn resources_have_places_of_their_own() {
    simulate(Simulation::new(4).team_size(2), |gpu| {
        let (world, mut asked) = (gpu.communicator()?, full());
        let barriers = asked.add(LsaBarriers { team: world.team_lsa()?, count: 3 });
        let gin_barriers = asked.add(GinBarriers { team: world.team_world()?, count: 3 });
        let a2a = asked.add(LlA2a { blocks: 2, max_elements: 5, element_size: 12 });
        let signals = asked.add(Signals { count: 2 });
        let counters = asked.add(Counters { count: 3 });
        let scratch = asked.add(ResourceBuffer { bytes: 1, align: 1 });
        let comm = gpu.dev_comm(asked)?;
        let (barriers, a2a) = (comm.resource(barriers)?, comm.resource(a2a)?);
        assert_eq!((barriers.n_barriers, a2a.n_slots), (3, 10));
        // Two blocks with a header and two banks of ten lines of 16 bytes, in units of 128.
        let lines = (2 * (1 + 2 * 10) * 16_u32).div_ceil(128);
        assert_eq!(comm.resource(scratch)? - a2a.buffer, lines);
        assert!(barriers.buffer < a2a.buffer && barriers.buffer > 0);
        // Ids follow those of `full()`, in the order of `add`. A GIN barrier has a signal for each
        // of 4 ranks.
        assert_eq!(comm.resource(gin_barriers)?.signal0, 16);
        assert_eq!(
            (comm.resource(signals)?.first, comm.resource(counters)?.first),
            (16 + 3 * 4, 4)
        );
        Ok(())
    });
}

#[test]
fn the_key_of_other_requirements_opens_nothing() {
    simulate(Simulation::new(1), |gpu| {
        let (mut one, mut two) = (full(), full());
        let key = one.add(Signals { count: 2 });
        two.add(Signals { count: 3 });
        assert!(gpu.dev_comm(two)?.resource(key).is_err());
        assert!(gpu.dev_comm(one)?.resource(key).is_ok());
        Ok(())
    });
}
