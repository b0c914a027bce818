//! Tests of the detection of races with transfers over the network and accesses by the switch. As
//! in [`races`](crate::races), form 0 is right, and each other form is reported.

use crate::common::*;
use crate::races::{check, race};
use cuda_std::prelude::*;
use devcomm::{DevCommRequirements, Result, Simulation};
use devcomm_testing::simulated::Gpu;
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window, raw};

/// Rank 0 sends element 0 to rank 1's element 1, or rank 1 gets it; then element 0 is stored again.
/// Forms: right; no flush before the store; no wait before the load; a get that is right; one
/// without a flush.
#[kernel]
unsafe fn transfers(comm: DevComm, out: Window<u32>, form: u32) {
    let raw = comm.as_raw();
    let (team, mut net, window, out) = (raw.world_team(), gin(raw, 0), handle(&out), out.local());
    // SAFETY: the window has two elements; the races are what the tests are for.
    unsafe {
        match (form, raw.rank) {
            (0..=2, 0) => {
                let then = SignalMode::Inc(0, true);
                put(&mut net, &team, 1, (window, 4), (window, 0), 4, then, None);
                if form != 1 {
                    flush(&mut net);
                }
                out.store(0, 8);
            }
            (0..=2, _) => {
                if form != 2 {
                    wait(&mut net, 0, 1);
                }
                let _ = out.load(1);
            }
            (_, 0) => {}
            (_, _) => {
                let one = thread_coop();
                let (none, to) = (core::ptr::null_mut(), (window, 4));
                raw::ncclGinGet(&mut net, &team, 0, window, 0, to.0, to.1, 4, &one, false, none, 0);
                if form != 4 {
                    flush(&mut net);
                }
                let _ = out.load(1);
            }
        }
    }
}

/// Rank 0 puts element 0 to rank 1's element 1, with signal 0 and counter 0, and stores element 0
/// again after a wait; rank 1 loads element 1 after a wait. Forms: right, with a relaxed wait for
/// the counter, after which the source is only written; a relaxed wait for the signal; a relaxed
/// read of the signal; a get that a relaxed flush ends.
#[kernel]
unsafe fn waits_of_each_order(comm: DevComm, out: Window<u32>, form: u32) {
    let (raw, one) = (comm.as_raw(), thread_coop());
    let (team, mut net, window, out) = (raw.world_team(), gin(raw, 0), handle(&out), out.local());
    let order = if form == 0 { ACQ_REL } else { RELAXED };
    // SAFETY: the window has two elements; the races are what the tests are for.
    unsafe {
        match (form, raw.rank) {
            (0..=2, 0) => {
                let then = SignalMode::Inc(0, true);
                put(&mut net, &team, 1, (window, 4), (window, 0), 4, then, Some(0));
                raw::ncclGinWaitCounter(&mut net, &one, 0, 1, COUNTER_BITS, RELAXED);
                out.store(0, 8);
            }
            (2, _) => {
                while raw::ncclGinReadSignal(&mut net, 0, SIGNAL_BITS, order) == 0 {}
                let _ = out.load(1);
            }
            (0 | 1, _) => {
                raw::ncclGinWaitSignal(&mut net, &one, 0, 1, SIGNAL_BITS, order);
                let _ = out.load(1);
            }
            (_, 0) => {}
            (_, _) => {
                let none = core::ptr::null_mut();
                raw::ncclGinGet(&mut net, &team, 0, window, 0, window, 4, 4, &one, false, none, 0);
                raw::ncclGinFlush(&mut net, &one, order);
                let _ = out.load(1);
            }
        }
    }
}

#[test]
fn gins_waits_and_reads_order_only_what_their_memory_order_says() {
    check(&Simulation::new(2), 4, |gpu, form| {
        let (comm, out) = (gpu.dev_comm(full())?, gpu.window(&[7_u32, 0])?);
        gpu.launch(waits_of_each_order::args(&comm, &out, form).grid(1).block(1))
    });
}

fn transfer(gpu: &Gpu<'_>, form: u32) -> Result<()> {
    let (comm, out) = (gpu.dev_comm(full())?, gpu.window(&[7_u32, 0])?);
    gpu.launch(transfers::args(&comm, &out, form).grid(1).block(1))
}

#[test]
fn what_the_network_reads_and_writes_is_ordered_by_flushes_and_signals() {
    check(&Simulation::new(2), 3, transfer);
    check(&Simulation::new(2), 2, |gpu, form| transfer(gpu, form + 3));
}

