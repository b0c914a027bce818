//! Litmus tests of races of threads that meet at a shuffle, of asynchronous copies, of scopes, and
//! of accesses that others hide. As in [`races`](crate::races), form 0 is right, and each other
//! form is reported.

use cuda_std::atomic::{Atomic, Order, Scope, fence};
use cuda_std::mbarrier::{self, MBarrier};
use cuda_std::prelude::*;
use cuda_std::{async_copy, clock, cluster, tma};
use devcomm::{DevCommRequirements, GinConnectionType, Simulation, TensorMap};
use devcomm_testing::simulated::{run, world};
use devcomm_types::GridConstant;
use nccl_device::DevComm;
use nccl_device::gin::GinBackend;

use crate::races::check;
use crate::tensor::{aligned_shared, row};

/// A thread of each of two blocks stores a number and counts itself; another one of the first block
/// loads the second block's number. Forms, the scope of its loads of the counter: the GPU; the
/// block.
#[kernel]
unsafe fn waits_for_blocks(numbers: *mut u32, count: *mut u32, form: u32) {
    let (block, scope) = (thread::block_idx_x() as usize, [Scope::Gpu, Scope::Cta][form as usize]);
    // SAFETY: a number per block; the races are what the tests are for.
    unsafe {
        if thread::thread_idx_x() == 0 {
            mem::store(numbers.add(block), 7);
            Atomic::from_ptr(count).fetch_add(1, Order::Release, Scope::Gpu);
        } else if block == 0 {
            while Atomic::from_ptr(count).load(Order::Acquire, scope) < 2 {}
            let _ = mem::load(numbers.add(1));
        }
    }
}

#[test]
fn a_load_at_block_scope_races_with_the_counting_of_other_blocks() {
    check(&Simulation::new(1), 2, |gpu, form| {
        let (numbers, count) = (gpu.buffer(&[0_u32; 2])?, gpu.buffer(&[0_u32])?);
        gpu.launch(waits_for_blocks::args(&numbers, &count, form).grid(2).block(2))
    });
}

/// A lane loads what another one stores after a shuffle. Forms: it loads before the shuffle; it
/// loads again after it.
#[kernel]
unsafe fn loads_around_a_shuffle(number: *mut u32, form: u32) {
    let lane = warp::lane_id();
    // SAFETY: the race is what the test is for.
    unsafe {
        if lane == 0 {
            let _ = mem::load(number);
        }
        let _ = warp::shuffle_idx(lane, 0);
        if lane == 0 && form == 1 {
            let _ = mem::load(number);
        }
        if lane == 1 {
            mem::store(number, 7);
        }
    }
}

#[test]
fn a_load_after_a_shuffle_races_with_a_store_after_it() {
    check(&Simulation::new(1), 2, |gpu, form| {
        let number = gpu.buffer(&[0_u32])?;
        gpu.launch(loads_around_a_shuffle::args(&number, form).grid(1).block(32))
    });
}

/// A lane waits for a copy to shared memory, which all lanes load. Forms: after `sync_warp`; after
/// a vote.
#[kernel]
unsafe fn one_lane_waits(map: GridConstant<TensorMap>, form: u32) {
    let tile = aligned_shared();
    // SAFETY: one warp, with shared memory for a row; the race is what the test is for.
    unsafe {
        if warp::lane_id() == 0 {
            let full = MBarrier::at(shared_array![u64; 1]);
            full.init(1);
            mbarrier::fence_init();
            full.arrive_expect_tx(128);
            tma::load_tile(tile, &map, 0, 0, full);
            full.wait(0);
        }
        if form == 0 {
            warp::sync();
        } else {
            let _ = warp::ballot(true);
        }
        let _ = mem::load(tile.cast::<u32>());
    }
}

#[test]
fn a_vote_after_a_wait_shows_no_other_lane_what_a_copy_has_written() {
    check(&Simulation::new(1), 2, |gpu, form| {
        let words = gpu.buffer(&[7_u32; 32])?;
        let launch = one_lane_waits::args(row(gpu, &words)?, form);
        gpu.launch(launch.grid(1).block(32).dynamic_shared(2048))
    });
}

