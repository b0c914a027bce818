//! Litmus tests of the detection of races: the right form of a pattern passes in every order, and
//! each broken form is reported in the fixed order already, with the lines of both accesses.

use cuda_std::atomic::{Atomic, Order, Scope, fence};
use cuda_std::mbarrier::{self, MBarrier};
use cuda_std::prelude::*;
use cuda_std::vector::Vec16;
use cuda_std::{mem, shared_array, tma, warp};
use devcomm::sim::{Error, Race};
use devcomm::{Buffer, DevCommRequirements, Result, Simulation, TensorMap};
use devcomm_testing::simulated::{Gpu, failure, simulate};
use devcomm_types::GridConstant;
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};

use crate::tensor::{aligned_shared, row};

/// Returns a simulation in the fixed order, and in others.
pub fn orders(base: &Simulation) -> impl Iterator<Item = Simulation> + use<'_> {
    let random = (0..4).map(|seed| base.clone().seed(seed).preempt(seed % 2 == 0).weak(true));
    [base.clone(), base.clone().preempt(true)].into_iter().chain(random)
}

/// Checks that form 0 passes, and that each other form is a race between lines of a `*races.rs`.
#[track_caller]
pub fn check(base: &Simulation, forms: u32, form: impl Fn(&Gpu<'_>, u32) -> Result<()> + Sync) {
    for simulation in orders(base) {
        simulate(simulation, |gpu| form(gpu, 0));
    }
    for wrong in 1..forms {
        let race = race(base.clone(), |gpu| form(gpu, wrong));
        for access in [&race.access, &race.other] {
            let at = access.at.unwrap_or_else(|| panic!("form {wrong}: no line: {race}"));
            assert!(at.file().ends_with("races.rs"), "form {wrong}: {race}");
        }
    }
}

/// Returns the race that the simulator reports.
#[track_caller]
pub fn race(simulation: Simulation, body: impl Fn(&Gpu<'_>) -> Result<()> + Sync) -> Race {
    let error = failure(simulation, body);
    let Error::Race(race) = &*error else { panic!("{error}") };
    Race::clone(race)
}

/// Rank 0 passes a number on by a flag. Forms: release and acquire; a relaxed store; a relaxed
/// load; the scope of the GPU. With fences, around relaxed accesses: both; none before the store;
/// none after the load; one of the block before the store.
#[kernel]
unsafe fn pass(comm: DevComm, words: Window<u32>, by_fences: bool, form: u32) {
    let flag = words.lsa(1).as_ptr().wrapping_add(1);
    let scope = if form == 3 && !by_fences { Scope::Gpu } else { Scope::Sys };
    let order = |order, lacks| if form == lacks || by_fences { Order::Relaxed } else { order };
    // SAFETY: the window has two words; the races are what the tests are for.
    unsafe {
        if comm.lsa_team().rank == 0 {
            words.lsa(1).store(0, 7);
            if by_fences && form != 1 {
                fence(Order::AcqRel, if form == 3 { Scope::Cta } else { Scope::Sys });
            }
            Atomic::from_ptr(flag).store(1, order(Order::Release, 1), scope);
        } else {
            while Atomic::from_ptr(flag).load(order(Order::Acquire, 2), scope) == 0 {}
            if by_fences && form != 2 {
                fence(Order::AcqRel, Scope::Sys);
            }
            assert!(words.local().load(0) == 7 || form > 0);
        }
    }
}

fn check_pass(by_fences: bool) {
    check(&Simulation::new(2), 4, |gpu, form| {
        let (words, comm) = (gpu.window(&[0_u32; 2])?, gpu.dev_comm(DevCommRequirements::new())?);
        gpu.launch(pass::args(&comm, &words, by_fences, form).grid(1).block(1))
    });
}

#[test]
fn a_release_and_an_acquire_whose_scopes_include_both_threads_order() {
    check_pass(false);
}

#[test]
fn fences_order_what_relaxed_accesses_carry() {
    check_pass(true);
}

/// Each block stores a number and counts itself; the last one sums all. Forms: every block fences
/// before it counts; only the last one fences, after it has counted.
#[kernel]
unsafe fn last_block_sums(numbers: *mut u32, count: *mut u32, form: u32) {
    let block = thread::block_idx_x() as usize;
    // SAFETY: a number per block; the races are what the tests are for.
    unsafe {
        mem::store(numbers.add(block), block as u32);
        if form == 0 {
            fence(Order::AcqRel, Scope::Gpu);
        }
        let before = Atomic::from_ptr(count).fetch_add(1, Order::Relaxed, Scope::Gpu);
        if before + 1 == thread::grid_dim_x() {
            fence(Order::AcqRel, Scope::Gpu);
            for i in 0..thread::grid_dim_x() as usize {
                let _ = mem::load(numbers.add(i));
            }
        }
    }
}

#[test]
fn a_counter_of_arrived_blocks_needs_a_fence_of_every_block() {
    check(&Simulation::new(1), 2, |gpu, form| {
        let (numbers, count) = (gpu.buffer(&[0_u32; 4])?, gpu.buffer(&[0_u32])?);
        gpu.launch(last_block_sums::args(&numbers, &count, form).grid(4).block(1))
    });
}

/// Threads hand numbers to their neighbours through shared memory, twice. Forms: barriers; none
/// before the load; none before the next store; `sync_warp` instead.
#[kernel]
unsafe fn rotate(form: u32) {
    let i = thread::thread_idx_x() as usize;
    let row = shared_array![u32; 64];
    // SAFETY: an element per thread; the races are what the tests are for.
    unsafe {
        for round in 0..2 {
            mem::store(row.add(i), round);
            match form {
                1 => {}
                3 => warp::sync(),
                _ => thread::sync_threads(),
            }
            let _ = mem::load(row.add((i + 1) % 64));
            if form != 2 {
                thread::sync_threads();
            }
        }
    }
}

#[test]
fn shared_memory_is_used_again_after_a_barrier_of_all_threads_that_use_it() {
    check(&Simulation::new(1), 4, |gpu, form| gpu.launch(rotate::args(form).grid(1).block(64)));
}

/// Lanes hand numbers to their neighbours. Forms: `sync_warp`; a shuffle, which orders nothing.
#[kernel]
unsafe fn rotate_in_a_warp(words: *mut u32, form: u32) {
    let i = thread::thread_idx_x() as usize;
    // SAFETY: an element per lane; the races are what the tests are for.
    unsafe {
        mem::store(words.add(i), 1);
        if form == 0 {
            warp::sync();
        } else {
            let _ = warp::ballot(true);
        }
        let _ = mem::load(words.add((i + 1) % 32));
    }
}

#[test]
fn lanes_are_ordered_by_sync_warp_and_not_by_a_vote() {
    check(&Simulation::new(1), 2, |gpu, form| {
        let words = gpu.buffer(&[0_u32; 32])?;
        gpu.launch(rotate_in_a_warp::args(&words, form).grid(1).block(32))
    });
}

/// Each thread stores a byte. Forms: its own one; the same one.
#[kernel]
unsafe fn store_bytes(bytes: *mut u8, form: u32) {
    let i = if form == 0 { thread::index_1d() as usize } else { 0 };
    // SAFETY: the buffer has a byte per thread.
    unsafe { mem::store(bytes.add(i), 1) };
}

#[test]
fn neighbouring_bytes_are_different_memory() {
    check(&Simulation::new(1), 2, |gpu, form| {
        let bytes = gpu.buffer(&[0_u8; 64])?;
        gpu.launch(store_bytes::args(&bytes, form).grid(2).block(32))
    });
}

/// Rank 0 sends 16 bytes that are their own flag. Forms: relaxed; a plain load; a plain store.
#[kernel]
unsafe fn send_a_line(comm: DevComm, words: Window<u32>, form: u32) {
    let line = words.lsa(1).as_ptr();
    // SAFETY: the window has a line; the races are what the tests are for.
    unsafe {
        if comm.lsa_team().rank == 0 {
            match form {
                2 => mem::store_vec(line, Vec16::from_bits([1; 4])),
                _ => mem::store_vec_relaxed(line, Vec16::from_bits([1; 4]), Scope::Sys),
            }
        } else {
            while mem::load_vec_relaxed(line, Scope::Sys).to_bits() != [1; 4] {}
            if form == 1 {
                let _ = mem::load(line);
            }
        }
    }
}

#[test]
fn lines_that_are_their_own_flags_need_no_order_but_relaxed_accesses() {
    check(&Simulation::new(2), 3, |gpu, form| {
        let (words, comm) = (gpu.window(&[0_u32; 4])?, gpu.dev_comm(DevCommRequirements::new())?);
        gpu.launch(send_a_line::args(&comm, &words, form).grid(1).block(1))
    });
}

/// Ranks exchange a number by a barrier. Forms: acquire-release; relaxed.
#[kernel]
unsafe fn exchange(comm: DevComm, words: Window<u32>, form: u32) {
    let team = comm.lsa_team();
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    // SAFETY: a word for each rank; the races are what the tests are for.
    unsafe {
        words.lsa(1 - team.rank).store(team.rank as usize, 7);
        barrier.sync(if form == 0 { MemoryOrder::AcqRel } else { MemoryOrder::Relaxed });
        let _ = words.local().load(1 - team.rank as usize);
    }
}

#[test]
fn a_barrier_of_ranks_orders_by_its_memory_order() {
    check(&Simulation::new(2), 2, |gpu, form| {
        let words = gpu.window(&[0_u32; 2])?;
        let comm = gpu.dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
        gpu.launch(exchange::args(&comm, &words, form).grid(1).block(1))
    });
}

/// Adds 1 to a word.
///
/// # Safety
///
/// `word` is valid for loads and stores.
#[kernel]
pub unsafe fn add_1(word: *mut u32) {
    // SAFETY: the buffer has one element; the races are what the tests are for.
    unsafe { mem::store(word, mem::load(word) + 1) };
}

#[test]
fn streams_are_ordered_by_events_and_by_host_calls_that_wait() {
    for form in 0..3 {
        let run = |gpu: &Gpu<'_>| {
            let (word, one, two) = (gpu.buffer(&[0_u32])?, gpu.stream()?, gpu.stream()?);
            // SAFETY: the buffer has a word; the races are what the test is for.
            unsafe { add_1::args(&word).grid(1).block(1).launch(&one)? };
            match form {
                0 => {
                    let event = gpu.context().event()?;
                    one.record(&event)?;
                    two.wait_event(&event)?;
                }
                1 => one.synchronize()?,
                _ => {}
            }
            // SAFETY: the buffer has one element; the races are what the tests are for.
            unsafe { add_1::args(&word).grid(1).block(1).launch(&two)? };
            one.synchronize()?;
            two.synchronize()
        };
        for simulation in orders(&Simulation::new(1)) {
            if form < 2 {
                simulate(simulation, run);
            } else {
                let race = race(simulation, run);
                assert_eq!([&race.access, &race.other].map(|a| &*a.operation), ["add_1"; 2]);
            }
        }
    }
}

#[test]
fn memory_that_is_allocated_again_has_no_past() {
    simulate(Simulation::new(1), |gpu| {
        for _ in 0..20 {
            let (word, stream) = (gpu.buffer(&[0_u32])?, gpu.stream()?);
            // SAFETY: the buffer has a word.
            unsafe { add_1::args(&word).grid(1).block(1).launch(&stream)? };
            stream.synchronize()?;
        }
        Ok(())
    });
}

#[test]
fn a_report_names_memory_both_accesses_and_what_is_missing() {
    let race = race(Simulation::new(1), |gpu| {
        let bytes = gpu.buffer(&[0_u8; 64])?;
        gpu.launch(store_bytes::args(&bytes, 1).grid(2).block(32))
    });
    let text = race.to_string();
    for part in [
        "a race on element 0 of `bytes` (buffer ",
        " of rank 0): rank 0 block 0 thread 1 of store_bytes stores (tests/sim/races.rs:",
        ", and rank 0 block 0 thread 0 of store_bytes stores (tests/sim/races.rs:",
        "`sync_warp`",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

/// A kernel parameter that has a pointer in a field.
#[derive(Clone, Copy, KernelParam)]
#[repr(C)]
struct Parts {
    factor: f32,
    sums: *mut f32,
}

/// All blocks store the third element.
#[kernel]
unsafe fn store_third(parts: Parts) {
    // SAFETY: the part has the element.
    unsafe { mem::store(parts.sums.add(2), parts.factor) };
}

#[test]
fn a_report_counts_elements_from_the_field_of_the_argument_that_refers_to_them() {
    let race = race(Simulation::new(1), |gpu| {
        let sums = gpu.buffer(&[0_f32; 64])?;
        gpu.launch(
            store_third::args(PartsArgs { factor: 1.0, sums: &sums.slice(10..)? }).grid(2).block(1),
        )
    });
    assert!(race.memory.starts_with("element 2 of `parts.sums` (buffer "), "{race}");
}

/// Form 0: all ranks store to rank 0's part. Form 1: each lane stores to a shared array, and loads
/// its neighbour's element without a barrier.
#[kernel]
unsafe fn store_to_first(out: Window<u64>, form: u32) {
    if form == 1 {
        let shared = shared_array![u16; 64];
        let i = thread::thread_idx_x() as usize;
        // SAFETY: the array has an element per lane.
        unsafe {
            mem::store(shared.add(i), 1);
            mem::load(shared.add((i + 1) % 32));
        }
    } else {
        // SAFETY: the window has the element.
        unsafe { out.lsa(0).store(5, 1) };
    }
}

#[test]
fn a_report_names_a_peers_part_and_shared_memory() {
    let race_of = |form| {
        race(Simulation::new(2), move |gpu| {
            gpu.launch(store_to_first::args(&gpu.window(&[0_u64; 6])?, form).grid(1).block(32))
        })
    };
    let part = race_of(0).memory;
    assert!(part.starts_with("element 5 of `out` (window ") && part.ends_with("rank 0's part)"));
    let shared = race_of(1).memory;
    let array = " of the shared array at tests/sim/races.rs:";
    assert!(shared.contains(array) && shared.ends_with(" (128 bytes)"), "{shared}");
}

/// Thread 0 writes a matrix and releases it, thread 1 acquires it and loads it by TMA after
/// `fence.proxy.async.global`. Forms: right; no fence; the fence of shared memory.
#[kernel]
unsafe fn load_written_tile(
    map: GridConstant<TensorMap>,
    words: *mut u32,
    flag: *mut u32,
    form: u32,
) {
    // SAFETY: two threads; a tile of one row in each memory.
    unsafe {
        let full = MBarrier::at(shared_array![u64; 1]);
        if thread::thread_idx_x() == 0 {
            mem::store(words, 1);
            mem::store_ordered(flag, 1, Order::Release, Scope::Gpu);
            return;
        }
        while mem::load_ordered(flag, Order::Acquire, Scope::Gpu) == 0 {}
        match form {
            0 => tma::fence_async_global(),
            2 => tma::fence_async_shared(),
            _ => {}
        }
        full.init(1);
        mbarrier::fence_init();
        full.arrive_expect_tx(128);
        tma::load_tile(aligned_shared(), &map, 0, 0, full);
        full.wait(0);
    }
}

#[test]
fn what_tma_reads_needs_the_proxy_fence_of_its_memory() {
    check(&Simulation::new(1), 3, |gpu, form| {
        let (words, flag) = (gpu.buffer(&[0_u32; 32])?, gpu.buffer(&[0_u32])?);
        let load = load_written_tile::args(row(gpu, &words)?, &words, &flag, form);
        gpu.launch(load.grid(1).block(2).dynamic_shared(2048))
    });
}

#[test]
fn two_launches_that_share_a_workspace_and_overlap_are_reported_as_such() {
    let race = race(Simulation::new(1), |gpu| {
        let (state, streams) = (gpu.buffer(&[0_u32])?, [gpu.stream()?, gpu.stream()?]);
        for stream in &streams {
            // SAFETY: the buffer has a word; the race is what the test is for.
            unsafe { add_1::args(&state).grid(1).block(1).launch(stream)? };
        }
        streams.iter().try_for_each(devcomm::Stream::synchronize)
    });
    let text = race.to_string();
    assert!(text.matches("of add_1 ").count() == 2 && text.contains("overlap"), "{text}");
}

/// Thread 0 changes a shared word that the others load.
#[kernel]
unsafe fn change_shared() {
    let word = shared_array![u32; 1];
    let store = |value| {
        // SAFETY: the array has the word, of which all accesses are atomic.
        unsafe { mem::store_ordered(word, value, Order::Relaxed, Scope::Cta) };
    };
    if thread::thread_idx_x() == 0 {
        store(0);
    }
    thread::sync_threads();
    if thread::thread_idx_x() == 0 {
        (1..4).for_each(store);
    } else {
        // SAFETY: the word is in the block's shared memory.
        assert!(unsafe { mem::load_ordered(word, Order::Relaxed, Scope::Cta) } < 4);
    }
}

#[test]
fn an_old_value_of_shared_memory_is_not_one_that_nothing_has_written() {
    for seed in 0..20 {
        let simulation = Simulation::new(1).seed(seed).preempt(true).weak(true);
        simulate(simulation, |gpu| gpu.launch(change_shared::args().grid(1).block(8)));
    }
}

/// Thread 0 loads both bytes, one after the other, and thread 1 stores the first. Forms: a barrier
/// between them; none.
#[kernel]
unsafe fn load_two_bytes(bytes: *mut u8, form: u32) {
    // SAFETY: two bytes; the race is what the test is for.
    unsafe {
        if thread::thread_idx_x() == 0 {
            assert_eq!((mem::load(bytes), mem::load(bytes.add(1))), (7, 7));
        }
        if form == 0 {
            thread::sync_threads();
        }
        if thread::thread_idx_x() == 1 {
            mem::store(bytes, 8);
        }
    }
}

#[test]
fn a_load_of_another_byte_of_the_word_hides_no_earlier_one() {
    check(&Simulation::new(1), 2, |gpu, form| {
        let bytes = gpu.buffer(&[7_u8; 2])?;
        gpu.launch(load_two_bytes::args(&bytes, form).grid(1).block(2))
    });
}
