//! Tests of the checks of asynchronous operations: `mbarrier`s, copies by TMA, `wgmma`.

use cuda_std::mbarrier::{self, MBarrier};
use cuda_std::prelude::*;
use cuda_std::wgmma::{self, Tile};
use cuda_std::{mem, tma};
use devcomm::sim::{Error, Waiting};
use devcomm::{Result, Simulation, TensorMap};
use devcomm_testing::simulated::{Gpu, failure, simulate};
use devcomm_types::GridConstant;

use crate::tensor::{aligned_shared, row};

/// Checks that form 0 passes in several orders, and that the simulator reports each further form as
/// misuse, with its text in `wrong` and a line of this file.
#[track_caller]
fn check(wrong: &[&str], form: impl Fn(&Gpu<'_>, u32) -> Result<()> + Sync) {
    let orders = (0..4).map(|seed| Simulation::new(1).seed(seed).preempt(seed % 2 == 0));
    for simulation in orders.chain([Simulation::new(1)]) {
        simulate(simulation, |gpu| form(gpu, 0));
    }
    for (number, want) in (1..).zip(wrong) {
        let error = failure(Simulation::new(1), |gpu| form(gpu, number));
        let text = error.to_string();
        assert!(matches!(*error, Error::Misuse { .. }), "form {number}: {text}");
        assert!(text.contains(want), "form {number}: {text}");
        assert!(text.contains("asynchronous.rs:"), "form {number}: {text}");
    }
}

/// All threads wait for the first one. Forms: right; no initialisation; no barrier after it.
#[kernel]
unsafe fn gate(form: u32) {
    let t = thread::thread_idx_x();
    // SAFETY: only the barrier uses the word; the mistakes are what the test is for.
    unsafe {
        let gate = MBarrier::at(shared_array![u64; 1]);
        if t == 0 && form != 1 {
            gate.init(1);
        }
        if form != 2 {
            thread::sync_threads();
        }
        if t == 0 {
            gate.arrive();
        }
        gate.wait(0);
    }
}

#[test]
fn an_mbarrier_is_initialised_before_all_its_uses() {
    let missing = " (8 bytes), which nothing has";
    let unordered = "which thread 0 initialises (tests/sim/asynchronous.rs:";
    check(&[missing, unordered], |gpu, form| gpu.launch(gate::args(form).grid(1).block(64)));
}

/// A thread loads a row by TMA. Forms: right; no `fence_init`; no wait.
#[kernel]
unsafe fn load_row(map: GridConstant<TensorMap>, form: u32) {
    // SAFETY: one thread, with shared memory for a row; the mistakes are what the test is for.
    unsafe {
        let full = MBarrier::at(shared_array![u64; 1]);
        full.init(1);
        if form != 1 {
            mbarrier::fence_init();
        }
        full.arrive_expect_tx(128);
        tma::load_tile(aligned_shared(), &map, 0, 0, full);
        if form != 2 {
            full.wait(0);
        }
    }
}

#[test]
fn a_copy_finds_its_mbarrier_and_is_waited_for() {
    let unfenced = "`mbarrier::fence_init` after its `init` (tests/sim/asynchronous.rs:";
    let in_flight = "its block ends while a copy may still write to its shared memory";
    check(&[unfenced, in_flight], |gpu, form| {
        let words = gpu.buffer(&[7_u32; 32])?;
        gpu.launch(load_row::args(row(gpu, &words)?, form).grid(1).block(1).dynamic_shared(2048))
    });
}

/// A warpgroup multiplies twice. Forms: right; no fence before the first product; no fence before
/// the second one, whose sums have been in registers.
#[kernel(arch = "sm_90a")]
unsafe fn multiplies_twice(form: u32) {
    let tile = aligned_shared();
    // SAFETY: one warpgroup, with shared memory for the tile; the mistakes are the test's.
    unsafe {
        for i in (thread::thread_idx_x()..64 * 32).step_by(128) {
            mem::store(tile.cast::<u32>().add(i as usize), 0);
        }
        tma::fence_async_shared();
        thread::sync_threads();
        let (tile, mut sums) = (Tile::<bf16>::at(tile), [0_f32; 4]);
        for product in 1..=2 {
            wgmma::fence_operand(&mut sums);
            if product != form {
                wgmma::fence();
            }
            wgmma::multiply(&mut sums, tile, tile, true);
            wgmma::commit_group();
            wgmma::wait_groups::<0>();
            wgmma::fence_operand(&mut sums);
            sums[0] += 1.0;
        }
    }
}

#[test]
fn products_are_fenced_from_the_registers() {
    let unfenced = "`wgmma::fence` before it is missing";
    check(&[unfenced, unfenced], |gpu, form| {
        gpu.launch(multiplies_twice::args(form).grid(1).block(128).dynamic_shared(64 * 128 + 1024))
    });
}

/// The first thread waits for a phase that lacks two arrivals and the bytes of a copy.
#[kernel]
unsafe fn waits_for_a_phase() {
    // SAFETY: only the barriers use the words.
    unsafe {
        let barriers = shared_array![u64; 2];
        let full = MBarrier::at(barriers.add(1));
        if thread::thread_idx_x() == 0 {
            full.init(3);
            full.arrive_expect_tx(128);
            full.wait(0);
        }
    }
}

#[test]
fn a_wait_for_a_phase_says_what_the_phase_lacks() {
    let error =
        failure(Simulation::new(1), |gpu| gpu.launch(waits_for_a_phase::args().grid(1).block(32)));
    let Error::Deadlock(stall) = &*error else { panic!("{error}") };
    assert!(matches!(stall.waiters[..], [ref waiter] if waiter.threads == 1), "{error}");
    let Waiting::Phase { memory, parity, arrivals, bytes } = &stall.waiters[0].what else {
        panic!("{error}")
    };
    assert!(memory.starts_with("byte 8 of the shared array at tests/sim/asynchronous.rs:"));
    assert_eq!((*parity, *arrivals, *bytes), (0, 2, 128));
    let text = error.to_string();
    for part in [
        "the phase of parity 0 of the mbarrier at byte 8 of the shared array at tests/sim/",
        " (16 bytes), which lacks 2 arrivals and 128 bytes, at tests/sim/asynchronous.rs:",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

/// Waits for the phase with parity 0 when it is dropped.
struct WaitOnDrop(MBarrier);

impl Drop for WaitOnDrop {
    fn drop(&mut self) {
        self.0.wait(0);
        while !self.0.try_wait(0) {}
    }
}

#[kernel]
unsafe fn panics_before_its_waits() {
    // SAFETY: only the barrier uses the word.
    let barrier = unsafe { MBarrier::at(shared_array![u64; 1]) };
    // SAFETY: the block is one thread.
    unsafe { barrier.init(1) };
    let _waits = WaitOnDrop(barrier);
    panic!("the cause");
}

#[test]
fn waits_for_an_mbarrier_end_while_a_kernel_panics() {
    let error = failure(Simulation::new(1), |gpu| {
        gpu.launch(panics_before_its_waits::args().grid(1).block(1))
    });
    assert!(matches!(*error, Error::Panic { .. }), "{error}");
}

/// Raises the registers of two warpgroups, and lowers those of one, by enough in form 0 only. Each
/// thread begins with 168 registers, the multiple of 8 below 65,536 / 384: two warpgroups need 16
/// more each, so the third must give 32.
///
/// # Safety
///
/// The block has 384 threads.
#[kernel(max_threads = 384)]
pub unsafe fn shares_registers(form: u32) {
    // SAFETY: all threads of a warpgroup make the same call.
    unsafe {
        if thread::thread_idx_x() < 256 {
            wgmma::raise_registers::<184>();
        } else if form == 0 {
            wgmma::lower_registers::<136>();
        } else {
            wgmma::lower_registers::<144>();
        }
    }
}

#[test]
fn warpgroups_that_ask_for_more_registers_than_the_block_has_wait_for_ever() {
    let launch = |gpu: &Gpu<'_>, form| gpu.launch(shares_registers::args(form).grid(1).block(384));
    simulate(Simulation::new(1), |gpu| launch(gpu, 0));
    let text = failure(Simulation::new(1), |gpu| launch(gpu, 1)).to_string();
    let waits = "184 registers for each thread of its warpgroup: 2048 more, of which the block has";
    assert!(text.starts_with("deadlock") && text.contains(waits), "{text}");
}