/// Two copies end at one `mbarrier`. Forms: each has a target of its own; both write the same one,
/// in one phase; in two phases, without a wait between them.
#[kernel]
unsafe fn copies_twice(map: GridConstant<TensorMap>, form: u32) {
    let (tile, phases) = (aligned_shared(), if form == 2 { 2 } else { 1 });
    // SAFETY: one thread, with shared memory for two rows; the races are what the test is for.
    unsafe {
        let full = MBarrier::at(shared_array![u64; 1]);
        full.init(1);
        mbarrier::fence_init();
        full.arrive_expect_tx(256 / phases);
        tma::load_tile(tile, &map, 0, 0, full);
        if form == 2 {
            full.arrive_expect_tx(128);
        }
        tma::load_tile(if form == 0 { tile.add(1024) } else { tile }, &map, 0, 0, full);
        full.wait(phases - 1);
    }
}

#[test]
fn copies_that_end_at_one_mbarrier_do_not_order_each_other() {
    check(&Simulation::new(1), 3, |gpu, form| {
        let words = gpu.buffer(&[7_u32; 32])?;
        let launch = copies_twice::args(row(gpu, &words)?, form);
        gpu.launch(launch.grid(1).block(1).dynamic_shared(4096))
    });
}

/// A thread copies 264 times into shared memory before it waits. Forms: each copy has a place of
/// its own; those that are 16 apart have the same one; one has that of the copy 9 before it.
#[kernel]
unsafe fn copies_into_a_ring(source: *const u32, form: u32) {
    let ring = aligned_shared().cast::<u32>();
    // SAFETY: one thread, with shared memory for 264 places; the race is what the test is for.
    unsafe {
        for i in 0..264 {
            let place = match form {
                1 => i % 16,
                2 if i == 259 => i - 9,
                _ => i,
            };
            async_copy::copy_16(ring.add(4 * place), source, true);
        }
        async_copy::commit_group();
        async_copy::wait_groups::<0>();
    }
}

#[test]
fn copies_that_are_any_number_apart_are_told_apart() {
    check(&Simulation::new(1), 3, |gpu, form| {
        let source = gpu.buffer(&[7_u32; 4])?;
        let launch = copies_into_a_ring::args(&source, form);
        gpu.launch(launch.grid(1).block(1).dynamic_shared(8192))
    });
}

/// A thread stores to the same memory by two bulk copies. Forms, between them: it waits for the
/// first one; it waits until that one has read its source.
#[kernel]
unsafe fn stores_in_bulk(out: *mut u32, form: u32) {
    let line = aligned_shared();
    // SAFETY: one thread, with shared memory for a line; the race is what the test is for.
    unsafe {
        (0..4).for_each(|i| mem::store(line.cast::<u32>().add(i), 7));
        tma::fence_async_shared();
        for _ in 0..2 {
            tma::store_bulk(out.cast(), line, 16);
            tma::commit_stores();
            if form == 0 {
                tma::wait_stores::<0>();
            } else {
                tma::wait_stores_read::<0>();
            }
        }
    }
}

#[test]
fn a_bulk_store_is_not_ordered_before_the_threads_next_one() {
    check(&Simulation::new(1), 2, |gpu, form| {
        let out = gpu.buffer(&[0_u32; 4])?;
        gpu.launch(stores_in_bulk::args(&out, form).grid(1).block(1).dynamic_shared(2048))
    });
}

/// Two threads store two bytes of a word, and a third one loads the first byte. Forms: after a
/// barrier; without one.
#[kernel]
unsafe fn loads_a_byte(bytes: *mut u8, form: u32) {
    let i = thread::thread_idx_x() as usize;
    // SAFETY: two bytes; the race is what the test is for.
    unsafe {
        if i < 2 {
            mem::store(bytes.add(i), 1);
        }
        if form == 0 {
            thread::sync_threads();
        }
        if i == 2 {
            let _ = mem::load(bytes);
        }
    }
}

#[test]
fn a_store_to_another_byte_of_a_word_hides_no_earlier_store() {
    check(&Simulation::new(1), 2, |gpu, form| {
        let bytes = gpu.buffer(&[0_u8; 2])?;
        gpu.launch(loads_a_byte::args(&bytes, form).grid(1).block(3))
    });
}