#[test]
fn a_race_with_the_network_says_which_flush_or_signal_is_missing() {
    for (form, remedy) in [
        (1, "a flush (`gin.flush`) after the put, or a wait for its counter, is missing before"),
        (2, "a wait for the put's signal (`gin.wait_signal`) before the access is missing"),
        (4, "a flush (`gin.flush`) after the get, or a wait for its request, is missing before"),
    ] {
        for simulation in [Simulation::new(2), Simulation::new(2).seed(3).preempt(true)] {
            let race = race(simulation, |gpu| transfer(gpu, form));
            assert!(race.remedy.contains(remedy), "form {form}: {race}");
            assert!(race.memory.contains(" of `out` (window "), "form {form}: {race}");
        }
    }
}

/// Every rank stores its element, and rank 0 sums them in the switch or stores to all of them.
/// Forms: right; no barrier before the sum; a store to all that other ranks load.
#[kernel]
unsafe fn by_the_switch(comm: DevComm, out: Window<f32>, form: u32) {
    let (raw, coop) = (comm.as_raw(), cta());
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    // SAFETY: the window has two elements; the races are what the tests are for.
    unsafe {
        let all = raw::ncclGetLsaMultimemPointer(handle(&out), 0, raw).cast::<f32>();
        out.local().store(0, 1.0);
        if form != 1 {
            barrier.sync(MemoryOrder::AcqRel);
        }
        if form == 2 && raw.rank == 1 {
            let _ = out.local().load(0);
        }
        if raw.rank == 0 {
            let sum = out.local().as_ptr().add(1);
            match form {
                2 => raw::ncclMultimemCopy_F32(&coop, sum, all, 1),
                _ => raw::ncclMultimemReduceSum_F32(&coop, all, sum, 1),
            }
        }
    }
}

#[test]
fn nccls_functions_in_the_switch_access_each_ranks_part() {
    check(&Simulation::new(2), 3, |gpu, form| {
        let out = gpu.window(&[0_f32; 2])?;
        let asked = DevCommRequirements::new().lsa_barriers(1).lsa_multimem(true);
        gpu.launch(by_the_switch::args(&gpu.dev_comm(asked)?, &out, form).grid(1).block(1))
    });
}

/// Does the same as [`waits_of_each_order`], with the safe functions: rank 1 waits, and loads or
/// puts back.
#[kernel]
unsafe fn waits_safely(comm: DevComm, out: Window<u32>, form: u32) {
    let (gin, coop) = (comm.gin::<nccl_device::gin::Proxy>(0), Coop::cta());
    let (team, arrived) = (comm.world_team(), comm.signal(0));
    let order = if form == 0 { MemoryOrder::Acquire } else { MemoryOrder::Relaxed };
    // SAFETY: the window has two elements; the races are what the tests are for.
    unsafe {
        if comm.rank() == 0 {
            let put = gin.put(team, 1, out.at(1), out.at(0), 1);
            put.signal(arrived.inc().strong()).post(coop);
        } else {
            gin.wait_signal(coop, arrived, 1, order);
            if form < 2 {
                let _ = out.local().load(1);
            } else {
                gin.put(team, 0, out.at(1), out.at(1), 1).post(coop);
            }
        }
    }
    gin.flush(coop, MemoryOrder::Relaxed);
}

#[test]
fn a_relaxed_wait_makes_data_visible_neither_to_loads_nor_to_puts() {
    check(&Simulation::new(2), 3, |gpu, form| {
        let (comm, out) = (gpu.dev_comm(full())?, gpu.window(&[7_u32, 0])?);
        gpu.launch(waits_safely::args(&comm, &out, form).grid(1).block(32))
    });
}

/// Puts to the other rank by the first thread, and flushes by all.
#[kernel]
unsafe fn puts_and_flushes(comm: DevComm, from: Window<u32>, to: Window<u32>) {
    let (gin, coop) = (comm.gin::<nccl_device::gin::Proxy>(0), Coop::cta());
    let (team, arrived) = (comm.world_team(), comm.signal(0));
    if coop.thread_rank() == 0 {
        // SAFETY: the windows have an element.
        let put = unsafe { gin.put(team, 1 - team.rank, to.at(0), from.at(0), 1) };
        put.signal(arrived.inc().weak()).post(Coop::thread());
    }
    gin.wait_signal_follow_shadow(coop, arrived, 1, MemoryOrder::Acquire);
    gin.flush(coop, MemoryOrder::Relaxed);
}

#[test]
fn a_flush_by_all_threads_orders_what_comes_after_the_kernel() {
    check(&Simulation::new(2), 1, |gpu, _| {
        let (comm, stream) = (gpu.dev_comm(full())?, gpu.stream()?);
        let (from, to) = (gpu.window(&[7_u32])?, gpu.window(&[0_u32])?);
        stream.fill(&from, 1_u32)?;
        // SAFETY: the kernel flushes its put.
        unsafe { puts_and_flushes::args(&comm, &from, &to).grid(1).block(32).launch(&stream)? };
        stream.fill(&from, 2_u32)?;
        stream.synchronize()
    });
}
