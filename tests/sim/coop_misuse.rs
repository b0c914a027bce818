//! Tests that the simulator reports cooperative calls that only a part of the coop makes, or that
//! have unequal arguments, and signals and barriers that the host did not reserve.

use cuda_std::prelude::*;
use cuda_std::{mma, wgmma};
use devcomm::sim::Error;
use devcomm::{DevCommRequirements, DevCommResource, GinConnectionType, Result, Simulation};
use devcomm_testing::simulated::{Gpu, failure, simulate};
use nccl_device::gin::GinBackend;
use nccl_device::reduce_copy::lsa_copy;
use nccl_device::{BarrierIndex, Coop, DevComm, FenceLevel, MemoryOrder, Window};

fn lsa_barriers(count: u32) -> DevCommRequirements {
    DevCommRequirements::new().lsa_barriers(count)
}

/// Returns the report of a kernel with a device communicator: of a misuse, or of a panic of
/// `nccl_device`, which checks the indices of signals and counters.
fn misuse(
    requirements: DevCommRequirements,
    launch: impl Fn(&Gpu<'_>, &DevCommResource) -> Result<()> + Sync,
) -> String {
    let error =
        failure(Simulation::new(2), |gpu| launch(gpu, &gpu.dev_comm(requirements.clone())?));
    assert!(matches!(*error, Error::Misuse { .. } | Error::Panic { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("coop_misuse.rs:"), "{text}");
    text
}

/// Threads from `leave_from` on leave the kernel, before or after the others arrive: during a sleep
/// the other threads run. This is done in the same way below.
#[kernel]
unsafe fn some_leave(comm: DevComm, leave_from: u32, late: bool) {
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    let leaves = thread::thread_idx_x() >= leave_from;
    if leaves && late {
        core::mem::forget(barrier);
        thread::nanosleep(1);
        thread::nanosleep(1);
        return;
    }
    if leaves {
        core::mem::forget(barrier);
        return;
    }
    barrier.sync(MemoryOrder::AcqRel);
}

#[test]
fn a_barrier_whose_threads_have_returned_is_reported_with_them() {
    for late in [false, true] {
        let text = misuse(lsa_barriers(1), |gpu, comm| {
            gpu.launch(some_leave::args(comm, 62, late).grid(1).block(64))
        });
        let want = "barrier.sync (LSA barrier 0) is for 64 threads, but thread";
        assert!(text.contains(want) && text.contains("returned from the kernel"), "{text}");
    }
}

#[kernel]
unsafe fn the_rest_syncs() {
    if thread::thread_idx_x() >= 40 {
        return;
    }
    thread::sync_threads();
}

#[kernel]
unsafe fn a_warp_leaves_its_span() {
    if thread::thread_idx_x() >= 32 {
        return;
    }
    Coop::warp_span(0, 2, 3).sync();
}

#[test]
fn only_sync_threads_is_for_the_threads_that_remain() {
    simulate(Simulation::new(1), |gpu| gpu.launch(the_rest_syncs::args().grid(1).block(64)));
    let error = failure(Simulation::new(1), |gpu| {
        gpu.launch(a_warp_leaves_its_span::args().grid(1).block(64))
    });
    let text = error.to_string();
    assert!(matches!(*error, Error::Misuse { .. }), "{text}");
    assert!(text.contains("coop.sync is for 64 threads, but thread"), "{text}");
}

/// Lanes from 20 on leave the kernel, before or after the others arrive.
#[kernel]
unsafe fn lanes_leave(late: bool) {
    if thread::thread_idx_x() >= 20 {
        if late {
            thread::nanosleep(1);
            thread::nanosleep(1);
        }
        return;
    }
    Coop::warp().sync();
}

#[kernel]
unsafe fn warps_meet() {
    Coop::warp().sync();
}

#[test]
fn the_last_warp_of_a_block_may_have_fewer_lanes() {
    simulate(Simulation::new(1).multiprocessors(1), |gpu| {
        // The blocks of the second launch reuse the warps of the first, the last with fewer lanes.
        gpu.launch(warps_meet::args().grid(2).block(96))?;
        gpu.launch(warps_meet::args().grid(4).block(72))
    });
}

#[test]
fn a_warp_whose_lanes_have_returned_is_reported_with_them() {
    for late in [false, true] {
        let error = failure(Simulation::new(1), |gpu| {
            gpu.launch(lanes_leave::args(late).grid(1).block(32))
        });
        let text = error.to_string();
        let want = "coop.sync is for 32 threads, but thread";
        assert!(matches!(*error, Error::Misuse { .. }) && text.contains(want), "{text}");
    }
}

/// The threads below `stay` multiply. The others leave, before or after that has begun.
#[kernel]
unsafe fn multiplies_in_part(stay: u32, late: bool) {
    if thread::thread_idx_x() >= stay {
        if late {
            thread::nanosleep(1);
            thread::nanosleep(1);
        }
        return;
    }
    // SAFETY: lanes may be missing, which the simulator reports.
    unsafe { mma::m16n8k16::<bf16>(&mut [0.0; 4], [0; 4], [0; 2]) };
}

#[kernel(arch = "sm_90a")]
unsafe fn waits_for_products() {
    // SAFETY: threads of the warpgroup may be missing, which the simulator reports.
    unsafe { wgmma::wait_groups::<0>() };
}

#[test]
fn products_without_all_threads_of_the_warp_or_warpgroup_are_reported() {
    let report = |launch: &(dyn Fn(&Gpu<'_>) -> Result<()> + Sync)| {
        let error = failure(Simulation::new(1), launch);
        assert!(matches!(*error, Error::Misuse { .. }), "{error}");
        error.to_string()
    };
    for late in [false, true] {
        let text =
            report(&|gpu| gpu.launch(multiplies_in_part::args(20_u32, late).grid(1).block(32)));
        let want = "an operation on matrices is for 32 threads, but thread";
        assert!(text.contains(want) && text.contains("returned from the kernel"), "{text}");
    }
    let text = report(&|gpu| gpu.launch(multiplies_in_part::args(48_u32, false).grid(1).block(48)));
    assert!(text.contains("for 32 threads, but the block's last warp has 16"), "{text}");
    let text = report(&|gpu| gpu.launch(waits_for_products::args().grid(1).block(192)));
    assert!(text.contains("for 128 threads, but the block's last warpgroup has 64"), "{text}");
}

/// Lane 0 waits at the block's barrier, and the others at that of the warp.
#[kernel]
unsafe fn a_lane_waits_elsewhere() {
    if thread::thread_idx_x() == 0 {
        thread::sync_threads();
    }
    Coop::warp().sync();
}

#[test]
fn a_call_that_a_part_of_a_warp_makes_is_named() {
    let error = failure(Simulation::new(1), |gpu| {
        gpu.launch(a_lane_waits_elsewhere::args().grid(1).block(33))
    });
    let text = error.to_string();
    assert!(text.contains("31 threads wait for the rest of its coop in coop.sync, at "), "{text}");
}

/// A thread waits for a value that no one stores, while the others synchronise.
#[kernel]
unsafe fn one_waits_elsewhere(comm: DevComm, never: *mut u32) {
    if thread::thread_idx_x() == 5 {
        // SAFETY: the word is a buffer's.
        comm.wait_until(Coop::thread(), || unsafe {
            mem::load_ordered(never, cuda_std::atomic::Order::Acquire, cuda_std::atomic::Scope::Gpu)
        } != 0);
    }
    comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block()).sync(MemoryOrder::AcqRel);
}

#[test]
fn a_call_by_a_part_of_the_coop_names_the_threads_that_make_it_and_those_that_do_not() {
    let error = failure(Simulation::new(1), |gpu| {
        let (comm, never) = (gpu.dev_comm(lsa_barriers(1))?, gpu.buffer(&[0_u32])?);
        gpu.launch(one_waits_elsewhere::args(&comm, &never).grid(1).block(64))
    });
    let text = error.to_string();
    assert!(matches!(*error, Error::Deadlock(_)), "{text}");
    let there = "63 threads wait for the rest of its coop in barrier.sync (LSA barrier 0), at ";
    assert!(text.contains(there) && text.contains("(threads 0 to 4, 6 to 63)"), "{text}");
    assert!(text.contains("(thread 5)"), "{text}");
}

#[kernel(B = gin)]
unsafe fn signals_with_unequal_peers<B: GinBackend>(comm: DevComm) {
    let (gin, signal) = (comm.gin::<B>(0), comm.signal(0));
    let peer = i32::from(thread::thread_idx_x() == 7);
    gin.signal(Coop::cta(), comm.world_team(), peer, signal.inc());
}

/// The threads of a coop put from elements of their own.
#[kernel(B = gin)]
unsafe fn puts_from_unequal_sources<B: GinBackend>(comm: DevComm, out: Window<u32>, warp: bool) {
    let (gin, source) = (comm.gin::<B>(0), usize::from(thread::thread_idx_x() == 7));
    let coop = if warp { Coop::warp() } else { Coop::cta() };
    // SAFETY: the window has two elements; the mistake is what the test is for.
    unsafe { gin.put(comm.world_team(), 0, out.at(0), out.at(source), 1) }.post(coop);
}

#[test]
fn unequal_arguments_of_a_put_are_reported_for_every_coop() {
    for warp in [false, true] {
        let text = misuse(network(), |gpu, comm| {
            let out = gpu.window(&[0_u32; 2])?;
            gpu.launch(puts_from_unequal_sources::args(comm, &out, warp).grid(1).block(32))
        });
        let differ = text.contains("source's byte 4") && text.contains("source's byte 0");
        assert!(differ && text.contains("all threads of a coop pass equal arguments"), "{text}");
    }
}

/// Uses a signal or counter.
#[kernel]
unsafe fn uses(comm: DevComm, counter: bool, index: u32) {
    if counter {
        comm.counter(index);
    } else {
        comm.signal(index);
    }
}

/// Every block synchronises over one barrier of the network.
#[kernel(B = gin)]
unsafe fn shares_a_gin_barrier<B: GinBackend>(comm: DevComm, index: u32) {
    let coop = Coop::cta();
    let mut barrier = comm.gin::<B>(0).world_barrier(coop, BarrierIndex::new(index));
    barrier.sync(MemoryOrder::AcqRel, FenceLevel::None);
}

fn network() -> DevCommRequirements {
    DevCommRequirements::new()
        .gin_connection(GinConnectionType::Full)
        .gin_signals(2)
        .gin_counters(3)
        .world_gin_barriers(2)
}

#[test]
fn unequal_arguments_of_a_cooperative_call_are_reported_with_both_values() {
    let text = misuse(network(), |gpu, comm| {
        gpu.launch(signals_with_unequal_peers::args(comm).grid(1).block(32))
    });
    let want = "gin.signal (peer 1), but thread 0 of the same coop calls gin.signal (peer 0), at ";
    assert!(text.contains(want), "{text}");
}

#[test]
fn signals_and_counters_that_the_host_did_not_request_are_reported() {
    for (counter, index, want) in [
        (false, 2, "signal 2: the host requested 2 by gin_signals"),
        (true, 3, "counter 3: the host requested 3 by gin_counters"),
    ] {
        let text = misuse(network(), |gpu, comm| {
            gpu.launch(uses::args(comm, counter, index).grid(1).block(1))
        });
        assert!(text.contains(want), "{text}");
        simulate(Simulation::new(2), |gpu| {
            let comm = gpu.dev_comm(network())?;
            gpu.launch(uses::args(&comm, counter, index - 1).grid(1).block(1))
        });
    }
}

#[test]
fn one_gin_barrier_with_two_users_is_reported_and_one_that_is_not_there() {
    for (grid, index, want) in [
        (2, 0, "GIN barrier 0 is in use by block"),
        (1, 2, "GIN barrier 2: the device communicator was made with 2"),
    ] {
        let text = misuse(network(), |gpu, comm| {
            gpu.launch(shares_a_gin_barrier::args(comm, index).grid(grid).block(32))
        });
        assert!(text.contains(want), "{text}");
    }
}

/// The threads of a block (form 0) or of a warp (2) copy with unequal counts, or thread 9 of the
/// block does not (1).
#[kernel]
unsafe fn reduces_unequally(comm: DevComm, x: Window<f32>, form: u32) {
    let (team, me) = (comm.lsa_team(), thread::thread_idx_x());
    let coop = if form == 2 { Coop::warp() } else { Coop::cta() };
    let count = if me == 7 && form != 1 { 31 } else { 32 };
    if me == 9 && form == 1 {
        return;
    }
    // SAFETY: the windows have 64 elements, of which the call writes the second half; the mistake
    // is what the test is for.
    unsafe { lsa_copy(coop, x.local().as_ptr(), x, 32, count, team) };
}

#[test]
fn unequal_arguments_of_a_reduction_or_copy_are_reported_although_nothing_waits() {
    for form in 0..3 {
        let text = misuse(DevCommRequirements::new(), |gpu, comm| {
            let x = gpu.window(&[1.0_f32; 64])?;
            gpu.launch(reduces_unequally::args(comm, &x, form).grid(1).block(32))
        });
        if form == 1 {
            let want = "only 31 of the 32 threads of the coop have made this call";
            assert!(text.contains(want), "{text}");
            continue;
        }
        assert!(text.contains("lsa_copy (source ") && text.contains("count 31"), "{text}");
        assert!(text.contains("count 32") && text.contains("thread 0 of the same coop"), "{text}");
        assert!(text.contains("all threads of a coop pass equal arguments"), "{text}");
    }
}
