//! Tests of host threads on a simulated machine: scheduling, the clock, deadlock reports.

use std::ptr::null_mut;
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use cuda_std::atomic::{Order, Scope};
use cuda_std::prelude::*;
use devcomm::DevCommRequirements;
use devcomm_sim::{Machine, Simulation};
use devcomm_sys::driver::{CUevent, CUgraph, CUgraphExec, CUresult, CUstream};
use devcomm_testing::simulated::simulate;
use devcomm_types::Kernel;
use nccl_device::{Coop, DevComm};

use crate::nccl_threads::{OK, cuda, retain, run_ranks};

/// Runs `f` on one thread per GPU of a machine.
fn ranks<T: Send>(simulation: Simulation, f: impl Fn(&Machine, usize) -> T + Sync) -> Vec<T> {
    run_ranks(simulation, |thread| f(&thread.machine, thread.me))
}

fn stream() -> CUstream {
    let mut stream = null_mut();
    assert_eq!(cuda!(cuStreamCreate(&raw mut stream, 1)), OK);
    stream
}

fn event() -> CUevent {
    let mut event = null_mut();
    assert_eq!(cuda!(cuEventCreate(&raw mut event, 0)), OK);
    event
}

/// Returns the order in which a machine's threads make calls.
fn order(simulation: Simulation) -> Vec<usize> {
    let order = Mutex::new(Vec::new());
    ranks(simulation, |_, rank| {
        for _ in 0..20 {
            order.lock().unwrap().push(rank);
            stream();
        }
    });
    order.into_inner().unwrap()
}

#[test]
fn a_run_is_a_function_of_its_seed() {
    assert_eq!(order(Simulation::new(3)), order(Simulation::new(3)));
    let seeded = |seed| order(Simulation::new(3).seed(seed));
    let orders: Vec<_> = (0..4).map(seeded).collect();
    assert_eq!(orders, (0..4).map(seeded).collect::<Vec<_>>());
    assert!(orders.iter().any(|order| *order != orders[0]));
}

#[test]
fn time_passes_when_nothing_else_can_happen() {
    let start = Instant::now();
    let waited = ranks(Simulation::new(2), |machine, rank| {
        let start = machine.now();
        let deadline = start + Duration::from_secs(3600 * (1 + rank as u64));
        while machine.now() < deadline {
            machine.wait(machine.event_count(), Some(deadline)).unwrap();
        }
        machine.now() - start
    });
    assert!(waited[0] >= Duration::from_secs(3600) && waited[1] >= Duration::from_secs(7200));
    assert!(waited[1] < Duration::from_secs(7300));
    assert!(start.elapsed() < Duration::from_secs(60));
}

#[test]
fn threads_that_wait_for_each_other_are_told_each_others_waits() {
    let results = ranks(Simulation::new(2), |machine, rank| {
        let result = machine.wait(machine.event_count(), None);
        // Ends the other thread's wait.
        machine.notify();
        (rank, result)
    });
    let reports: Vec<_> = results.iter().filter_map(|(_, result)| result.as_ref().err()).collect();
    assert_eq!(reports.len(), 1, "{results:?}");
    assert!(reports[0].contains("rank 0") && reports[0].contains("rank 1"), "{}", reports[0]);
}

#[test]
fn a_thread_that_waits_for_another_outside_the_machine_does_not_stop_it() {
    let (sender, receiver) = channel();
    let ends = (Mutex::new(Some(sender)), Mutex::new(receiver));
    let got = ranks(Simulation::new(2), |_, rank| {
        if rank == 0 {
            return ends.1.lock().unwrap().recv().unwrap();
        }
        stream();
        ends.0.lock().unwrap().take().unwrap().send(7).unwrap();
        stream();
        0
    });
    assert_eq!(got, [7, 0]);
}