/// Two threads access a word atomically. Forms: only so; the first one also loads it plainly
/// before; it stores to it plainly before.
#[kernel]
unsafe fn is_plain_before(word: *mut u32, form: u32) {
    // SAFETY: the buffer has the word; the races are what the test is for.
    unsafe {
        let atomic = Atomic::from_ptr(word);
        if thread::thread_idx_x() == 0 {
            match form {
                1 => _ = mem::load(word),
                2 => mem::store(word, 1),
                _ => {}
            }
        }
        atomic.store(thread::thread_idx_x(), Order::Relaxed, Scope::Gpu);
    }
}

#[test]
fn an_atomic_access_hides_no_earlier_plain_one() {
    check(&Simulation::new(1), 3, |gpu, form| {
        let word = gpu.buffer(&[0_u32])?;
        gpu.launch(is_plain_before::args(&word, form).grid(1).block(2))
    });
}

/// A thread stores a number and releases a flag, to which a relaxed store follows; a thread of
/// another block waits for the value of that one. Forms, the thread that makes it: the same one;
/// another one.
#[kernel]
unsafe fn stores_again(number: *mut u32, flag: *mut u32, form: u32) {
    let (block, first) = (thread::block_idx_x(), thread::thread_idx_x() == 0);
    // SAFETY: a number and a flag; the race is what the test is for.
    unsafe {
        let flag = Atomic::from_ptr(flag);
        if block == 1 {
            while flag.load(Order::Acquire, Scope::Gpu) < 2 {}
            let _ = mem::load(number);
        } else if first {
            mem::store(number, 7);
            flag.store(1, Order::Release, Scope::Gpu);
        } else if form == 1 {
            while flag.load(Order::Relaxed, Scope::Gpu) < 1 {}
        }
        if block == 0 && first == (form == 0) {
            flag.store(2, Order::Relaxed, Scope::Gpu);
        }
    }
}

#[test]
fn a_release_pattern_goes_on_with_relaxed_stores_of_its_thread() {
    check(&Simulation::new(1), 2, |gpu, form| {
        let (number, flag) = (gpu.buffer(&[0_u32])?, gpu.buffer(&[0_u32])?);
        gpu.launch(stores_again::args(&number, &flag, form).grid(2).block(2))
    });
}

/// A thread gets a number of another block by a relaxed flag and a sequentially consistent fence,
/// after another such fence. Forms, the scope of the second one: the GPU; the block.
#[kernel]
unsafe fn fences_twice(number: *mut u32, flag: *mut u32, form: u32) {
    // SAFETY: a number and a flag; the race is what the test is for.
    unsafe {
        let flag = Atomic::from_ptr(flag);
        if thread::block_idx_x() == 0 {
            fence(Order::SeqCst, Scope::Gpu);
            while flag.load(Order::Relaxed, Scope::Gpu) == 0 {}
            fence(Order::SeqCst, [Scope::Gpu, Scope::Cta][form as usize]);
            let _ = mem::load(number);
        } else {
            mem::store(number, 7);
            fence(Order::SeqCst, Scope::Gpu);
            flag.store(1, Order::Relaxed, Scope::Gpu);
        }
    }
}

#[test]
fn a_fence_of_a_block_acquires_nothing_of_other_blocks() {
    check(&Simulation::new(1), 2, |gpu, form| {
        let (number, flag) = (gpu.buffer(&[0_u32])?, gpu.buffer(&[0_u32])?);
        gpu.launch(fences_twice::args(&number, &flag, form).grid(2).block(1))
    });
}

