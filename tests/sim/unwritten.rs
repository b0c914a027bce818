//! Tests that the simulator reports reads of device memory that nothing has written.

use std::ptr::null_mut;

use cuda_std::atomic::{Atomic, Order, Scope};
use cuda_std::mem;
use cuda_std::prelude::*;
use devcomm::sim::Error;
use devcomm::{Buffer, DeviceSlice, Result, Simulation};
use devcomm_testing::simulated::{Gpu, failure, simulate};

use crate::nccl_threads::{F32, OK, SUM, cuda, nccl, ok, run_ranks};

/// Returns new memory for 32 elements from `ncclMemAlloc`, which is never freed.
fn uninitialised(gpu: &Gpu<'_>) -> DeviceSlice<u32> {
    let mut memory = null_mut();
    ok(nccl!(mem_alloc(&raw mut memory, 32 * size_of::<u32>())));
    // SAFETY: the memory has 32 elements, and is never freed.
    unsafe { DeviceSlice::from_raw_parts(gpu.context(), memory.addr() as u64, 32) }
}

/// Each thread of a block writes its element, except thread 5, and then reads it.
#[kernel]
unsafe fn skips_one(words: *mut u32, update: bool) {
    let word = words.wrapping_add(thread::thread_idx_x() as usize);
    // SAFETY: the memory has an element for each thread.
    unsafe {
        if thread::thread_idx_x() != 5 {
            mem::store(word, 1);
        }
        if update {
            Atomic::from_ptr(word).fetch_add(1, Order::Relaxed, Scope::Gpu);
        } else {
            mem::store(word, mem::load(word) + 1);
        }
    }
}

fn launch(gpu: &Gpu<'_>, words: &DeviceSlice<u32>, update: bool) -> Result<()> {
    gpu.launch(skips_one::args(words, update).grid(1).block(32))
}

#[test]
fn a_kernels_read_of_what_nothing_has_written_is_reported_with_thread_line_and_memory() {
    for update in [false, true] {
        let error = failure(Simulation::new(1), |gpu| launch(gpu, &uninitialised(gpu), update));
        let text = error.to_string();
        assert!(matches!(*error, Error::Misuse { .. }), "{text}");
        let who = "skips_one: rank 0 block 0 thread 5 at tests/sim/unwritten.rs:";
        assert!(text.starts_with(who), "{text}");
        assert!(text.contains("it reads element 5 of `words` (buffer "), "{text}");
        assert!(text.ends_with("which nothing has written"), "{text}");
    }
}

#[test]
fn memory_that_a_copy_or_a_memset_has_written_may_be_read_and_so_may_devcomms_own() {
    simulate(Simulation::new(1), |gpu| {
        launch(gpu, &gpu.window(&[0_u32; 32])?.device_slice(), false)?;
        let (words, stream) = (uninitialised(gpu), gpu.stream()?);
        stream.fill(&words, 7)?;
        stream.synchronize()?;
        launch(gpu, &words, true)?;
        launch(gpu, &gpu.communicator()?.window::<u32>(32)?.device_slice(), false)
    });
}

#[test]
fn copies_and_collectives_that_read_what_nothing_has_written_are_reported() {
    for collective in [false, true] {
        let texts = run_ranks(Simulation::new(1), |thread| {
            let (comm, stream, memory) = (thread.init(), thread.stream(), thread.alloc(4096));
            // Sets all bytes but byte 1000.
            let start = memory.ptr() as u64;
            for (at, bytes) in [(0, 1000), (1001, 3095)] {
                assert_eq!(cuda!(cuMemsetD8Async(start + at, 0, bytes, stream.cast())), OK);
            }
            thread.synchronize(stream);
            if collective {
                ok(thread.all_reduce(&memory, 1024, F32, SUM, comm, stream));
            } else {
                let copy = thread.alloc(4096).ptr() as u64;
                assert_eq!(cuda!(cuMemcpyDtoDAsync_v2(copy, start, 4096, stream.cast())), OK);
            }
            thread.wait_for(stream).expect("a report")
        });
        let text = &texts[0];
        assert!(text.contains("of rank 0 loads: byte 1000 of buffer "), "{text}");
        assert!(text.ends_with("which nothing has written"), "{text}");
    }
}

#[test]
fn new_memory_is_filled_with_nans() {
    let read =
        run_ranks(Simulation::new(1).races(false), |thread| thread.alloc(64).read::<f32>(16));
    assert!(read[0].iter().all(|value| value.is_nan()));
}
