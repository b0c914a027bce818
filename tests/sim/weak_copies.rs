//! Tests of copies in weak memory. A kernel's copy may read its source and write its target at any
//! time until a thread's wait for the copy returns; a stream's copy at some time after it begins.

use cuda_std::atomic::{Atomic, Order, Scope};
use cuda_std::mbarrier::{self, MBarrier};
use cuda_std::prelude::*;
use cuda_std::{async_copy, mem, tma};
use devcomm::{Simulation, TensorMap};
use devcomm_testing::simulated::{read, simulate};
use devcomm_types::GridConstant;

use crate::nccl_threads::{OK, cuda, run_ranks};
use crate::tensor::{aligned_shared, row};

/// Loads a row by TMA and stores it by TMA, in one thread. The thread reads each target twice:
/// before the wait, by a dereference that the simulator does not see, and after the wait.
#[kernel]
unsafe fn looks_early(
    from: GridConstant<TensorMap>,
    to: GridConstant<TensorMap>,
    target: *mut u32,
    out: *mut u32,
) {
    // SAFETY: the block is one thread, with shared memory for a row; `out` has four words.
    unsafe {
        let (tile, full) = (aligned_shared(), MBarrier::at(shared_array![u64; 1]));
        let first = tile.cast::<u32>();
        mem::store(first, 1);
        tma::fence_async_shared();
        full.init(1);
        mbarrier::fence_init();
        full.arrive_expect_tx(128);
        tma::load_tile(tile, &from, 0, 0, full);
        mem::store(out, first.read_volatile());
        full.wait(0);
        mem::store(out.add(1), mem::load(first));
        tma::store_tile(&to, 0, 0, tile);
        tma::commit_stores();
        mem::store(out.add(2), target.read_volatile());
        tma::wait_stores::<0>();
        mem::store(out.add(3), mem::load(target));
    }
}

#[test]
fn with_weak_memory_copies_of_kernels_land_when_a_thread_waits_or_before() {
    let seen = |simulation: Simulation| -> [u32; 4] {
        let outs = simulate(simulation, |gpu| {
            let (from, target) = (gpu.buffer(&[7_u32; 32])?, gpu.buffer(&[1_u32; 32])?);
            let out = gpu.buffer(&[0_u32; 4])?;
            let (from, to) = (row(gpu, &from)?, row(gpu, &target)?);
            let launch = looks_early::args(from, to, &target, &out).grid(1).block(1);
            gpu.launch(launch.dynamic_shared(2048))?;
            read(&out)
        });
        outs[0].clone().try_into().expect("four words")
    };
    assert_eq!(seen(Simulation::new(1)), [7; 4]);
    let weak: Vec<_> = (0..16).map(|seed| seen(Simulation::new(1).seed(seed).weak(true))).collect();
    assert!(weak.iter().all(|[_, loaded, _, stored]| [*loaded, *stored] == [7; 2]), "{weak:?}");
    for early in [0, 2] {
        let seen = |value| weak.iter().any(|words| words[early] == value);
        assert!(seen(1) && seen(7), "{weak:?}");
    }
}