/// A block stores a number and sets a flag; another one waits for the flag and the relaxed store
/// by a third one after it, and loads the number. Forms: an acquiring load of the flag follows the
/// relaxed ones; no load acquires; an acquiring load of another word follows.
#[kernel]
unsafe fn loads_again(number: *mut u32, flags: *mut u32, form: u32) {
    // SAFETY: one thread per block, two flags; the races are what the test is for.
    unsafe {
        let [flag, next] = [0, 1].map(|at| Atomic::from_ptr(flags.add(at)));
        match thread::block_idx_x() {
            0 => {
                mem::store(number, 7);
                flag.store(1, Order::Release, Scope::Gpu);
            }
            1 => {
                while flag.load(Order::Relaxed, Scope::Gpu) < 1 {}
                next.store(1, Order::Relaxed, Scope::Gpu);
                while flag.load(Order::Relaxed, Scope::Gpu) < 2 {}
                let order = if form == 1 { Order::Relaxed } else { Order::Acquire };
                let _ = if form == 2 { next } else { flag }.load(order, Scope::Gpu);
                let _ = mem::load(number);
            }
            _ => {
                while next.load(Order::Relaxed, Scope::Gpu) < 1 {}
                flag.store(2, Order::Relaxed, Scope::Gpu);
            }
        }
    }
}

#[test]
fn an_acquiring_load_acquires_what_relaxed_loads_of_the_word_have_seen() {
    check(&Simulation::new(1), 3, |gpu, form| {
        let (number, flags) = (gpu.buffer(&[0_u32])?, gpu.buffer(&[0_u32; 2])?);
        gpu.launch(loads_again::args(&number, &flags, form).grid(3).block(1))
    });
}

/// A thread resets a signal, and another one reads the signal's shadow. Forms: after
/// `sync_threads`; without that.
#[kernel(B = gin)]
unsafe fn resets<B: GinBackend>(comm: DevComm, form: u32) {
    let (gin, signal) = (comm.gin::<B>(0), comm.signal(0));
    if thread::thread_idx_x() == 0 {
        gin.reset_signal(signal);
    }
    if form == 0 {
        thread::sync_threads();
    }
    if thread::thread_idx_x() == 1 {
        let _ = gin.signal_shadow(signal);
    }
}

#[test]
fn a_reset_of_a_signal_races_with_a_read_of_its_shadow() {
    check(&Simulation::new(1), 2, |gpu, form| {
        let asked = DevCommRequirements::new().gin_connection(GinConnectionType::Full);
        let comm = gpu.dev_comm(asked.gin_signals(1))?;
        gpu.launch(resets::args(&comm, form).grid(1).block(2))
    });
}

/// Thread 1 stores and returns; the others synchronise, and one of them loads. Forms: thread 1
/// synchronises too; it does not.
#[kernel]
unsafe fn returns_without_the_barrier(number: *mut u32, form: u32) {
    let t = thread::thread_idx_x();
    // SAFETY: the race is what the test is for.
    unsafe {
        if t == 1 {
            mem::store(number, 7);
            if form == 1 {
                return;
            }
        }
        thread::sync_threads();
        if t == 0 {
            let _ = mem::load(number);
        }
    }
}

#[test]
fn a_barrier_orders_nothing_after_a_thread_that_has_returned_before_it() {
    check(&Simulation::new(1), 2, |gpu, form| {
        let number = gpu.buffer(&[0_u32])?;
        gpu.launch(returns_without_the_barrier::args(&number, form).grid(1).block(64))
    });
}

/// Block 0 stores, and block 1 loads after a barrier of their cluster. Forms: block 1 arrives
/// relaxed, first or last; block 0 does.
#[kernel(cluster = 2)]
unsafe fn arrives_relaxed(number: *mut u32, form: u32) {
    let (rank, relaxed) = (cluster::rank(), u32::from(form < 2));
    // SAFETY: the race is what the test is for; all threads of the cluster synchronise.
    unsafe {
        if rank == 0 {
            mem::store(number, 7);
        }
        if rank == form % 2 {
            // The other block arrives first.
            (0..100).for_each(|_| _ = clock::globaltimer());
        }
        match rank == relaxed {
            true => cluster::sync_relaxed(),
            false => cluster::sync(),
        }
        if rank == 1 {
            let _ = mem::load(number);
        }
    }
}

#[test]
fn a_clusters_barrier_orders_what_is_before_an_arrival_that_is_not_relaxed() {
    for (form, races) in [(0, false), (1, false), (2, true), (3, true)] {
        let ran = run(&world(Simulation::new(1)), |gpu| {
            gpu.launch(arrives_relaxed::args(&gpu.buffer(&[0_u32])?, form).grid(2).block(1))
        });
        assert_eq!(ran.is_err(), races, "form {form}: {ran:?}");
    }
}
