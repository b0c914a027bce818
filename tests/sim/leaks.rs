//! Tests that machines that have failed leave nothing in the process.

use std::process::Command;

use cuda_std::mem;
use cuda_std::prelude::*;
use devcomm::{DevCommRequirements, Simulation};
use devcomm_testing::simulated::{Gpu, read, run, simulate, world};
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};

/// Fails by an access out of bounds, a race, a deadlock or a panic. Way 4 does not fail.
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

/// Returns the numbers of open files and of mappings of this process.
fn files_and_mappings() -> (usize, usize) {
    let files = std::fs::read_dir("/proc/self/fd").unwrap().count();
    (files, std::fs::read_to_string("/proc/self/maps").unwrap().lines().count())
}

const CHILD: &str = "DEVCOMM_TEST_LEAKS";

#[test]
fn runs_that_fail_leave_no_files_and_mappings_in_the_process() {
    in_a_process("leaks::runs_that_fail_leave_no_files_and_mappings_in_the_process", || {
        // Stacks and the allocator's memory are kept for later runs.
        (0..8).for_each(|i| fail(i % 5));
        let before = files_and_mappings();
        (0..40).for_each(|i| fail(i % 5));
        let after = files_and_mappings();
        // Fewer than one for each of the 40 runs.
        assert!(after.0 <= before.0 + 4 && after.1 <= before.1 + 16, "{before:?}, then {after:?}");
    });
}

#[kernel]
unsafe fn adds_1(word: *mut u32) {
    // SAFETY: the buffer has a word, and the launches are one after the other.
    unsafe { mem::store(word, mem::load(word) + 1) };
}

/// Returns the memory of this process, in bytes.
fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[test]
fn streams_and_graphs_that_are_gone_take_no_memory_in_a_long_run() {
    in_a_process("leaks::streams_and_graphs_that_are_gone_take_no_memory_in_a_long_run", || {
        simulate(Simulation::new(1), |gpu| {
            let word = gpu.buffer(&[0_u32])?;
            let rounds = |count: usize| {
                (0..count).try_for_each(|_| {
                    let stream = gpu.stream()?;
                    // SAFETY: the buffer has a word.
                    let add = || unsafe { adds_1::args(&word).grid(1).block(1).launch(&stream) };
                    let graph = stream.capture(add)?;
                    (0..2).try_for_each(|_| graph.launch(&stream))?;
                    stream.synchronize()
                })
            };
            rounds(200)?;
            let before = resident();
            rounds(2000)?;
            let more = resident().saturating_sub(before);
            // About a page for each round; a coroutine's stack alone has more.
            assert!(more < 8 << 20, "{more} bytes more");
            assert_eq!(read(&word)?, [2 * (200 + 2000)]);
            Ok(())
        });
    });
}

/// Performs a test in a process of its own, since other tests open files and take memory too.
fn in_a_process(name: &str, test: impl FnOnce()) {
    if std::env::var_os(CHILD).is_some() {
        return test();
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    let child = child.args(["--exact", name, "--nocapture"]).env(CHILD, "1").output().unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
}