/// Copies a row of ones by one of [`OPERATIONS`], and overwrites it with twos: before the wait for
/// the source if `early`, else after it. The simulator does not see these stores, which would race.
#[kernel]
unsafe fn overwrites_early(
    operation: u32,
    early: u32,
    from: GridConstant<TensorMap>,
    to: GridConstant<TensorMap>,
    source: *mut f32,
    target: *mut f32,
) {
    // SAFETY: one thread, with shared memory for a row; the mistake is what the test is for.
    unsafe {
        let (tile, full) = (aligned_shared(), MBarrier::at(shared_array![u64; 1]));
        let (words, to_shared) = (tile.cast::<f32>(), operation < 2);
        full.init(1);
        mbarrier::fence_init();
        if !to_shared {
            (0..32).for_each(|i| mem::store(words.add(i), 1.0));
            tma::fence_async_shared();
        }
        match operation {
            0 => {
                full.arrive_expect_tx(128);
                tma::load_tile(tile, &from, 0, 0, full);
            }
            1 => {
                (0..8).for_each(|i| async_copy::copy_16(words.add(4 * i), source.add(4 * i), true))
            }
            2 => tma::store_tile(&to, 0, 0, tile),
            3 => tma::reduce_add_tile(&to, 0, 0, tile),
            4 => tma::store_bulk(target.cast(), tile, 128),
            _ => tma::store_words(target.cast(), tile, 128),
        }
        async_copy::commit_group();
        tma::commit_stores();
        let overwritten = if to_shared { source } else { words };
        let overwrite = || (0..32).for_each(|i| overwritten.add(i).write_volatile(2.0));
        if early == 1 {
            overwrite();
        }
        match operation {
            0 => full.wait(0),
            1 => async_copy::wait_groups::<0>(),
            _ => tma::wait_stores_read::<0>(),
        }
        if early == 0 {
            overwrite();
        }
        tma::wait_stores::<0>();
        if to_shared {
            (0..32).for_each(|i| mem::store(target.add(i), mem::load(words.add(i))));
        }
    }
}

const OPERATIONS: [&str; 6] =
    ["load_tile", "copy_16", "store_tile", "reduce_add_tile", "store_bulk", "store_words"];

#[test]
fn with_weak_memory_a_source_that_is_overwritten_before_the_wait_gives_wrong_data() {
    let copied = |simulation: Simulation, operation, early| {
        let outs = simulate(simulation, |gpu| {
            let (source, target) = (gpu.buffer(&[1_f32; 32])?, gpu.buffer(&[0_f32; 32])?);
            let (from, to) = (row(gpu, &source)?, row(gpu, &target)?);
            let launch = overwrites_early::args(operation, early, from, to, &source, &target);
            gpu.launch(launch.grid(1).block(1).dynamic_shared(2048))?;
            read(&target)
        });
        outs[0].clone()
    };
    for (operation, name) in (0..).zip(OPERATIONS) {
        let weak = |seed| Simulation::new(1).seed(seed).weak(true);
        let seeds = |early| (0..8).map(move |seed| copied(weak(seed), operation, early));
        assert_eq!(copied(Simulation::new(1), operation, 1), [1.0; 32], "{name}");
        assert!(seeds(0).all(|row| row == [1.0; 32]), "{name}");
        let early: Vec<_> = seeds(1).collect();
        // Each piece of 16 bytes has been read before or after the stores.
        let pieces = || early.iter().flat_map(|row| row.chunks(4));
        assert!(pieces().all(|piece| piece == [1.0; 4] || piece == [2.0; 4]), "{name}: {early:?}");
        let is_torn = |row: &Vec<f32>| row.contains(&1.0) && row.contains(&2.0);
        assert!(early.iter().any(is_torn), "{name}: {early:?}");
        assert!(seeds(1).eq(early), "{name}: not determined by the seed");
    }
}

/// Stores two groups and overwrites both sources when the first one has been read.
#[kernel]
unsafe fn waits_for_the_first_group(targets: *mut f32) {
    // SAFETY: one thread, with shared memory for two rows; the mistake is what the test is for.
    unsafe {
        let words = aligned_shared().cast::<f32>();
        (0..64).for_each(|i| mem::store(words.add(i), 1.0));
        tma::fence_async_shared();
        for first in [0, 32] {
            tma::store_bulk(targets.add(first).cast(), words.add(first).cast(), 128);
            tma::commit_stores();
        }
        tma::wait_stores_read::<1>();
        (0..64).for_each(|i| words.add(i).write_volatile(2.0));
        tma::wait_stores::<0>();
    }
}