#[test]
fn streams_keep_their_order_and_wait_for_events_of_others() {
    ranks(Simulation::new(1), |machine, _| {
        let (first, second, mark, end) = (stream(), stream(), event(), event());
        assert_eq!(cuda!(cuEventRecord(mark, first)), OK);
        assert_eq!(cuda!(cuStreamWaitEvent(second, mark, 0)), OK);
        assert_eq!(cuda!(cuEventRecord(end, second)), OK);
        loop {
            let seen = machine.event_count();
            if cuda!(cuStreamQuery(second)) == OK {
                break;
            }
            machine.wait(seen, None).unwrap();
        }
        assert_eq!((cuda!(cuEventQuery(mark)), cuda!(cuEventQuery(end))), (OK, OK));
        let mut ms = -1.0;
        assert_eq!(cuda!(cuEventElapsedTime_v2(&raw mut ms, mark, end)), OK);
        assert!(ms >= 0.0);
        assert_eq!(cuda!(cuStreamDestroy_v2(first)), OK);
        assert_eq!(cuda!(cuStreamQuery(first)), CUresult::CUDA_ERROR_INVALID_HANDLE);
    });
}

#[test]
fn a_capture_that_ends_with_an_unjoined_stream_gives_no_graph() {
    ranks(Simulation::new(1), |_, _| {
        let (first, second, mark) = (stream(), stream(), event());
        let mut graph: CUgraph = null_mut();
        let mode = devcomm_sys::driver::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        assert_eq!(cuda!(cuStreamBeginCapture_v2(first, mode)), OK);
        assert_eq!(cuda!(cuEventRecord(mark, first)), OK);
        assert_eq!(cuda!(cuStreamWaitEvent(second, mark, 0)), OK);
        let unsupported = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        assert_eq!(cuda!(cuStreamQuery(second)), unsupported);
        let ended = cuda!(cuStreamEndCapture(first, &raw mut graph));
        assert_eq!(ended, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        assert!(graph.is_null());
        // Both streams can be used again.
        assert_eq!((cuda!(cuStreamQuery(first)), cuda!(cuStreamQuery(second))), (OK, OK));
        assert_eq!(cuda!(cuStreamBeginCapture_v2(first, mode)), OK);
        assert_eq!(cuda!(cuStreamEndCapture(first, &raw mut graph)), OK);
        let mut exec: CUgraphExec = null_mut();
        assert_eq!(cuda!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0)), OK);
        assert_eq!(cuda!(cuGraphLaunch(exec, second)), OK);
        assert_eq!(cuda!(cuStreamSynchronize(second)), OK);
    });
}

#[test]
fn what_does_not_exist_is_refused() {
    let machine = Machine::new(&Simulation::new(2)).unwrap();
    let mut count = 0;
    assert_eq!(cuda!(cuDeviceGetCount(&raw mut count)), CUresult::CUDA_ERROR_DEINITIALIZED);
    machine.enter();
    assert_eq!(cuda!(cuDeviceGetCount(&raw mut count)), OK);
    assert_eq!(count, 2);
    assert_eq!(cuda!(cuStreamQuery(null_mut())), CUresult::CUDA_ERROR_INVALID_CONTEXT);
    retain(1);
    assert_eq!(
        cuda!(cuMemsetD8Async(0x1000, 0, 16, null_mut())),
        CUresult::CUDA_ERROR_INVALID_VALUE
    );
    let mut text = std::ptr::null();
    let code = CUresult::CUDA_ERROR_INVALID_VALUE;
    assert_eq!(cuda!(cuGetErrorString(code, &raw mut text)), OK);
    // SAFETY: the string is valid until the thread's next call.
    let text = unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy();
    assert!(text.contains("GPU 1"), "{text}");
    let mut module = null_mut();
    let refused = cuda!(cuModuleLoad(&raw mut module, c"x.cubin".as_ptr()));
    assert_eq!(refused, CUresult::CUDA_ERROR_NOT_SUPPORTED);
}

