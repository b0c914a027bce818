//! Tests of other libraries' work, in streams that devcomm does not know and in captures of their
//! own. The library here calls the simulated driver.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use devcomm_host::cudarc::driver::sys::{
    CUevent, CUgraphExec, CUresult, CUstream, CUstreamCaptureMode,
};
use devcomm_host::{
    DevCommRequirements, Effect, Error, LaunchConfig, Rank, ReduceOp, Result, SimulatedMachine,
    Stream, StreamOrder, group,
};

use crate::kernels::{COUNT, NO_PTX, launch_store_count};
use crate::support::{
    assert_capturing, contents, count, filled, inject, later, log_in, log_of, makes_no_calls,
    pause, ranks, world,
};

/// Calls a function of the driver.
macro_rules! cuda {
    ($function:ident($($arg:expr),*)) => {{
        // SAFETY: the arguments are live, and those that the function has.
        unsafe { SimulatedMachine::driver().$function($($arg),*) }
    }};
}

/// Returns a stream of the other library.
fn new_stream() -> CUstream {
    let mut stream = null_mut();
    assert_eq!(cuda!(cuStreamCreate(&raw mut stream, 1)), CUresult::CUDA_SUCCESS);
    stream
}

/// Counts its drops, separately for a busy and an idle stream.
struct Dropped {
    stream: usize,
    counts: Arc<[AtomicUsize; 2]>,
}

impl Dropped {
    fn new(stream: CUstream, counts: &Arc<[AtomicUsize; 2]>) -> Self {
        Self { stream: stream as usize, counts: Arc::clone(counts) }
    }
}

impl Drop for Dropped {
    fn drop(&mut self) {
        let state = cuda!(cuStreamQuery(self.stream as *mut c_void as CUstream));
        let is_idle = state == CUresult::CUDA_SUCCESS;
        self.counts[usize::from(is_idle)].fetch_add(1, Ordering::Relaxed);
    }
}

/// Returns how often something was dropped while its stream was busy, and while it was idle.
fn counts(counts: &[AtomicUsize; 2]) -> [usize; 2] {
    [0, 1].map(|at: usize| counts[at].load(Ordering::Relaxed))
}

/// Calls `drops` on rank 0 with a stream of another library, the only busy one of its GPU: it waits
/// for what rank 2 sends to rank 1. The other ranks call `waits` before rank 2 sends.
fn while_busy(rank: &Rank, waits: impl Fn(), drops: impl Fn(CUstream)) -> Result<()> {
    let comm = rank.communicator()?;
    let (memory, stream) = (comm.mem_alloc::<u32>(1000)?, rank.stream()?);
    let mut event: CUevent = null_mut();
    if rank.rank() == 1 {
        comm.recv(&memory, 2, &stream)?;
        assert_eq!(cuda!(cuEventCreate(&raw mut event, 2)), CUresult::CUDA_SUCCESS);
        let recorded = cuda!(cuEventRecord(event, stream.as_raw() as CUstream));
        assert_eq!(recorded, CUresult::CUDA_SUCCESS);
    }
    let event = rank.all_gather(&(event as usize).to_ne_bytes())?.swap_remove(1);
    let event = usize::from_ne_bytes(event.try_into().unwrap()) as CUevent;
    match rank.rank() {
        0 => {
            let theirs = new_stream();
            assert_eq!(cuda!(cuStreamWaitEvent(theirs, event, 0)), CUresult::CUDA_SUCCESS);
            assert_eq!(cuda!(cuStreamQuery(theirs)), CUresult::CUDA_ERROR_NOT_READY);
            assert!(stream.is_idle()?);
            rank.barrier()?;
            drops(theirs);
        }
        of_others => {
            rank.barrier()?;
            waits();
            if of_others == 2 {
                comm.send(&memory, 1, &stream)?;
            }
        }
    }
    stream.synchronize()
}

