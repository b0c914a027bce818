//! Tests of what a put's signal, a counter and a barrier say of other operations. As in
//! [`races`](crate::races), form 0 is right, and each other form is reported.

use std::panic::{AssertUnwindSafe, catch_unwind};

use cuda_std::atomic::{AtomicU32, Order, Scope};
use cuda_std::prelude::*;
use devcomm::Simulation;
use devcomm_testing::simulated::{Gpu, simulate};
use nccl_device::gin::Proxy;
use nccl_device::{BarrierIndex, Coop, DevComm, FenceLevel, MemoryOrder, Window};

use crate::common::*;
use crate::races::check;

/// Rank 0 stores to rank 1 by load and store, and puts with a signal. Rank 1 waits for the signal,
/// and loads what was stored. Forms: the put releases at system scope; by default, at GPU scope.
#[kernel]
unsafe fn passes_a_store_on_by_a_put(comm: DevComm, words: Window<u32>, form: u32) {
    let (gin, coop) = (comm.gin::<Proxy>(0), Coop::thread());
    let (team, arrived) = (comm.world_team(), comm.signal(0));
    // SAFETY: the window has three elements; the races are what the test is for.
    unsafe {
        if comm.rank() == 0 {
            words.lsa(1).store(0, 7);
            let put = gin.put(team, 1, words.at(2), words.at(1), 1).signal(arrived.inc());
            let put = if form == 0 { put.release_at(Scope::Sys) } else { put };
            put.post(coop);
            gin.flush(coop, MemoryOrder::Relaxed);
        } else {
            gin.wait_signal(coop, arrived, 1, MemoryOrder::Acquire);
            words.local().load(0);
        }
    }
}

#[test]
fn a_puts_signal_releases_other_writes_only_at_system_scope() {
    check(&Simulation::new(2), 2, |gpu, form| {
        let (comm, words) = (gpu.dev_comm(full())?, gpu.window(&[0_u32; 3])?);
        gpu.launch(passes_a_store_on_by_a_put::args(&comm, &words, form).grid(1).block(1))
    });
}

/// Rank 0 puts two elements, waits for the counter of one of the puts, and writes the source of the
/// first. Forms: the counter of the first put; that of the second.
#[kernel]
unsafe fn waits_for_a_counter(comm: DevComm, words: Window<u32>, form: u32) {
    let (gin, coop, counter) = (comm.gin::<Proxy>(0), Coop::thread(), comm.counter(0));
    let team = comm.world_team();
    if comm.rank() > 0 {
        return;
    }
    // SAFETY: the window has four elements; the races are what the test is for.
    unsafe {
        for i in 0..2 {
            let put = gin.put(team, 1, words.at(2 + i), words.at(i), 1);
            let put = if i == form as usize { put.counter(counter) } else { put };
            put.post(coop);
        }
        gin.wait_counter(coop, counter, 1, MemoryOrder::Relaxed);
        words.local().store(0, 5);
    }
    gin.flush(coop, MemoryOrder::Relaxed);
}

#[test]
fn a_counter_counts_its_own_put_only() {
    check(&Simulation::new(2), 2, |gpu, form| {
        let (comm, words) = (gpu.dev_comm(full())?, gpu.window(&[0_u32; 4])?);
        gpu.launch(waits_for_a_counter::args(&comm, &words, form).grid(1).block(1))
    });
}

/// Both ranks put to each other, meet at a barrier, and load what they got. Forms: a barrier with a
/// fence of puts; without one.
#[kernel]
unsafe fn puts_before_a_barrier(comm: DevComm, words: Window<u32>, form: u32) {
    let (gin, coop, team) = (comm.gin::<Proxy>(0), Coop::thread(), comm.world_team());
    let level = if form == 0 { FenceLevel::Put } else { FenceLevel::None };
    // SAFETY: the window has two elements; the races are what the test is for.
    unsafe {
        gin.put(team, 1 - team.rank, words.at(1), words.at(0), 1).post(coop);
        gin.world_barrier(coop, BarrierIndex::this_block()).sync(MemoryOrder::AcqRel, level);
        words.local().load(1);
    }
    gin.flush(coop, MemoryOrder::Relaxed);
}