#[test]
fn an_event_of_a_capture_that_has_ended_draws_no_stream_into_it() {
    ranks(Simulation::new(1), |_, _| {
        let (first, second, mark) = (stream(), stream(), event());
        let mut graph: CUgraph = null_mut();
        let mode = devcomm_sys::driver::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        assert_eq!(cuda!(cuStreamBeginCapture_v2(first, mode)), OK);
        assert_eq!(cuda!(cuEventRecord(mark, first)), OK);
        assert_eq!(cuda!(cuStreamEndCapture(first, &raw mut graph)), OK);
        let refused = cuda!(cuStreamWaitEvent(second, mark, 0));
        assert_eq!(refused, CUresult::CUDA_ERROR_CAPTURED_EVENT);
        assert_eq!(cuda!(cuStreamQuery(second)), OK);
        assert_eq!(cuda!(cuEventRecord(mark, first)), OK);
        assert_eq!(cuda!(cuStreamWaitEvent(second, mark, 0)), OK);
        assert_eq!(cuda!(cuStreamSynchronize(second)), OK);
    });
}

/// Polls the word at this address until it is set.
#[kernel]
unsafe fn polls_for_the_host(word: u64) {
    // SAFETY: the launch passes a word that the host sets.
    while unsafe { mem::load_ordered(word as *const u32, Order::Acquire, Scope::Sys) } == 0 {}
}

#[test]
fn a_kernel_that_polls_what_a_sleeping_host_thread_will_write_is_not_livelocked() {
    let (sender, receiver) = channel();
    let ends = (Mutex::new(sender), Mutex::new(receiver));
    run_ranks(Simulation::new(2), |thread| {
        if thread.me == 1 {
            let word: usize = ends.1.lock().unwrap().recv().unwrap();
            // The kernel polls more often than is allowed without a host thread outside.
            std::thread::sleep(Duration::from_secs(4));
            // SAFETY: pinned memory of four bytes, which the kernel only reads.
            unsafe { (word as *mut u32).write_volatile(1) };
            return;
        }
        let (word, stream) = (thread.pinned(4).cast::<u32>(), thread.stream());
        // SAFETY: pinned memory of four bytes, which nothing else accesses yet.
        unsafe { word.write_volatile(0) };
        let address = word as u64;
        let body = <polls_for_the_host as Kernel>::BODY.unwrap();
        thread.launch_kernel(&body, (1, 1024), stream, &[(&raw const address).cast()]);
        ends.0.lock().unwrap().send(word as usize).unwrap();
        thread.synchronize(stream);
    });
}

/// Waits until the word at this address is set.
#[kernel]
unsafe fn waits_for_the_host(comm: DevComm, word: u64) {
    // SAFETY: the launch passes a word that the host sets.
    let is_set =
        || unsafe { mem::load_ordered(word as *const u32, Order::Acquire, Scope::Sys) } != 0;
    comm.wait_until(Coop::cta(), is_set);
}

#[test]
fn a_wait_for_what_a_host_thread_has_written_ends_although_the_thread_waits_too() {
    for simulation in [Simulation::new(2), Simulation::new(2).pct(2)] {
        let (sender, receiver) = channel();
        let ends = (Mutex::new(sender), Mutex::new(receiver));
        simulate(simulation, |gpu| {
            let comm = gpu.dev_comm(DevCommRequirements::new())?;
            if gpu.rank() == 1 {
                let word: usize = ends.1.lock().unwrap().recv().unwrap();
                // Meanwhile all that the simulator runs waits for this thread.
                std::thread::sleep(Duration::from_millis(300));
                // SAFETY: pinned memory of four bytes, which the kernel only reads.
                unsafe { (word as *mut u32).write_volatile(1) };
                return gpu.barrier();
            }
            let mut word = gpu.context().pinned::<u32>(1)?;
            let address = word.as_mut_slice()?.as_mut_ptr() as u64;
            ends.0.lock().unwrap().send(address as usize).unwrap();
            gpu.launch(waits_for_the_host::args(&comm, address).grid(1).block(64))
        });
    }
}