#[test]
fn what_another_library_uses_is_dropped_after_its_work() {
    ranks(3, |rank| {
        let waits = || pause(rank, Duration::from_millis(20));
        while_busy(rank, waits, |stream| {
            let drops = Arc::default();
            rank.context().drop_after_work(Dropped::new(stream, &drops));
            assert_eq!(counts(&drops), [0, 1]);
        })
    });
}

#[test]
fn what_another_library_uses_for_long_is_kept_until_the_ranks_function_has_ended() {
    let drops = Arc::default();
    ranks(3, |rank| {
        let waits = || rank.barrier().unwrap();
        while_busy(rank, waits, |stream| {
            rank.context().drop_after_work(Dropped::new(stream, &drops));
            assert_eq!(counts(&drops), [0, 0]);
            rank.barrier().unwrap();
        })
    });
    assert_eq!(counts(&drops), [0, 1]);
}

#[test]
fn what_another_library_uses_is_never_dropped_if_its_work_does_not_end() {
    let world = world(1);
    inject(&world, "cuCtxSynchronize", None, Effect::Hang);
    let drops = Arc::default();
    let run = world.run(|rank: &Rank| -> Result<()> {
        rank.context().drop_after_work(Dropped::new(new_stream(), &drops));
        Ok(())
    });
    run.unwrap();
    assert_eq!(counts(&drops), [0, 0]);
}

#[test]
fn what_work_uses_that_another_library_captures_lasts_as_long_as_its_graph() {
    ranks(1, |rank| {
        let stream = rank.stream()?;
        let (raw, owner) = (stream.as_raw() as CUstream, Arc::new(()));
        let back = stream.give_to_capture(Arc::clone(&owner))?;
        assert!(back.is_some(), "nothing is captured");
        drop(back);

        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        assert_eq!(cuda!(cuStreamBeginCapture_v2(raw, mode)), CUresult::CUDA_SUCCESS);
        assert!(stream.give_to_capture(Arc::clone(&owner))?.is_none());
        let (mut graph, mut exec) = (null_mut(), null_mut());
        assert_eq!(cuda!(cuStreamEndCapture(raw, &raw mut graph)), CUresult::CUDA_SUCCESS);
        let made = cuda!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
        assert_eq!(made, CUresult::CUDA_SUCCESS);
        assert_eq!(cuda!(cuGraphDestroy(graph)), CUresult::CUDA_SUCCESS);
        assert_eq!(Arc::strong_count(&owner), 2);
        assert_eq!(cuda!(cuGraphExecDestroy(exec)), CUresult::CUDA_SUCCESS);
        assert_eq!(Arc::strong_count(&owner), 1);
        Ok(())
    });
}

/// Captures what `f` enqueues to a stream, as another library does.
fn captured(stream: &Stream, f: impl FnOnce() -> Result<()>) -> Result<CUgraphExec> {
    let (raw, mut graph, mut exec) = (stream.as_raw() as CUstream, null_mut(), null_mut());
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    assert_eq!(cuda!(cuStreamBeginCapture_v2(raw, mode)), CUresult::CUDA_SUCCESS);
    f()?;
    assert_eq!(cuda!(cuStreamEndCapture(raw, &raw mut graph)), CUresult::CUDA_SUCCESS);
    let made = cuda!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
    assert_eq!(made, CUresult::CUDA_SUCCESS);
    assert_eq!(cuda!(cuGraphDestroy(graph)), CUresult::CUDA_SUCCESS);
    Ok(exec)
}

