//! Tests that accesses outside of windows, buffers, shared arrays and the stack are errors.

use cuda_std::prelude::*;
use cuda_std::shared;
use devcomm::Simulation;
use devcomm::sim::Error;
use devcomm_testing::simulated::{failure, read, simulate};
use nccl_device::Window;

use crate::failures::failure_of;

/// Stores to an element of a peer, which may not be there.
#[kernel]
pub unsafe fn stores_beyond(out: Window<u32>, peer: i32, at: usize) {
    if thread::thread_idx_x() == 3 {
        // SAFETY: the index may be invalid, which the simulator reports.
        unsafe { out.lsa(peer).store(at, 1) };
    }
}

#[kernel]
unsafe fn stores_a_byte_at(address: usize) {
    // SAFETY: the address may be invalid, which the simulator reports.
    unsafe { mem::store(std::ptr::with_exposed_provenance_mut::<u8>(address), 1) };
}

#[test]
fn an_access_outside_a_window_is_reported_before_it_happens() {
    let error_at = |peer: i32, at: usize| {
        failure(Simulation::new(2), |gpu| {
            gpu.launch(stores_beyond::args(&gpu.window(&[0_u32; 100])?, peer, at).grid(1).block(4))
        })
    };
    let error = error_at(1, 104);
    let Error::OutOfBounds { thread, bytes, ref where_to, at, .. } = *error else {
        panic!("{error}")
    };
    assert_eq!((thread.rank, thread.block, thread.thread, bytes), (0, 0, 3, 4));
    assert!(where_to.starts_with("16 bytes after the end of `out` (window"), "{where_to}");
    assert!(where_to.ends_with("rank 1's part), 400 bytes"), "{where_to}");
    assert!(at.file().ends_with("bounds.rs"));
    let error = failure(Simulation::new(1), |gpu| {
        // The report says how far the address is from the nearest memory.
        let _nearest = gpu.buffer(&[0_u32])?;
        gpu.launch(stores_a_byte_at::args(usize::MAX).grid(1).block(1))
    });
    assert!(matches!(*error, Error::OutOfBounds { address: usize::MAX, .. }), "{error}");
    let error = error_at(2, 0);
    assert!(error.to_string().contains("rank 2, which is not in the LSA team"), "{error}");
}

#[kernel]
unsafe fn stores_to(out: *mut u32) {
    // SAFETY: the buffer may be another rank's, which the simulator reports.
    unsafe { mem::store(out, 1) };
}

#[test]
fn another_ranks_buffer_is_out_of_reach() {
    let error = failure(Simulation::new(2), |gpu| {
        let mine = gpu.buffer(&[0_u32])?;
        let of_rank_1 = gpu.broadcast(1, &mine.device_address().to_ne_bytes())?;
        let address = u64::from_ne_bytes(of_rank_1.try_into().unwrap());
        gpu.launch(stores_to::args(address).grid(1).block(1))
    });
    let Error::OutOfBounds { thread, .. } = *error else { panic!("{error}") };
    assert_eq!(thread.rank, 0);
    assert!(error.to_string().contains("of rank 1"), "{error}");
}

#[kernel]
unsafe fn wants_much_shared() {
    shared_array![u8; 40_000];
    shared_array![u8; 10_000];
}

#[test]
fn more_static_shared_memory_than_a_block_has_is_reported() {
    let error = failure_of::<wants_much_shared>(1, 1);
    assert!(matches!(*error, Error::SharedMemory { bytes: 10_000, .. }), "{error}");
}

#[kernel]
unsafe fn writes_plainly_beyond(out: *mut u32, at: usize) {
    // SAFETY: the index may be invalid: then the simulator reports the fault.
    unsafe { out.add(at).write_volatile(1) };
}

/// The number of words of a page; the page after a buffer is not mapped.
const PAGE: usize = 1024;

