//! Tests of the repairs that reports of races name: a program with any of them has no race.
//!
//! A kernel's `repair` is 0 in the wrong form, and else the number of the repair that it makes.

use cuda_std::atomic::{Order, Scope};
use cuda_std::mbarrier::{self, MBarrier};
use cuda_std::prelude::*;
use cuda_std::vector::Vec16;
use cuda_std::{mem, shared_array, tma, warp};
use devcomm::{Buffer, DevCommRequirements, Result, Simulation, Stream, TensorMap};
use devcomm_testing::simulated::{Gpu, simulate};
use devcomm_types::GridConstant;
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};

use crate::races::{add_1, orders, race};
use crate::tensor::{aligned_shared, row};

/// Checks that a wrong form's hint names the repairs `named`, and that each makes the program pass.
#[track_caller]
pub fn check(base: &Simulation, named: &[&str], run: impl Fn(&Gpu<'_>, u32) -> Result<()> + Sync) {
    let race = race(base.clone(), |gpu| run(gpu, 0));
    for (name, repair) in named.iter().zip(1..) {
        assert!(race.remedy.contains(name), "{name:?} is not in {race}");
        for simulation in orders(base) {
            simulate(simulation, |gpu| run(gpu, repair));
        }
    }
}

/// Each thread stores an element, and loads that of the thread `distance` further on. Repairs: a
/// barrier of the block, a named one, one of the warp.
#[kernel]
unsafe fn pass_in_a_block(words: *mut u32, distance: u32, repair: u32) {
    let (i, n) = (thread::thread_idx_x(), thread::block_dim_x());
    // SAFETY: an element for each thread; the races are what the tests are for.
    unsafe {
        mem::store(words.add(i as usize), 1);
        match repair {
            1 => thread::sync_threads(),
            2 if distance == 1 => warp::sync(),
            2 => thread::named_barrier_sync(1, 64),
            _ => {}
        }
        mem::load(words.add(((i + distance) % n) as usize));
    }
}

#[test]
fn threads_of_a_block_meet_at_a_barrier_of_the_warp_or_of_the_block() {
    check(&Simulation::new(1), &["`sync_threads`", "`sync_warp`"], |gpu, repair| {
        let words = gpu.buffer(&[0_u32; 32])?;
        gpu.launch(pass_in_a_block::args(&words, 1, repair).grid(1).block(32))
    });
    let named = ["`sync_threads`", "another barrier of both threads"];
    check(&Simulation::new(1), &named, |gpu, repair| {
        let words = gpu.buffer(&[0_u32; 64])?;
        gpu.launch(pass_in_a_block::args(&words, 32, repair).grid(1).block(64))
    });
}

/// Does the same as [`pass_in_a_block`], in a window. Repairs: a barrier of the block, of the
/// ranks, of the warp.
#[kernel]
unsafe fn pass_in_a_window(comm: DevComm, words: Window<u32>, distance: u32, repair: u32) {
    let mut ranks = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    let (i, n) = (thread::thread_idx_x(), thread::block_dim_x());
    // SAFETY: an element for each thread; the races are what the tests are for.
    unsafe {
        words.local().store(i as usize, 1);
        match repair {
            1 => thread::sync_threads(),
            2 => ranks.sync(MemoryOrder::AcqRel),
            3 => warp::sync(),
            _ => {}
        }
        words.local().load(((i + distance) % n) as usize);
    }
}

#[test]
fn threads_that_share_a_window_may_meet_at_a_barrier_of_the_ranks_too() {
    let named = ["`sync_threads`", "a barrier of the ranks, which orders both", "`sync_warp`"];
    for (threads, distance, named) in [(32, 1, &named[..]), (64, 32, &named[..2])] {
        check(&Simulation::new(2), named, |gpu, repair| {
            let words = gpu.window(&[0_u32; 64])?;
            let comm = gpu.dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
            let args = pass_in_a_window::args(&comm, &words, distance, repair);
            gpu.launch(args.grid(1).block(threads))
        });
    }
}

/// The first block stores, except with `part` 2, and the second one loads, except with `part` 1.
/// Repairs: a release and an acquire, the end of the kernel.
#[kernel]
unsafe fn pass_between_blocks(words: *mut u32, part: u32, repair: u32) {
    let (block, flag) = (thread::block_idx_x(), words.wrapping_add(1));
    // SAFETY: two elements; the races are what the tests are for.
    unsafe {
        if block == 0 && part != 2 {
            mem::store(words, 1);
            if repair == 1 {
                mem::store_ordered(flag, 1, Order::Release, Scope::Gpu);
            }
        }
        if block == 1 && part != 1 {
            while repair == 1 && mem::load_ordered(flag, Order::Acquire, Scope::Gpu) == 0 {}
            mem::load(words);
        }
    }
}

#[test]
fn blocks_are_ordered_by_a_release_and_an_acquire_or_by_the_end_of_the_kernel() {
    let named = ["a release at GPU scope", "the end of the kernel between them"];
    check(&Simulation::new(1), &named, |gpu, repair| {
        let words = gpu.buffer(&[0_u32; 2])?;
        let parts = if repair == 2 { 1..3 } else { 0..1 };
        parts.into_iter().try_for_each(|part| {
            gpu.launch(pass_between_blocks::args(&words, part, repair).grid(2).block(1))
        })
    });
}

/// Rank 0 stores to rank 1, which loads. Repairs: a barrier, a release and an acquire.
#[kernel]
unsafe fn pass_between_ranks(comm: DevComm, words: Window<u32>, repair: u32) {
    let mut ranks = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    let is_first = comm.rank() == 0;
    // SAFETY: two elements; the races are what the tests are for.
    unsafe {
        let flag = words.lsa(1).as_ptr().add(1);
        if is_first {
            words.lsa(1).store(0, 1);
        }
        match repair {
            1 => ranks.sync(MemoryOrder::AcqRel),
            2 if is_first => mem::store_ordered(flag, 1, Order::Release, Scope::Sys),
            2 => while mem::load_ordered(flag, Order::Acquire, Scope::Sys) == 0 {},
            _ => {}
        }
        if !is_first {
            words.local().load(0);
        }
    }
}

#[test]
fn ranks_are_ordered_by_a_barrier_or_by_a_release_and_an_acquire() {
    let named = ["a barrier of the ranks between them", "a release at system scope"];
    check(&Simulation::new(2), &named, |gpu, repair| {
        let words = gpu.window(&[0_u32; 2])?;
        let comm = gpu.dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
        gpu.launch(pass_between_ranks::args(&comm, &words, repair).grid(1).block(1))
    });
}

/// All ranks store to a word of rank 0, or all blocks to one of their rank. Repair: the scope that
/// includes them.
#[kernel]
unsafe fn count(words: Window<u32>, of_ranks: bool, repair: u32) {
    let scope = match (of_ranks, repair) {
        (false, 0) => Scope::Cta,
        (false, _) | (true, 0) => Scope::Gpu,
        (true, _) => Scope::Sys,
    };
    let word = if of_ranks { words.lsa(0) } else { words.local() };
    // SAFETY: an element, of which all accesses are atomic.
    unsafe { mem::store_ordered(word.as_ptr(), 1, Order::Relaxed, scope) };
}

#[test]
fn atomic_accesses_have_the_scope_that_includes_both() {
    for (of_ranks, scope) in [(false, "`Scope::Gpu`"), (true, "`Scope::Sys`")] {
        let gpus = if of_ranks { 2 } else { 1 };
        check(&Simulation::new(gpus), &[scope], |gpu, repair| {
            let words = gpu.window(&[0_u32])?;
            let grid = if of_ranks { 1 } else { 2 };
            gpu.launch(count::args(&words, of_ranks, repair).grid(grid).block(1))
        });
    }
}

/// A thread copies what it has stored in shared memory, and stores there again. The repaired form
/// has the fence of the asynchronous proxy before the copy, and the wait for the copy's reads after
/// it. `lacks` says which of them is missing in the wrong form.
#[kernel]
unsafe fn copy_out(out: *mut u32, lacks: u32, repair: u32) {
    let tile = shared_array![u128; 1].cast::<u32>();
    // SAFETY: 16 bytes in each memory; the races are what the tests are for.
    unsafe {
        mem::store_vec(tile, Vec16::from_bits([1; 4]));
        if repair == 1 || lacks != 0 {
            tma::fence_async_shared();
        }
        tma::store_bulk(out.cast(), tile.cast(), 16);
        tma::commit_stores();
        if repair == 1 || lacks != 1 {
            tma::wait_stores_read::<0>();
        }
        mem::store(tile, 2);
        tma::wait_stores::<0>();
    }
}

/// A thread copies what it has stored in global memory into shared memory. Repair: the fence.
#[kernel]
unsafe fn copy_in(map: GridConstant<TensorMap>, words: *mut u32, repair: u32) {
    // SAFETY: a row in each memory; the races are what the tests are for.
    unsafe {
        let full = MBarrier::at(shared_array![u64; 1]);
        mem::store(words, 1);
        if repair == 1 {
            tma::fence_async_global();
        }
        full.init(1);
        mbarrier::fence_init();
        full.arrive_expect_tx(128);
        tma::load_tile(aligned_shared(), &map, 0, 0, full);
        full.wait(0);
    }
}

#[test]
fn copies_need_the_fence_of_their_proxy_and_a_wait_for_their_end() {
    let missing = ["`fence_async_shared`", "a wait for the end of the asynchronous operation"];
    for (lacks, name) in (0..).zip(missing) {
        check(&Simulation::new(1), &[name], |gpu, repair| {
            let out = gpu.buffer(&[0_u32; 4])?;
            gpu.launch(copy_out::args(&out, lacks, repair).grid(1).block(1))
        });
    }
    check(&Simulation::new(1), &["`fence_async_global`"], |gpu, repair| {
        let words = gpu.buffer(&[0_u32; 32])?;
        gpu.launch(
            copy_in::args(row(gpu, &words)?, &words, repair).grid(1).block(1).dynamic_shared(2048),
        )
    });
}

#[test]
fn operations_of_a_gpu_need_one_stream_an_event_or_memory_of_their_own() {
    let named = ["one stream", "an event", "memory for each of them"];
    check(&Simulation::new(1), &named, |gpu, repair| {
        let (words, streams) = (gpu.buffer(&[0_u32; 2])?, [gpu.stream()?, gpu.stream()?]);
        let second = if repair == 1 { &streams[0] } else { &streams[1] };
        // SAFETY: the buffer has two words; the race is what the test is for.
        unsafe { add_1::args(&words.slice(..1)?).grid(1).block(1).launch(&streams[0])? };
        if repair == 2 {
            let event = gpu.context().event()?;
            streams[0].record(&event)?;
            second.wait_event(&event)?;
        }
        let word = if repair == 3 { words.slice(1..)? } else { words.slice(..1)? };
        // SAFETY: the buffer has one element.
        unsafe { add_1::args(&word).grid(1).block(1).launch(second)? };
        streams.iter().try_for_each(Stream::synchronize)
    });
}