#[test]
fn with_weak_memory_a_wait_for_all_groups_but_the_last_leaves_the_last_unread() {
    let stored = |seed| -> Vec<f32> {
        let outs = simulate(Simulation::new(1).seed(seed).weak(true), |gpu| {
            let targets = gpu.buffer(&[0_f32; 64])?;
            let launch = waits_for_the_first_group::args(&targets).grid(1).block(1);
            gpu.launch(launch.dynamic_shared(2048))?;
            read(&targets)
        });
        outs[0].clone()
    };
    let stored: Vec<_> = (0..8).map(stored).collect();
    assert!(stored.iter().all(|words| words[..32] == [1.0; 32]), "{stored:?}");
    assert!(stored.iter().any(|words| words[32..].contains(&2.0)), "{stored:?}");
}

/// Sends words between two blocks by bulk copies, for which a block waits only after it has
/// received the other block's words.
#[kernel]
unsafe fn send_words(inboxes: *mut u32, answers: *mut u32) {
    let (me, other) = (thread::block_idx_x() as usize, 1 - thread::block_idx_x() as usize);
    // SAFETY: a block has one thread and memory for a row; the buffers have four words per block.
    unsafe {
        let words = aligned_shared().cast::<u32>();
        (0..4).for_each(|i| mem::store(words.add(i), 7 + me as u32));
        tma::fence_async_shared();
        tma::store_words(inboxes.add(4 * other), words.cast(), 16);
        tma::commit_stores();
        for i in 0..4 {
            let word = Atomic::from_ptr(inboxes.add(4 * me + i));
            while word.load(Order::Relaxed, Scope::Sys) == 0 {}
            mem::store(answers.add(4 * me + i), word.load(Order::Relaxed, Scope::Sys));
        }
        tma::wait_stores::<0>();
    }
}

#[test]
fn with_weak_memory_words_of_a_bulk_copy_arrive_although_nobody_waits_for_it() {
    for seed in 0..16 {
        let simulation = Simulation::new(1).seed(seed).weak(true);
        let simulation = if seed % 2 == 0 { simulation.pct(3) } else { simulation };
        let outs = simulate(simulation, |gpu| {
            let (inboxes, answers) = (gpu.buffer(&[0_u32; 8])?, gpu.buffer(&[0_u32; 8])?);
            let launch = send_words::args(&inboxes, &answers).grid(2).block(1);
            gpu.launch(launch.dynamic_shared(2048))?;
            read(&answers)
        });
        assert_eq!(outs[0], [8, 8, 8, 8, 7, 7, 7, 7], "seed {seed}");
    }
}

#[test]
fn with_weak_memory_a_copy_in_a_stream_lands_some_time_after_it_has_begun() {
    let seen = |simulation: Simulation| {
        let values = run_ranks(simulation, |thread| {
            // `late` is the target of the copy. The memset of `soon`, on another stream, only gives
            // a time at which the copy may not have ended.
            let (late, soon) = (thread.pinned(4), thread.pinned(4));
            let [a, b] = [(); 2].map(|()| thread.stream());
            let source = thread.filled(&[7_u32]);
            // SAFETY: the memory is pinned and has four bytes.
            unsafe { late.cast::<u32>().write_volatile(1) };
            let from = source.ptr() as u64;
            assert_eq!(cuda!(cuMemcpyDtoDAsync_v2(late as u64, from, 4, a.cast())), OK);
            assert_eq!(cuda!(cuMemsetD32Async(soon as u64, 2, 1, b.cast())), OK);
            [b, a].map(|stream| {
                thread.synchronize(stream);
                // SAFETY: the memory is pinned and has four bytes.
                unsafe { late.cast::<u32>().read_volatile() }
            })
        });
        values[0]
    };
    assert_eq!(seen(Simulation::new(1)), [7, 7]);
    let weak: Vec<_> = (0..16).map(|seed| seen(Simulation::new(1).seed(seed).weak(true))).collect();
    assert!(weak.iter().all(|[_, end]| *end == 7), "{weak:?}");
    assert!([1, 7].iter().all(|value| weak.iter().any(|[early, _]| early == value)), "{weak:?}");
}