#[test]
fn what_every_operation_uses_that_another_library_captures_lasts_as_long_as_its_graph() {
    for operation in ["fill", "copy", "collective", "group", "graph"] {
        ranks(2, |rank| {
            let (comm, stream) = (rank.communicator()?, rank.stream()?);
            let (one, other) = (filled(comm, &[1.0_f32; 2])?, filled(comm, &[2.0_f32; 2])?);
            let (kept, reduce) = (comm.mem_alloc::<f32>(2)?, ReduceOp::Sum);
            let graph = stream.capture(|| stream.copy(&one, &kept))?;
            let exec = captured(&stream, || match operation {
                "fill" => stream.fill(&one, 3.0),
                "copy" => stream.copy(&one, &other),
                "collective" => comm.all_reduce(&one, &other, reduce, &stream),
                "group" => group(|_| comm.all_reduce(&one, &other, reduce, &stream)),
                _ => graph.launch(&stream),
            })?;
            // Nothing else holds the memory but the graph of the other library.
            drop(graph);
            drop((one, other));
            assert_eq!(count(&log_of(rank), "ncclMemFree"), 0, "{operation}");
            let launched = cuda!(cuGraphLaunch(exec, stream.as_raw() as CUstream));
            assert_eq!(launched, CUresult::CUDA_SUCCESS);
            stream.synchronize()?;
            assert_eq!(cuda!(cuGraphExecDestroy(exec)), CUresult::CUDA_SUCCESS);
            drop(kept);
            assert_eq!(count(&log_of(rank), "ncclMemFree"), 3, "{operation}");
            Ok(())
        });
    }
}

#[test]
fn a_stream_that_another_library_captures_is_not_waited_for_and_the_capture_goes_on() {
    let ran = ranks(1, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (b, context) = (filled(comm, &[1.0_f32; 2])?, rank.context());
        let (mut pinned, foreign) = (context.pinned::<f32>(2)?, new_stream());
        // SAFETY: the stream is never destroyed.
        let theirs = unsafe { Stream::from_raw(context, foreign.cast()) };
        let exec = captured(&stream, || {
            assert_capturing(stream.is_idle());
            assert_capturing(stream.synchronize());
            assert_capturing(stream.synchronize_within(Duration::ZERO));
            assert_capturing(stream.copy_to_host(&b, &mut [0.0; 2]));
            assert_capturing(stream.copy_to_host_async(&b, &mut pinned));
            assert_capturing(stream.copy_to_device_async(&pinned, &b));
            assert_capturing(b.copy_from_host(&[0.0; 2]));
            theirs.synchronize()?;
            // Such a stream may be dropped meanwhile.
            let _exec = captured(&theirs, || {
                // SAFETY: the stream is never destroyed.
                drop(unsafe { Stream::from_raw(context, foreign.cast()) });
                Ok(())
            })?;
            stream.fill(&b, 5.0)
        })?;
        assert_eq!((contents(&b), pinned.as_slice()?), (vec![1.0; 2], &[0.0; 2][..]));
        let launched = cuda!(cuGraphLaunch(exec, stream.as_raw() as CUstream));
        assert_eq!(launched, CUresult::CUDA_SUCCESS);
        stream.synchronize()?;
        assert_eq!(contents(&b), [5.0; 2]);
        assert_eq!(cuda!(cuGraphExecDestroy(exec)), CUresult::CUDA_SUCCESS);
        Ok(())
    });
    // The GPU does not count as failed.
    assert_eq!(log_in(&ran.world, 0).last().unwrap(), "cuDevicePrimaryCtxRelease");
}

#[test]
fn the_order_of_operations_does_not_use_a_stream_that_was_dropped() {
    let ran = ranks(1, |rank| {
        let (comm, own, context) = (rank.communicator()?, rank.stream()?, rank.context());
        let (b, order) = (filled(comm, &[1.0_f32; 2])?, StreamOrder::local(context));
        let fill = |stream: &Stream, value| {
            let _turn = order.begin(stream)?;
            stream.fill(&b, value)
        };
        for is_captured in [false, true] {
            let raw = new_stream();
            // SAFETY: the stream is destroyed after `theirs`.
            let theirs = unsafe { Stream::from_raw(context, raw.cast()) };
            if is_captured {
                let exec = captured(&theirs, || fill(&theirs, 2.0))?;
                assert_eq!(cuda!(cuGraphExecDestroy(exec)), CUresult::CUDA_SUCCESS);
            } else {
                fill(&theirs, 2.0)?;
            }
            makes_no_calls(rank, || drop(theirs));
            assert_eq!(cuda!(cuStreamDestroy_v2(raw)), CUresult::CUDA_SUCCESS);
            fill(&own, 3.0)?;
            assert_eq!(contents(&b), [3.0; 2]);
        }
        Ok(())
    });
    // Nothing keeps the context.
    assert_eq!(log_in(&ran.world, 0).last().unwrap(), "cuDevicePrimaryCtxRelease");
}

