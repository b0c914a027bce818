//! Tests that the simulator reports the use of freed memory, and memory that the host frees while
//! a kernel uses it.

use std::ptr::null_mut;
use std::time::Duration;

use cuda_std::prelude::*;
use devcomm::sim::{Error, Machine};
use devcomm::{CommConfig, DevCommRequirements, Kernel, ReduceOp, Result, Simulation};
use devcomm_sys::nccl::Requirements;
use devcomm_testing::simulated::{Gpu, failure, run, world};
use devcomm_types::{DevComm as RawDevComm, Window as RawWindow};
use nccl_device::{Coop, DevComm, Window};

use crate::nccl_threads::*;

#[kernel]
unsafe fn stores_to_freed(out: *mut u32) {
    // SAFETY: the simulator reports freed memory.
    unsafe { mem::store(out, 1) };
}

#[test]
fn an_access_to_freed_memory_names_the_memory_and_what_freed_it() {
    let error = failure(Simulation::new(1), |gpu| {
        let buffer = gpu.buffer(&[0_u32; 4])?;
        let address = buffer.device_address();
        drop(buffer);
        gpu.launch(stores_to_freed::args(address + 8).grid(1).block(1))
    });
    let text = error.to_string();
    assert!(matches!(*error, Error::OutOfBounds { .. }), "{text}");
    assert!(text.contains("of rank 0, which was freed"), "{text}");
    assert!(text.contains("freed.rs:"), "{text}");
}

/// Stores to `out` after a long time.
#[kernel]
unsafe fn stores_to_after_long(comm: DevComm, out: *mut u32) {
    for _ in 0..100_000 {
        thread::nanosleep(1_000);
    }
    if comm.rank() == 0 {
        // SAFETY: the simulator reports freed memory.
        unsafe { mem::store(out, 1) };
    }
}

#[test]
fn each_wait_for_a_kernel_that_fails_says_what_the_kernel_did() {
    for wait in ["stream", "event"] {
        let world = world(Simulation::new(2));
        let ran = run(&world, |gpu| {
            let comm = gpu.new_communicator(&CommConfig::new().blocking(false))?;
            comm.wait(Duration::from_secs(60))?;
            let dev_comm = gpu.dev_comm(DevCommRequirements::new())?;
            let (freed, more) = (gpu.buffer(&[0_u32; 4])?, gpu.buffer(&[0_u32; 4])?);
            let address = freed.device_address();
            drop(freed);
            let stream =
                start(gpu, stores_to_after_long::args(&dev_comm, address).grid(1).block(1))?;
            comm.all_reduce(&more, &more, ReduceOp::Sum, &stream)?;
            if wait == "event" {
                let event = stream.context().event()?;
                stream.record(&event)?;
                return event.synchronize();
            }
            stream.synchronize()
        });
        let text = ran.unwrap_err().to_string();
        assert!(text.contains("which was freed") && text.contains("freed.rs:"), "{wait}: {text}");
        assert!(!text.contains("NCCL_DEBUG"), "{wait}: {text}");
    }
}

/// Rank 1 stores to rank 0 long after the host's last action.
#[kernel]
unsafe fn stores_late(out: Window<u32>, rank: i32) {
    if rank == 1 {
        for _ in 0..100_000 {
            thread::nanosleep(1);
        }
        // SAFETY: the simulator reports a window that was deregistered.
        unsafe { out.lsa(0).store(0, 1) };
    }
}

/// Launches without waiting for the end.
fn start<K: Kernel, A: devcomm_types::LaunchArgs<K::Args>, S>(
    gpu: &Gpu<'_>,
    launch: devcomm::Launch<K, A, S>,
) -> Result<devcomm::Stream> {
    let stream = gpu.stream()?;
    // SAFETY: the simulator reports what the test does wrong.
    unsafe { launch.into_unsafe().launch(&stream) }?;
    Ok(stream)
}

#[test]
fn a_store_to_a_window_that_its_rank_has_deregistered_is_reported() {
    let error = failure(Simulation::new(2), |gpu| {
        let window = gpu.window(&[0_u32])?;
        let stream = start(gpu, stores_late::args(&window, gpu.rank() as i32).grid(1).block(1))?;
        if gpu.rank() == 0 {
            stream.synchronize()?;
            drop(window);
            return gpu.barrier();
        }
        gpu.barrier()?;
        stream.synchronize()
    });
    let text = error.to_string();
    assert!(matches!(*error, Error::OutOfBounds { .. }), "{text}");
    assert!(text.contains("rank 0's part), which its rank has deregistered"), "{text}");
}

#[kernel]
unsafe fn waits_for_ever(comm: DevComm, out: Window<u32>, word: *const u32) {
    // The parameter lets the machine know that the kernel may use the memory.
    let _ = word;
    // SAFETY: the window has the element.
    comm.wait_until(Coop::thread(), || unsafe { out.local().load(0) } != 0);
}

