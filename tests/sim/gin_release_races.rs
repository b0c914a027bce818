//! Tests of what GIN's operations and barriers release. As in [`races`](crate::races), form 0 is
//! right, and each other form is reported.

use core::mem::MaybeUninit;

use cuda_std::atomic::{Atomic, Order, Scope, fence};
use cuda_std::prelude::*;
use devcomm::{DevCommRequirements, Simulation};
use devcomm_testing::simulated::Gpu;
use nccl_device::gin::Proxy;
use nccl_device::{BarrierIndex, Coop, DevComm, FenceLevel, MemoryOrder, Window, raw};

use crate::common::*;
use crate::races::{check, race};

/// C++'s numbers of two more memory orders.
const ACQUIRE: i32 = 2;
const RELEASE: i32 = 3;
/// NCCL's fence level of a barrier that waits for no transfers.
const NO_FENCE: i32 = 0;

/// The second thread of a block stores to the other rank, all meet at a barrier over the network,
/// and the second thread loads. Forms: the order of the barrier is acquire and release, acquire,
/// release, relaxed.
#[kernel]
unsafe fn meets_over_the_network(comm: DevComm, words: Window<u32>, form: u32, by_nccl: bool) {
    let (team, coop, second) = (comm.world_team(), Coop::cta(), thread::thread_idx_x() == 1);
    let (order, number) = match form {
        0 => (MemoryOrder::AcqRel, ACQ_REL),
        1 => (MemoryOrder::Acquire, ACQUIRE),
        2 => (MemoryOrder::Release, RELEASE),
        _ => (MemoryOrder::Relaxed, RELAXED),
    };
    // SAFETY: the windows have an element; the races are what the test is for.
    unsafe {
        if second {
            words.lsa(1 - team.rank).store(0, 7);
        }
        if by_nccl {
            let mut session = MaybeUninit::uninit();
            let (raw, session) = (comm.as_raw(), session.as_mut_ptr());
            let (net, handle) = (gin(raw, 0), &raw.world_gin_barrier);
            raw::ncclGinBarrierSessionInit(session, &cta(), &net, &team, handle, 0);
            raw::ncclGinBarrierSessionSync(session, &cta(), number, NO_FENCE);
            raw::ncclGinBarrierSessionDestroy(session);
        } else {
            let gin = comm.gin::<Proxy>(0);
            gin.world_barrier(coop, BarrierIndex::this_block()).sync(order, FenceLevel::None);
        }
        if second {
            words.local().load(0);
        }
    }
}

fn one_barrier() -> DevCommRequirements {
    full().world_gin_barriers(1)
}

#[test]
fn barriers_over_the_network_order_only_what_their_memory_order_says() {
    for by_nccl in [false, true] {
        check(&Simulation::new(2), 4, |gpu, form| {
            let (comm, words) = (gpu.dev_comm(one_barrier())?, gpu.window(&[0_u32])?);
            let args = meets_over_the_network::args(&comm, &words, form, by_nccl);
            gpu.launch(args.grid(1).block(2))
        });
    }
}

/// The second thread of rank 0's block stores an element, and the first one puts it to rank 1
/// without a release by NCCL. Forms, of the fence before the put: a right one; none; one whose
/// scope is the GPU; one before the barrier of the two threads.
#[kernel]
unsafe fn puts_what_is_released(comm: DevComm, words: Window<u32>, form: u32) {
    let (gin, coop) = (comm.gin::<Proxy>(0), Coop::cta());
    let (team, arrived) = (comm.world_team(), comm.signal(0));
    let first = thread::thread_idx_x() == 0;
    // SAFETY: the window has two elements; the races are what the test is for.
    unsafe {
        if comm.rank() == 0 {
            if !first {
                words.local().store(0, 7);
            }
            if form == 3 && first {
                fence(Order::AcqRel, Scope::Sys);
            }
            thread::sync_threads();
            if first {
                match form {
                    0 => fence(Order::AcqRel, Scope::Sys),
                    2 => fence(Order::AcqRel, Scope::Gpu),
                    _ => {}
                }
                let put = gin.put(team, 1, words.at(1), words.at(0), 1);
                put.signal(arrived.inc()).released_to(Scope::Sys).post(Coop::thread());
            }
        } else {
            gin.wait_signal(coop, arrived, 1, MemoryOrder::Acquire);
            words.local().load(1);
        }
    }
    gin.flush(coop, MemoryOrder::Relaxed);
}

