//! Races between threads whose atomic accesses, releases and fences have different scopes, or are
//! those of several threads on one word.

use cuda_std::atomic::{Atomic, Order, Scope, fence};
use cuda_std::prelude::*;
use cuda_std::{mem, warp};
use devcomm::{DevCommRequirements, Simulation};
use nccl_device::{DevComm, Window};

use crate::races::check;

/// Blocks store numbers and count themselves; the last one resets the count by a relaxed store, for
/// which the others wait. Forms, a count: releases and acquires; acquires only.
#[kernel]
unsafe fn meets_by_a_count(numbers: *mut u32, count: *mut u32, form: u32) {
    let (me, blocks) = (thread::block_idx_x() as usize, thread::grid_dim_x());
    let order = [Order::AcqRel, Order::Acquire][form as usize];
    // SAFETY: a number per block, and a count; the race is what the test is for.
    unsafe {
        mem::store(numbers.add(me), 7);
        let count = Atomic::from_ptr(count);
        if count.fetch_add(1, order, Scope::Gpu) + 1 == blocks {
            count.store(0, Order::Relaxed, Scope::Gpu);
        } else {
            while count.load(Order::Acquire, Scope::Gpu) != 0 {}
        }
        for other in 0..blocks as usize {
            let _ = mem::load(numbers.add(other));
        }
    }
}

#[test]
fn a_relaxed_store_carries_what_its_threads_count_of_several_has_released() {
    check(&Simulation::new(1), 2, |gpu, form| {
        let (numbers, count) = (gpu.buffer(&[0_u32; 3])?, gpu.buffer(&[0_u32])?);
        gpu.launch(meets_by_a_count::args(&numbers, &count, form).grid(3).block(1))
    });
}

/// Two blocks count themselves; the first one waits for both by relaxed loads, fences, and loads
/// the other one's number. Forms, the scope of the fence: the GPU; the block.
#[kernel]
unsafe fn fences_after_a_count(number: *mut u32, count: *mut u32, form: u32) {
    let me = thread::block_idx_x();
    // SAFETY: a number and a count; the race is what the test is for.
    unsafe {
        if me == 1 {
            mem::store(number, 7);
        }
        let count = Atomic::from_ptr(count);
        count.fetch_add(1, Order::Release, Scope::Gpu);
        if me == 0 {
            while count.load(Order::Relaxed, Scope::Gpu) < 2 {}
            fence(Order::AcqRel, [Scope::Gpu, Scope::Cta][form as usize]);
            let _ = mem::load(number);
        }
    }
}

#[test]
fn a_fence_of_a_block_acquires_nothing_of_a_count_by_several_blocks() {
    check(&Simulation::new(1), 2, |gpu, form| {
        let (number, count) = (gpu.buffer(&[0_u32])?, gpu.buffer(&[0_u32])?);
        gpu.launch(fences_after_a_count::args(&number, &count, form).grid(2).block(1))
    });
}

/// Three threads fence, each after a store and before a load of the word that the next one stores
/// to: a load of the old value tells that its thread's fence comes first. Block 1 stores a number
/// before its fence; the fence of block 0's thread 0 is next, and thread 1, whose fence is the last
/// one, loads the number. Forms, the last fence: sequentially consistent; no more than `AcqRel`.
#[kernel]
unsafe fn fences_of_two_scopes(number: *mut u32, words: *mut u32, form: u32) {
    let (block, thread) = (thread::block_idx_x(), thread::thread_idx_x());
    // SAFETY: a number and three words; the race is what the test is for.
    unsafe {
        let [middle, last, told] = [0, 1, 2].map(|at| Atomic::from_ptr(words.add(at)));
        if block == 1 && thread == 0 {
            mem::store(number, 7);
            fence(Order::SeqCst, Scope::Gpu);
            let is_late = middle.load(Order::Relaxed, Scope::Gpu);
            told.store(1 + is_late, Order::Relaxed, Scope::Gpu);
        }
        if block == 1 {
            return;
        }
        let (mut first, mut is_late) = (0, 0);
        // In the fixed order the fences are in this order.
        (0..16 * (1 + thread)).for_each(|_| thread::nanosleep(1));
        if thread == 0 {
            middle.store(1, Order::Relaxed, Scope::Gpu);
            fence(Order::SeqCst, Scope::Gpu);
            is_late = last.load(Order::Relaxed, Scope::Cta);
        } else {
            while first == 0 {
                first = told.load(Order::Relaxed, Scope::Gpu);
            }
            last.store(1, Order::Relaxed, Scope::Cta);
            fence([Order::SeqCst, Order::AcqRel][form as usize], Scope::Cta);
        }
        is_late = warp::warp_shuffle_idx(3, is_late, 0, 32).0;
        if first == 1 && is_late == 0 {
            let _ = mem::load(number);
        }
    }
}

#[test]
fn a_fence_of_a_block_acquires_what_a_wider_one_of_the_block_has_acquired() {
    check(&Simulation::new(1), 2, |gpu, form| {
        let (number, words) = (gpu.buffer(&[0_u32])?, gpu.buffer(&[0_u32; 3])?);
        gpu.launch(fences_of_two_scopes::args(&number, &words, form).grid(2).block(2))
    });
}

/// Two blocks add to a count, and a third one waits for them and loads the count. Forms, the blocks
/// that it waits for: both; the second one.
#[kernel]
unsafe fn adds_beside_another(count: *mut u32, done: *mut u32, form: u32) {
    let block = thread::block_idx_x();
    // SAFETY: two counts; the race is what the test is for.
    unsafe {
        let done = Atomic::from_ptr(done);
        if block == 2 {
            while done.load(Order::Acquire, Scope::Gpu) < 2 - form {}
            let _ = mem::load(count);
            return;
        }
        Atomic::from_ptr(count).fetch_add(1, Order::Relaxed, Scope::Gpu);
        if block == 1 || form == 0 {
            done.fetch_add(1, Order::Release, Scope::Gpu);
        }
    }
}

#[test]
fn an_atomic_access_hides_no_other_that_nothing_orders_before_it() {
    check(&Simulation::new(1), 2, |gpu, form| {
        let (count, done) = (gpu.buffer(&[0_u32])?, gpu.buffer(&[0_u32])?);
        gpu.launch(adds_beside_another::args(&count, &done, form).grid(3).block(1))
    });
}

/// Rank 0 stores to a word twice, the second time with the scope of the system, and rank 1 loads
/// the word. Forms, the scope of the first store: the system; the GPU.
#[kernel]
unsafe fn stores_with_two_scopes(comm: DevComm, word: Window<u32>, form: u32) {
    // SAFETY: the window has a word; the race is what the test is for.
    unsafe {
        let word = Atomic::from_ptr(word.lsa(0).as_ptr());
        if comm.rank() == 0 {
            word.store(1, Order::Relaxed, [Scope::Sys, Scope::Gpu][form as usize]);
            word.store(2, Order::Relaxed, Scope::Sys);
        } else {
            while word.load(Order::Relaxed, Scope::Sys) < 2 {}
        }
    }
}

#[test]
fn an_atomic_access_hides_no_earlier_one_of_a_narrower_scope() {
    check(&Simulation::new(2), 2, |gpu, form| {
        let (word, comm) = (gpu.window(&[0_u32])?, gpu.dev_comm(DevCommRequirements::new())?);
        gpu.launch(stores_with_two_scopes::args(&comm, &word, form).grid(1).block(1))
    });
}