#[test]
fn what_the_host_ends_under_a_running_kernel_is_reported_at_the_call() {
    let calls = ["ncclCommWindowDeregister", "ncclMemFree", "ncclDevCommDestroy", "cuMemFreeHost"];
    for call in calls {
        let machine = Machine::new(&Simulation::new(1)).unwrap();
        run_ranks_on(&machine, |rank| {
            let (comm, memory, stream) = (rank.init(), rank.zeroed(1024), rank.stream());
            let (mut window, mut dev_comm) = (null_mut(), RawDevComm::zeroed());
            ok(nccl!(comm_window_register(comm, memory.ptr(), 4096, &raw mut window, 1)));
            ok(nccl!(dev_comm_create(comm, &Requirements::new(), &raw mut dev_comm)));
            let out = RawWindow::<u32>::new(window, 1024);
            let pinned = call == "cuMemFreeHost";
            let address = if pinned { rank.pinned(4096) } else { memory.ptr() };
            let params = [
                (&raw const dev_comm).cast(),
                (&raw const out).cast(),
                (&raw const address).cast(),
            ];
            let body = <waits_for_ever as Kernel>::BODY.unwrap();
            rank.launch_kernel(&body, (1, 1), stream, &params);
            let code = match call {
                "ncclMemFree" => nccl!(mem_free(address)),
                "cuMemFreeHost" => cuda!(cuMemFreeHost(address)) as i32,
                "ncclDevCommDestroy" => nccl!(dev_comm_destroy(comm, &raw const dev_comm)),
                _ => nccl!(comm_window_deregister(comm, window)),
            };
            assert_ne!(code, 0, "{call}");
        });
        let error = machine.failure().unwrap();
        let text = error.to_string();
        assert!(matches!(*error, Error::Closed { .. }), "{text}");
        let want = "which was passed to waits_for_ever, and that kernel has not ended on rank 0";
        assert!(text.starts_with(call) && text.contains(want), "{text}");
    }
}

#[kernel]
fn does_nothing() {}

#[test]
fn a_graph_that_is_launched_after_the_module_of_its_kernel_is_unloaded_is_reported() {
    let machine = Machine::new(&Simulation::new(1)).unwrap();
    run_ranks_on(&machine, |rank| {
        let (stream, body) = (rank.stream(), <does_nothing as Kernel>::BODY.unwrap());
        let launch = || rank.launch_kernel(&body, (1, 32), stream, &[]);
        let graph = rank.capture(stream, launch);
        rank.launch(graph, stream);
        assert_eq!(rank.wait_for(stream), None);
        assert_eq!(cuda!(cuModuleUnload(rank.module)), OK);
        rank.launch(graph, stream);
        assert!(rank.wait_for(stream).is_some());
    });
    let text = machine.failure().unwrap().to_string();
    assert!(text.starts_with("does_nothing cannot be launched: its module was unloaded"), "{text}");
}

#[test]
fn a_put_into_a_window_that_its_peer_has_deregistered_is_an_error() {
    let machine = Machine::new(&Simulation::new(2)).unwrap();
    let errors = run_ranks_on(&machine, |rank| {
        let (comm, stream) = (rank.init(), rank.stream());
        let (memory, mut window) = (rank.zeroed(1024), null_mut());
        ok(nccl!(comm_window_register(comm, memory.ptr(), 4096, &raw mut window, 1)));
        if rank.me == 1 {
            ok(nccl!(comm_window_deregister(comm, window)));
        }
        rank.barrier(comm);
        if rank.me == 1 {
            return None;
        }
        let from = memory.ptr();
        ok(nccl!(put_signal(from, 2, F32, 1, window, 0, 0, 0, 0, comm, stream)));
        rank.wait_for(stream)
    });
    let text = errors[0].as_deref().unwrap_or_default();
    assert!(text.contains("rank 1's part, which its rank has deregistered"), "{errors:?}");
}

#[test]
fn an_error_of_a_streams_operation_is_the_failure_of_the_machine_although_no_call_returns_it() {
    for operation in ["a copy", "a memset", "a send", "AllReduce"] {
        let machine = Machine::new(&Simulation::new(2)).unwrap();
        run_ranks_on(&machine, |rank| {
            let (comm, stream, busy) = (rank.init(), rank.stream(), rank.stream());
            let (memory, other) = (rank.alloc(64), rank.zeroed(16));
            let (at, to) = (memory.ptr() as u64, other.ptr() as u64);
            let peer = 1 - rank.me as i32;
            // The operation waits for an event after a receive, which waits for the peer.
            let mut event = null_mut();
            assert_eq!(cuda!(cuEventCreate(&raw mut event, 0)), OK);
            let (ends, begun) = (rank.zeroed(1), rank.zeroed(1));
            ok(nccl!(recv(ends.ptr(), 1, F32, peer, comm, busy)));
            assert_eq!(cuda!(cuEventRecord(event, busy.cast())), OK);
            assert_eq!(cuda!(cuStreamWaitEvent(stream.cast(), event, 0)), OK);
            match operation {
                "a copy" => _ = cuda!(cuMemcpyDtoDAsync_v2(to, at, 64, stream.cast())),
                "a memset" => _ = cuda!(cuMemsetD8Async(at, 0, 64, stream.cast())),
                "a send" if rank.me == 0 => ok(nccl!(send(memory.ptr(), 1, F32, 1, comm, stream))),
                "a send" => ok(nccl!(recv(other.ptr(), 1, F32, 0, comm, stream))),
                _ => ok(rank.all_reduce(&memory, 1, F32, SUM, comm, stream)),
            }
            ok(nccl!(mem_free(memory.ptr())));
            let last = rank.stream();
            // It ends the wait, and no call of this thread fails.
            ok(nccl!(send(begun.ptr(), 1, F32, peer, comm, last)));
        });
        let error = machine.failure().unwrap();
        let text = error.to_string();
        assert!(matches!(*error, Error::Operation { .. }), "{text}");
        assert!(text.starts_with(operation), "{operation}: {text}");
    }
}