#[test]
fn what_is_made_after_another_librarys_capture_is_freed_at_once() {
    ranks(1, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (one, two) = (filled(comm, &[1.0_f32])?, filled(comm, &[2.0])?);
        let alloc = || rank.context().alloc::<f32>(1 << 20);
        let free = || Ok::<_, Error>(rank.context().memory_info()?.0);
        let mut during = None;
        let exec = captured(&stream, || {
            during = Some(alloc()?);
            stream.copy(&one, &two)
        })?;
        let before = free()?;
        // The graph may use this one, which was made during the capture: it is not freed.
        drop(during.take());
        assert_eq!(free()?, before);
        for _ in 0..3 {
            drop(alloc()?);
            assert_eq!(free()?, before);
        }
        assert_eq!(cuda!(cuGraphExecDestroy(exec)), CUresult::CUDA_SUCCESS);
        Ok(())
    });
}

#[test]
fn what_is_closed_lasts_as_long_as_the_graph_of_another_library_with_kernels_that_may_use_it() {
    for closes_all in [false, true] {
        ranks(2, |rank| {
            let (comm, stream) = (rank.communicator()?, rank.stream()?);
            rank.load(&NO_PTX)?;
            let window = comm.window::<f32>(COUNT)?;
            let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
            let launch = || launch_store_count(&stream, LaunchConfig::new(1, 32), (&dev, &window));
            let exec = captured(&stream, launch)?;
            makes_no_calls(rank, || match closes_all {
                true => comm.close_all().unwrap(),
                false => dev.close().unwrap(),
            });
            assert!(!dev.is_valid() && window.is_valid() != closes_all);
            let launched = cuda!(cuGraphLaunch(exec, stream.as_raw() as CUstream));
            assert_eq!(launched, CUresult::CUDA_SUCCESS);
            stream.synchronize()?;
            assert_eq!(contents(&window)[rank.rank()], COUNT as f32);
            assert_eq!(cuda!(cuGraphExecDestroy(exec)), CUresult::CUDA_SUCCESS);
            // What the graph has held is freed with the next object.
            drop(comm.window::<f32>(8)?);
            assert_eq!(count(&log_of(rank), "ncclDevCommDestroy"), 1);
            Ok(())
        });
    }
}

/// The copy on the other thread waits for all streams, in the order in which they were made: for
/// `own` first, and `theirs` is dropped meanwhile.
#[test]
fn a_wait_of_another_thread_does_not_query_a_stream_that_was_dropped() {
    let a_while = Duration::from_millis(30);
    ranks(2, |rank| {
        let (comm, own) = (rank.communicator()?, rank.stream()?);
        let memory = comm.mem_alloc::<u32>(2)?;
        if rank.is_root() {
            let raw = new_stream();
            // SAFETY: the stream is destroyed after `theirs`.
            let theirs = unsafe { Stream::from_raw(rank.context(), raw.cast()) };
            comm.recv(&memory, 1, &own)?;
            let other = comm.mem_alloc::<u32>(2)?;
            let copied = later(rank, Duration::ZERO, move || other.copy_from_host(&[0; 2]));
            pause(rank, a_while);
            drop(theirs);
            assert_eq!(cuda!(cuStreamDestroy_v2(raw)), CUresult::CUDA_SUCCESS);
            copied.join()?;
        } else {
            pause(rank, 2 * a_while);
            comm.send(&memory, 0, &own)?;
        }
        own.synchronize()
    });
}
