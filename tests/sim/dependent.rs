//! Tests of dependent launches: a kernel begins, before the previous one has ended, when every
//! block of that one allows it, and a deadlock's report names the wait for the previous kernel.

use cuda_std::atomic::{Atomic, Order, Scope};
use cuda_std::prelude::*;
use cuda_std::{clock, grid};
use devcomm::Simulation;
use devcomm::sim::{Error, Waiting};
use devcomm_testing::simulated::{Gpu, failure, read, simulate};

/// Block 0 lets the next kernel begin at once, block 1 late, after it has set a flag. If `meets`,
/// both then wait until the next kernel has begun.
#[kernel]
unsafe fn first(flags: *mut u32, meets: bool) {
    // SAFETY: the buffer has two flags.
    unsafe {
        if thread::block_idx_x() == 1 {
            for _ in 0..100 {
                clock::globaltimer();
            }
            Atomic::from_ptr(flags).store(1, Order::Relaxed, Scope::Gpu);
        }
        grid::launch_next();
        let began = Atomic::from_ptr(flags.add(1));
        while meets && began.load(Order::Acquire, Scope::Gpu) == 0 {}
    }
}

/// Sets a flag at its start, and stores the first kernel's flag before and after that one's end.
#[kernel]
unsafe fn second(flags: *mut u32, seen: *mut u32) {
    // SAFETY: the buffers have two flags, and two words.
    unsafe {
        mem::store(seen, Atomic::from_ptr(flags).load(Order::Relaxed, Scope::Gpu));
        Atomic::from_ptr(flags.add(1)).store(1, Order::Release, Scope::Gpu);
        grid::wait_for_previous();
        mem::store(seen.add(1), mem::load(flags));
    }
}

/// Launches both kernels, and returns what the second has seen.
fn launch_both(gpu: &Gpu<'_>, meets: bool) -> Result<Vec<u32>, devcomm::Error> {
    let (flags, seen) = (gpu.buffer(&[0_u32; 2])?, gpu.buffer(&[9_u32; 2])?);
    let stream = gpu.context().stream()?;
    // SAFETY: the buffers have two elements.
    unsafe {
        first::args(&flags, meets).grid(2).block(1).launch(&stream)?;
        second::args(&flags, &seen).grid(1).block(1).dependent().launch(&stream)?;
    }
    stream.synchronize()?;
    read(&seen)
}

#[test]
fn a_dependent_kernel_begins_when_every_block_of_the_previous_one_allows_it() {
    let random = (0..20).flat_map(|seed| {
        let simulation = Simulation::new(1).seed(seed);
        [simulation.clone(), simulation.preempt(true)]
    });
    for simulation in random.chain([Simulation::new(1)]) {
        // Without the overlap the kernels that meet would not end.
        for meets in [false, true] {
            assert_eq!(simulate(simulation.clone(), |gpu| launch_both(gpu, meets)), [[1, 1]]);
        }
    }
}

/// Lets the next kernel begin, and never ends.
#[kernel]
unsafe fn hangs() {
    grid::launch_next();
    if thread::thread_idx_x() == 0 {
        thread::sync_threads();
    } else {
        thread::named_barrier_sync(1, 32);
    }
}

#[test]
fn a_deadlock_names_the_wait_for_the_previous_kernel() {
    for simulation in [Simulation::new(1), Simulation::new(1).seed(3)] {
        let error = failure(simulation, |gpu| {
            let stream = gpu.context().stream()?;
            let words = gpu.buffer(&[0_u32; 2])?;
            // SAFETY: the buffer has two elements; the hang is intended.
            unsafe {
                hangs::args().grid(1).block(32).launch(&stream)?;
                second::args(&words, &words).grid(1).block(1).dependent().launch(&stream)?;
            }
            stream.synchronize()
        });
        let Error::Deadlock(stall) = &*error else { panic!("{error}") };
        assert!(stall.waiters.iter().any(|waiter| waiter.what == Waiting::Previous), "{error}");
        let line = "1 thread waits for grid::wait_for_previous, at tests/sim/dependent.rs";
        assert!(error.to_string().contains(line), "{error}");
    }
}