#[test]
fn a_plain_access_to_unmapped_memory_is_an_error_and_no_crash() {
    let error_at = |at: usize| {
        failure(Simulation::new(1), |gpu| {
            gpu.launch(
                writes_plainly_beyond::args(&gpu.buffer(&[0_u32; PAGE])?, at).grid(1).block(1),
            )
        })
    };
    let error = error_at(PAGE);
    let Error::Fault { address: Some(address), ref where_to, .. } = *error else {
        panic!("{error}")
    };
    assert!(where_to.contains(&format!("{address:#x}")), "{where_to}");
    assert!(
        where_to.ends_with("0 bytes after the end of `out` (buffer 0 of rank 0), 4096 bytes"),
        "{where_to}"
    );
    let error = error_at(1 << 52);
    assert!(matches!(*error, Error::Fault { .. }), "{error}");
    // The program continues.
    let written = simulate(Simulation::new(1), |gpu| {
        let out = gpu.buffer(&[0_u32; PAGE])?;
        gpu.launch(writes_plainly_beyond::args(&out, PAGE - 1).grid(1).block(1))?;
        read(&out)
    });
    assert_eq!(written[0][PAGE - 1], 1);
}

fn deep(n: u32) -> u32 {
    let mut frame = [n; 64];
    std::hint::black_box(&mut frame);
    if n == 0 { frame[0] } else { deep(n - 1) + std::hint::black_box(frame[63]) }
}

#[kernel]
unsafe fn recurses(depth: u32) {
    std::hint::black_box(deep(depth));
}

#[test]
fn a_stack_that_is_full_is_an_error_and_no_crash() {
    let error = failure(Simulation::new(1), |gpu| {
        gpu.launch(recurses::args(100_000_u32).grid(2).block(64))
    });
    assert!(matches!(*error, Error::StackOverflow { stack: 0x10000, .. }), "{error}");
    simulate(Simulation::new(1), |gpu| gpu.launch(recurses::args(10_u32).grid(2).block(64)));
}

#[kernel]
unsafe fn overruns_shared() {
    let array = shared_array![u32; 3];
    // SAFETY: the fourth element does not exist, which the simulator reports.
    unsafe { array.add(3).write_volatile(1) };
}

#[test]
fn a_shared_array_that_was_overrun_is_reported() {
    let error = failure_of::<overruns_shared>(1, 1);
    assert!(matches!(*error, Error::SharedOverrun { bytes: 12, .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("wrote beyond the end of the shared array at tests/sim/bounds.rs:"));
}

/// Loads or stores outside of one of two shared arrays.
#[kernel]
unsafe fn misses_an_array(which: u32, at: usize) {
    let (a, b) = (shared_array![u32; 3], shared_array![u64; 100]);
    // SAFETY: the simulator reports the elements that do not exist.
    unsafe {
        match which {
            0 => mem::store(a.wrapping_add(at), 1),
            1 => mem::store(b.wrapping_add(at), 1),
            _ => mem::store(shared::dynamic_shared_mem::<u32>().wrapping_add(at), 1),
        }
    }
}

#[test]
fn an_access_outside_of_a_shared_array_names_that_array() {
    let before = 0_usize.wrapping_sub(2);
    for (which, at, want) in [
        (0, 3, "0 bytes after the end of the shared array at tests/sim/bounds.rs:"),
        (0, 5, "8 bytes after the end of the shared array at tests/sim/bounds.rs:"),
        (1, before, "16 bytes before the shared array at tests/sim/bounds.rs:"),
        (2, 4, "0 bytes after the end of the dynamic shared memory of 16 bytes"),
    ] {
        let error = failure(Simulation::new(1), |gpu| {
            gpu.launch(misses_an_array::args(which, at).grid(1).block(1).dynamic_shared(16))
        });
        let text = error.to_string();
        assert!(text.contains(want), "{which}, {at}: {text}");
        assert!(which != 0 || text.contains("(12 bytes)"), "{text}");
        assert!(which != 1 || text.contains("(800 bytes)"), "{text}");
    }
}
