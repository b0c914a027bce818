//! Litmus tests of races of threads that meet at a shuffle, and of scopes. As in
//! [`races`](crate::races), form 0 is right, and each other form is reported.

use cuda_std::atomic::{Atomic, Order, Scope};
use cuda_std::prelude::*;
use devcomm::Simulation;

use crate::races::check;

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