#[test]
fn a_barrier_without_a_fence_completes_no_puts() {
    check(&Simulation::new(2), 2, |gpu, form| {
        let comm = gpu.dev_comm(full().world_gin_barriers(1))?;
        let words = gpu.window(&[0_u32; 2])?;
        gpu.launch(puts_before_a_barrier::args(&comm, &words, form).grid(1).block(1))
    });
}

/// Rank 0 puts again and again from one source, each time after rank 1's reply to the put before.
/// Forms: it also flushes; the reply alone.
#[kernel]
unsafe fn puts_after_each_reply(comm: DevComm, words: Window<u32>, form: u32) {
    let (gin, coop, team) = (comm.gin::<Proxy>(0), Coop::thread(), comm.world_team());
    let (arrived, replied) = (comm.signal(0), comm.signal(1));
    for k in 1..=4 {
        // SAFETY: the window has two elements; each is accessed after the signal that says so.
        unsafe {
            if team.rank == 0 {
                words.local().store(0, k);
                gin.put(team, 1, words.at(1), words.at(0), 1).signal(arrived.inc()).post(coop);
                gin.wait_signal(coop, replied, k.into(), MemoryOrder::Acquire);
                if form == 0 {
                    gin.flush(coop, MemoryOrder::Relaxed);
                }
            } else {
                gin.wait_signal(coop, arrived, k.into(), MemoryOrder::Acquire);
                words.local().load(1);
                gin.signal(coop, team, 0, replied.inc());
            }
        }
    }
    gin.flush(coop, MemoryOrder::Relaxed);
}

#[test]
fn a_reply_does_not_say_that_the_source_was_read() {
    check(&Simulation::new(2), 2, |gpu, form| {
        let (comm, words) = (gpu.dev_comm(full())?, gpu.window(&[0_u32; 2])?);
        gpu.launch(puts_after_each_reply::args(&comm, &words, form).grid(1).block(1))
    });
}

/// Each rank but the first adds to a word of rank 0 after rank 1 has, and tells rank 0, which loads
/// the word then. Rank 1 tells the others without a release, so nothing orders its addition.
#[kernel]
unsafe fn adds_in_a_chain(comm: DevComm, word: Window<u32>, flags: Window<u32>) {
    let (me, n) = (comm.rank() as usize, comm.n_ranks() as usize);
    // SAFETY: the windows have the elements; the race is what the test is for.
    unsafe {
        let flag = |rank: usize, i: usize| {
            AtomicU32::from_ptr(flags.lsa(rank as i32).as_ptr().wrapping_add(i))
        };
        let wait = |flag: &AtomicU32| while flag.load(Order::Acquire, Scope::Sys) == 0 {};
        if me == 0 {
            (2..n).for_each(|rank| wait(flag(0, rank)));
            word.local().load(0);
            return;
        }
        if me > 1 {
            wait(flag(me, 1));
        }
        AtomicU32::from_ptr(word.lsa(0).as_ptr()).fetch_add(1, Order::Relaxed, Scope::Sys);
        match me {
            1 => (2..n).for_each(|rank| flag(rank, 1).store(1, Order::Relaxed, Scope::Sys)),
            _ => flag(0, me).store(1, Order::Release, Scope::Sys),
        }
    }
}

#[test]
fn no_access_of_many_to_a_word_is_forgotten_in_all_schedules() {
    for ranks in [3, 4, 5] {
        let adds = |gpu: &Gpu<'_>| {
            let (comm, word) = (gpu.dev_comm(full())?, gpu.window(&[0_u32])?);
            let flags = gpu.window(&[0_u32; 8])?;
            gpu.launch(adds_in_a_chain::args(&comm, &word, &flags).grid(1).block(1))
        };
        let is_found = |seed| {
            let simulation = Simulation::new(ranks).seed(seed);
            catch_unwind(AssertUnwindSafe(|| simulate(simulation, adds))).is_err()
        };
        assert!((0..40).any(is_found), "{ranks} ranks: no schedule of 40 has found the race");
    }
}
