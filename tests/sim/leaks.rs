//! Tests that machines that have failed leave nothing in the process.

use std::process::Command;

use cuda_std::prelude::*;
use devcomm::{DevCommRequirements, Simulation};
use devcomm_testing::simulated::{Gpu, run, world};
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};

/// Fails in one of several ways: an access out of bounds, a race, a deadlock, a panic. For way 4
/// and others it is right.
#[kernel]
unsafe fn fails(comm: DevComm, out: Window<u32>, way: u32) {
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    let rank = comm.lsa_team().rank;
    // SAFETY: the simulator reports what the kernel does wrong.
    unsafe {
        match way {
            0 => out.lsa(0).store(1 << 20, 1),
            1 => out.lsa(0).store(0, rank as u32),
            2 if rank == 0 => return,
            3 if rank == 1 => panic!("a kernel panics"),
            _ => {}
        }
    }
    barrier.sync(MemoryOrder::AcqRel);
}

fn fail(way: u32) {
    let world = world(Simulation::new(2));
    let ran = run(&world, |gpu: &Gpu<'_>| {
        let (out, comm) = (gpu.window(&[0_u32; 4])?, DevCommRequirements::new().lsa_barriers(1));
        let comm = gpu.dev_comm(comm)?;
        if way == 4 && gpu.rank() == 1 {
            return Err(devcomm::Error::InvalidInput { what: "a rank fails".to_owned() });
        }
        gpu.launch(fails::args(&comm, &out, way).grid(1).block(32))
    });
    assert!(ran.is_err(), "way {way} has not failed");
}

/// Returns the open files and mappings of this process.
fn held() -> (usize, usize) {
    let files = std::fs::read_dir("/proc/self/fd").unwrap().count();
    (files, std::fs::read_to_string("/proc/self/maps").unwrap().lines().count())
}

const CHILD: &str = "DEVCOMM_TEST_LEAKS";

#[test]
fn runs_that_fail_leave_no_files_and_mappings_in_the_process() {
    if std::env::var_os(CHILD).is_some() {
        // Stacks and the allocator's memory are kept for later runs.
        (0..8).for_each(|i| fail(i % 5));
        let before = held();
        (0..40).for_each(|i| fail(i % 5));
        let after = held();
        assert!(after.0 <= before.0 + 4 && after.1 <= before.1 + 16, "{before:?}, then {after:?}");
        return;
    }
    // In a process of its own, since other tests open files too.
    let name = "leaks::runs_that_fail_leave_no_files_and_mappings_in_the_process";
    let mut child = Command::new(std::env::current_exe().unwrap());
    let child = child.args(["--exact", name, "--nocapture"]).env(CHILD, "1").output().unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
}