#[test]
fn an_invalidated_capture_says_so_and_takes_no_more_operations() {
    ranks(Simulation::new(1), |_, _| {
        use devcomm_sys::driver::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        use devcomm_sys::driver::CUstreamCaptureStatus as Status;
        let (stream, mark) = (stream(), event());
        let status = || {
            let (mut status, mut id) = (Status::CU_STREAM_CAPTURE_STATUS_NONE, 0);
            let (mut graph, status_out): (CUgraph, _) = (null_mut(), &raw mut status);
            let none = (null_mut(), null_mut(), null_mut());
            let code = cuda!(cuStreamGetCaptureInfo_v3(
                stream,
                status_out,
                &raw mut id,
                &raw mut graph,
                none.0,
                none.1,
                none.2
            ));
            assert_eq!(code, OK);
            status
        };
        assert_eq!(cuda!(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED)), OK);
        assert_eq!(status(), Status::CU_STREAM_CAPTURE_STATUS_ACTIVE);
        let refused = cuda!(cuStreamSynchronize(stream));
        assert_eq!(refused, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        assert_eq!(status(), Status::CU_STREAM_CAPTURE_STATUS_INVALIDATED);
        let mut memory = 0;
        assert_eq!(cuda!(cuMemAlloc_v2(&raw mut memory, 16)), OK);
        let invalidated = CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        assert_eq!(cuda!(cuMemsetD8Async(memory, 0, 16, stream)), invalidated);
        assert_eq!(cuda!(cuEventRecord(mark, stream)), invalidated);
        let mut graph: CUgraph = null_mut();
        assert_eq!(cuda!(cuStreamEndCapture(stream, &raw mut graph)), invalidated);
        assert_eq!(cuda!(cuMemsetD8Async(memory, 0, 16, stream)), OK);
        assert_eq!(cuda!(cuStreamSynchronize(stream)), OK);
        assert_eq!(cuda!(cuMemFree_v2(memory)), OK);
    });
}

#[test]
fn the_handles_of_cudas_special_streams_are_those_of_every_gpu() {
    ranks(Simulation::new(2), |_, _| {
        let [legacy, per_thread] = [1, 2].map(std::ptr::without_provenance_mut);
        let mut memory = 0;
        assert_eq!(cuda!(cuMemAlloc_v2(&raw mut memory, 4)), OK);
        assert_eq!(cuda!(cuMemsetD32Async(memory, 7, 1, legacy)), OK);
        assert_eq!(cuda!(cuStreamSynchronize(null_mut())), OK);
        assert_eq!(cuda!(cuStreamQuery(legacy)), OK);
        assert_eq!(cuda!(cuStreamQuery(per_thread)), CUresult::CUDA_ERROR_NOT_SUPPORTED);
        for special in [null_mut(), legacy, per_thread] {
            assert_eq!(cuda!(cuStreamDestroy_v2(special)), CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
        assert_eq!(cuda!(cuStreamQuery(null_mut())), OK);
        assert_eq!(cuda!(cuMemFree_v2(memory)), OK);
    });
}

#[test]
fn sizes_beyond_all_limits_are_refused_or_fit_nowhere() {
    use devcomm_sys::driver::CUlaunchConfig;
    run_ranks(Simulation::new(1), |thread| {
        let body = <polls_for_the_host as Kernel>::BODY.unwrap();
        let function = thread.machine.bind(thread.module, &body);
        let mut count = -1;
        let occupancy = |count, threads, bytes| {
            cuda!(cuOccupancyMaxActiveBlocksPerMultiprocessor(count, function, threads, bytes))
        };
        for (threads, bytes) in [(32, usize::MAX), (i32::MAX, 0)] {
            assert_eq!(occupancy(&raw mut count, threads, bytes), OK);
            assert_eq!(count, 0);
        }
        let config = CUlaunchConfig {
            gridDimX: 1,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: 1 << 16,
            blockDimY: 1 << 16,
            blockDimZ: 1,
            sharedMemBytes: 0,
            hStream: null_mut(),
            attrs: null_mut(),
            numAttrs: 0,
        };
        let out = &raw mut count;
        assert_eq!(cuda!(cuOccupancyMaxActiveClusters(out, function, &raw const config)), OK);
        assert_eq!(count, 0);
    });
}