#[test]
fn a_put_that_releases_nothing_sends_only_what_a_fence_has_released() {
    let puts = |gpu: &Gpu<'_>, form| {
        let (comm, words) = (gpu.dev_comm(full())?, gpu.window(&[0_u32; 2])?);
        gpu.launch(puts_what_is_released::args(&comm, &words, form).grid(1).block(2))
    };
    check(&Simulation::new(2), 4, puts);
    let race = race(Simulation::new(2), |gpu| puts(gpu, 1));
    assert!(race.remedy.contains("a fence at system scope by the thread"), "{race}");
}

/// Does the same as [`puts_what_is_released`], but the second thread fences, and passes it on by a
/// relaxed flag. Forms, the scope of its fence: the system; the GPU.
#[kernel]
unsafe fn puts_what_another_has_released(
    comm: DevComm,
    words: Window<u32>,
    flag: *mut u32,
    form: u32,
) {
    let (gin, coop, first) = (comm.gin::<Proxy>(0), Coop::cta(), thread::thread_idx_x() == 0);
    let (team, arrived) = (comm.world_team(), comm.signal(0));
    let scope = [Scope::Sys, Scope::Gpu][form as usize];
    // SAFETY: the window has two elements; the races are what the test is for.
    unsafe {
        let flag = Atomic::from_ptr(flag);
        match (comm.rank(), first) {
            (0, false) => {
                words.local().store(0, 7);
                fence(Order::AcqRel, scope);
                flag.store(1, Order::Relaxed, Scope::Gpu);
            }
            (0, true) => {
                while flag.load(Order::Relaxed, Scope::Gpu) == 0 {}
                fence(Order::AcqRel, Scope::Gpu);
                let put = gin.put(team, 1, words.at(1), words.at(0), 1);
                put.signal(arrived.inc()).released_to(Scope::Sys).post(Coop::thread());
            }
            _ => {
                gin.wait_signal(coop, arrived, 1, MemoryOrder::Acquire);
                words.local().load(1);
            }
        }
    }
    gin.flush(coop, MemoryOrder::Relaxed);
}

#[test]
fn a_put_that_releases_nothing_sends_what_another_threads_fence_has_released() {
    check(&Simulation::new(2), 2, |gpu, form| {
        let (comm, words) = (gpu.dev_comm(full())?, gpu.window(&[0_u32; 2])?);
        let flag = gpu.buffer(&[0_u32])?;
        let args = puts_what_another_has_released::args(&comm, &words, &flag, form);
        gpu.launch(args.grid(1).block(2))
    });
}

/// Does the same as [`puts_what_is_released`], with a signal: rank 0 stores to rank 1, and signals.
#[kernel]
unsafe fn signals_what_is_released(comm: DevComm, words: Window<u32>, form: u32) {
    let (raw, one) = (comm.as_raw(), thread_coop());
    let (team, mut net, none) = (raw.world_team(), gin(raw, 0), core::ptr::null_mut());
    let given = if form == 0 { THREAD } else { SYSTEM };
    // SAFETY: the window has an element; the races are what the test is for.
    unsafe {
        if raw.rank == 0 {
            words.lsa(1).store(0, 7);
            raw::ncclGinSignal(
                &mut net, &team, 1, true, 0, INC, 0, &one, false, none, given, SYSTEM,
            );
        } else {
            wait(&mut net, 0, 1);
            words.local().load(0);
        }
    }
}

#[test]
fn a_signal_releases_nothing_if_its_kernel_says_that_it_has() {
    check(&Simulation::new(2), 2, |gpu, form| {
        let (comm, words) = (gpu.dev_comm(full())?, gpu.window(&[0_u32])?);
        gpu.launch(signals_what_is_released::args(&comm, &words, form).grid(1).block(1))
    });
}
