//! Tests that end kernels whose wait for a peer never ends: by an abort, a deadline, a lost rank,
//! or an NCCL error.

use std::time::Duration;

use devcomm_host::{
    AbortCause, Communicator, DevCommRequirements, DevCommResource, DriverError, Effect, Error,
    KernelAbortHandle, LaunchError, LaunchRefusal, NcclError, Rank, Result, Stream, StuckWait,
    WaitFor, WaitKind, Window, World, WorldError,
};
use parking_lot::Mutex;

use crate::kernels::{COUNT, NO_PTX, meet};
use crate::support::{
    assert_ended, contents, count, failed_calls, inject, later, log_in, log_of, now, pause, ranks,
    world,
};

/// An upper bound of what should take milliseconds, on the simulated machine's clock.
const SOON: Duration = Duration::from_secs(3);
/// The delay of an event that a rank waits for.
const A_WHILE: Duration = Duration::from_millis(30);
const BLOCKS: u32 = 8;

/// What each of two ranks has to launch a kernel that waits forever: the kernels of the two ranks
/// wait at different barriers.
struct Setup {
    comm: Communicator,
    window: Window<f32>,
    stream: Stream,
}

impl Setup {
    fn new(rank: &Rank) -> Result<Self> {
        let comm = rank.communicator()?.clone();
        let window = comm.window::<f32>(COUNT)?;
        rank.load(&NO_PTX)?;
        Ok(Self { comm, window, stream: rank.stream()? })
    }

    fn dev(&self) -> Result<DevCommResource> {
        self.comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(2 * BLOCKS))
    }

    fn launch(&self, stream: &Stream, dev: &DevCommResource) -> Result<()> {
        self.launch_from(first_barrier(self.comm.rank()), stream, dev)
    }

    fn launch_from(&self, first: u32, stream: &Stream, dev: &DevCommResource) -> Result<()> {
        // SAFETY: the kernel accesses no memory but barriers, and the host ends its wait.
        unsafe { meet::args(dev, first).grid(BLOCKS).block(32).launch(stream) }
    }
}

fn clock(rank: &Rank) -> Duration {
    rank.simulated_machine().unwrap().now()
}

/// Returns the index of the barrier at which block 0 of a rank's kernel waits.
fn first_barrier(rank: usize) -> u32 {
    rank as u32 * BLOCKS
}

/// Returns the waits that the error of a rank's aborted kernel lists. For a wait at a barrier it
/// names the peer that has not arrived instead of values, so `wanted` and `seen` are 0.
fn expected_waits(rank: usize) -> Vec<StuckWait> {
    let wait = |block| {
        let (kind, index, peer) =
            (WaitKind::LsaBarrier, first_barrier(rank) + block, 1 - rank as i32);
        let wait = WaitFor { kind, index, context: 0, peer, wanted: 0, seen: 0 };
        StuckWait { block, thread: 0, wait }
    };
    (0..BLOCKS).map(wait).collect()
}

/// Checks that the kernels of rank `by_rank` were aborted in the waits of [`expected_waits`], with
/// a cause for which `why` returns true.
#[track_caller]
fn assert_aborted(result: Result<()>, why: impl Fn(AbortCause) -> bool, by_rank: usize) {
    match result {
        Err(Error::Launch(LaunchError::KernelAborted { rank, cause, stuck, .. })) => {
            assert!(why(cause), "{cause:?}");
            assert_eq!((rank, stuck), (by_rank, expected_waits(rank)));
        }
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn assert_refused(result: Result<()>) {
    match result {
        Err(Error::Launch(LaunchError::Refused {
            kernel: "meet",
            refusal: LaunchRefusal::Aborted { .. },
        })) => {}
        other => panic!("{other:?}"),
    }
}

fn is_request(cause: AbortCause) -> bool {
    cause == AbortCause::Request
}

#[test]
fn kernels_leave_when_another_thread_says_so_and_the_wait_tells_what_they_waited_for() {
    let ran = ranks(2, |rank| {
        let setup = Setup::new(rank)?;
        for _ in 0..20 {
            let dev = setup.dev()?;
            assert!(dev.is_valid() && dev.stuck().is_empty());
            setup.launch(&setup.stream, &dev)?;
            let handle = dev.abort_handle();
            let watchdog = later(rank, A_WHILE, move || {
                handle.abort();
                handle.clone().abort();
            });
            let start = clock(rank);
            assert_aborted(setup.stream.synchronize(), is_request, rank.rank());
            assert!(clock(rank) - start < SOON);
            watchdog.join();
            // The error is reported once.
            setup.stream.synchronize()?;
            assert!(!dev.is_valid());
            assert_eq!(dev.stuck(), expected_waits(rank.rank()));
            let refused = setup.launch(&setup.stream, &dev);
            let text = refused.as_ref().unwrap_err().to_string();
            assert!(text.contains("was aborted (the program asked for it)"), "{text}");
            assert_refused(refused);
            dev.close()?;
            assert_eq!(dev.stuck().len(), BLOCKS as usize);
        }
        setup.window.copy_from_host(&[1.0; COUNT])?;
        Ok(())
    });
    for gpu in 0..2 {
        let log = log_in(&ran.world, gpu);
        // An aborted device communicator is destroyed only at the end of its communicator: until
        // then the other rank may write to this rank's barriers.
        let end = log.iter().position(|call| call.starts_with("ncclCommFinalize")).unwrap();
        assert_eq!(count(&log[..end], "ncclDevCommDestroy"), 0, "{log:?}");
        let made = count(&log, "ncclDevCommCreate");
        assert_eq!(count(&log[end..], "ncclDevCommDestroy"), made, "{log:?}");
        // The pinned memory with the abort flag of a device communicator is used again for the next
        // one, and freed at the end of the context.
        let blocks = [count(&log, "cuMemHostAlloc"), count(&log, "cuMemFreeHost")];
        assert_eq!(blocks, [1, 1], "{log:?}");
    }
}

#[test]
fn other_device_communicators_of_the_context_go_on() {
    ranks(2, |rank| {
        let (setup, other) = (Setup::new(rank)?, rank.stream()?);
        let (stuck, other_dev) = (setup.dev()?, setup.dev()?);
        setup.launch(&setup.stream, &stuck)?;
        setup.launch(&other, &other_dev)?;
        stuck.abort();
        assert_aborted(setup.stream.synchronize(), is_request, rank.rank());
        assert!(other_dev.is_valid() && !other.is_idle()?);
        setup.launch(&other, &other_dev)?;
        other_dev.abort();
        assert_aborted(other.synchronize(), is_request, rank.rank());
        stuck.close()
    });
}

#[test]
fn a_deadline_ends_the_kernels_of_its_stream_and_no_others() {
    let limit = Duration::from_millis(30);
    let ran = ranks(2, |rank| {
        let (setup, other) = (Setup::new(rank)?, rank.stream()?);
        let (late, other_dev) = (setup.dev()?, setup.dev()?);
        setup.launch(&setup.stream, &late)?;
        setup.launch(&other, &other_dev)?;
        let missed = |cause| matches!(cause, AbortCause::Deadline { waited } if waited >= limit);
        assert_aborted(setup.stream.synchronize_within(limit), missed, rank.rank());
        setup.stream.synchronize_within(limit)?;
        assert_refused(setup.launch(&setup.stream, &late));
        assert!(other_dev.is_valid() && !other.is_idle()?);
        other_dev.abort();
        assert_aborted(other.synchronize_within(SOON), is_request, rank.rank());
        // The GPU still works.
        setup.window.copy_from_host(&[3.0; COUNT])?;
        assert_eq!(contents(&setup.window)[COUNT - 1], 3.0);
        late.close()?;
        let again = setup.dev()?;
        setup.launch(&setup.stream, &again)?;
        assert_aborted(setup.stream.synchronize_within(limit), missed, rank.rank());
        Ok(())
    });
    for gpu in 0..2 {
        // The kernels were ended while they waited for the other rank, which may therefore use the
        // window until the communicator has ended on both.
        let log = log_in(&ran.world, gpu);
        let ends = [count(&log, "ncclCommWindowDeregister"), count(&log, "ncclMemFree")];
        assert_eq!(ends, [1, 1], "{log:?}");
        let end = log.iter().position(|call| call.starts_with("ncclCommFinalize")).unwrap();
        assert_eq!(count(&log[..end], "ncclCommWindowDeregister"), 0, "{log:?}");
        assert!(
            log.iter().position(|call| call == "ncclCommDestroy").is_some_and(|end| {
                log[end..].iter().any(|call| call.starts_with("ncclMemFree"))
            })
        );
    }
}

#[test]
fn a_deadline_ends_kernels_of_other_streams_that_its_stream_waits_for() {
    ranks(2, |rank| {
        let (setup, dependent, event) =
            (Setup::new(rank)?, rank.stream()?, rank.context().event()?);
        let dev = setup.dev()?;
        setup.launch(&setup.stream, &dev)?;
        setup.stream.record(&event)?;
        dependent.wait_event(&event)?;
        let limit = Duration::from_millis(30);
        let missed = |cause| matches!(cause, AbortCause::Deadline { .. });
        assert_aborted(dependent.synchronize_within(limit), missed, rank.rank());
        assert_aborted(setup.stream.synchronize(), missed, rank.rank());
        Ok(())
    });
}

#[test]
fn a_rank_that_is_lost_has_the_others_kernels_leave() {
    let world = world(2);
    let error = world.run(|rank| {
        let setup = Setup::new(rank)?;
        let dev = setup.dev()?;
        if rank.rank() == 1 {
            pause(rank, A_WHILE);
            panic!("no more");
        }
        setup.launch(&setup.stream, &dev)?;
        let lost = setup.stream.synchronize().unwrap_err();
        assert_eq!(lost.to_string(), "rank 1 is lost: rank 1 panicked: no more");
        // `stuck` lists the waits, and the GPU is idle.
        assert_eq!(dev.stuck(), expected_waits(0));
        assert!(setup.stream.is_idle()? && !dev.is_valid());
        Err::<(), _>(lost)
    });
    assert!(
        matches!(error, Err(Error::World(WorldError::RankPanicked { rank: 1, .. }))),
        "{error:?}"
    );
    assert!(now(&world) < SOON, "{:?}", now(&world));
    // The kernel exited before NCCL's abort, which waits for it.
    aborts_returned(&world);
    let log = log_in(&world, 0);
    // Nothing is freed: the GPU of the lost rank may still run, and access this rank's memory.
    let freed = [count(&log, "ncclMemFree"), count(&log, "cuMemFreeHost")];
    assert_eq!((count(&log, "ncclCommAbort"), freed), (1, [0, 0]), "{log:?}");
}

/// Checks that `ncclCommAbort` returned: it waits for the work on its GPU.
#[track_caller]
fn aborts_returned(world: &World) {
    let failed = failed_calls(world).into_iter().find(|call| call.function == "ncclCommAbort");
    assert_eq!(failed, None);
}

fn by_comm_abort(cause: AbortCause) -> bool {
    cause == AbortCause::CommunicatorAborted
}

#[test]
fn the_abort_of_a_communicator_has_its_kernels_leave_first() {
    let ran = ranks(2, |rank| {
        let setup = Setup::new(rank)?;
        let dev = setup.dev()?;
        setup.launch(&setup.stream, &dev)?;
        let start = clock(rank);
        setup.comm.abort()?;
        assert!(clock(rank) - start < SOON);
        assert_aborted(setup.stream.synchronize(), by_comm_abort, rank.rank());
        assert_eq!(dev.stuck().len(), BLOCKS as usize);
        assert_ended(setup.dev(), "aborted");
        Ok(())
    });
    for gpu in 0..2 {
        let log = log_in(&ran.world, gpu);
        // The window and the abort flag are freed, since no rank is lost.
        let freed = [count(&log, "ncclMemFree"), count(&log, "cuMemFreeHost")];
        assert_eq!(freed, [1, 1], "{log:?}");
    }
}

#[test]
fn an_abort_of_the_communicator_from_another_thread_has_its_kernels_leave() {
    ranks(2, |rank| {
        let setup = Setup::new(rank)?;
        let dev = setup.dev()?;
        setup.launch(&setup.stream, &dev)?;
        let handle = setup.comm.abort_handle();
        let watchdog = later(rank, A_WHILE, move || handle.abort());
        assert_aborted(setup.stream.synchronize(), by_comm_abort, rank.rank());
        watchdog.join()?;
        assert!(!dev.is_valid());
        setup.comm.destroy()
    });
}

#[test]
fn kernels_leave_when_the_network_fails_and_the_wait_tells_nccls_error() {
    let world = world(2);
    run_with_failing_network(&world, |setup| setup.stream.synchronize());
    aborts_returned(&world);
}

/// The wait does not wait for `ncclCommAbort`, which may take seconds: it waits for the driver,
/// which other processes may keep busy.
#[test]
fn the_wait_tells_nccls_error_before_the_abort_has_returned() {
    let world = world(2);
    inject(&world, "ncclCommAbort", 0, Effect::Hang);
    run_with_failing_network(&world, |setup| setup.stream.synchronize());
}

#[test]
fn a_wait_for_an_event_after_the_kernels_tells_nccls_error_too() {
    let world = world(2);
    run_with_failing_network(&world, |setup| {
        let event = setup.comm.context().event()?;
        setup.stream.record(&event)?;
        event.synchronize()
    });
    aborts_returned(&world);
}

/// Runs two ranks, the first of which launches kernels that wait forever, and gets NCCL's error of
/// a failed network in `wait`.
fn run_with_failing_network(world: &World, wait: fn(&Setup) -> Result<()>) {
    // A rank calls `ncclCommGetAsyncError` only in its wait for the kernels. 6 is the code of
    // `ncclRemoteError`.
    inject(world, "ncclCommGetAsyncError", 0, Effect::Later(6));
    let failed = world.run(|rank| {
        let setup = Setup::new(rank)?;
        let dev = setup.dev()?;
        if rank.rank() == 1 {
            rank.barrier()?;
            return Ok(());
        }
        setup.launch(&setup.stream, &dev)?;
        let start = clock(rank);
        let failed = wait(&setup).unwrap_err();
        assert!(clock(rank) - start < SOON);
        assert!(
            matches!(&failed, Error::Nccl(NcclError::Failed { code: 6, rank: Some(0), .. })),
            "{failed}"
        );
        assert!(!dev.is_valid() && !setup.comm.is_valid());
        assert_eq!(dev.stuck(), expected_waits(0));
        assert_eq!(count(&log_of(rank), "ncclCommAbort"), 1);
        Err(failed)
    });
    assert!(matches!(failed, Err(Error::Nccl(NcclError::Failed { code: 6, .. }))), "{failed:?}");
}

#[test]
fn kernels_in_graphs_leave_and_their_graph_is_refused() {
    ranks(2, |rank| {
        let setup = Setup::new(rank)?;
        let (dev, closed) = (setup.dev()?, setup.dev()?);
        let capture =
            |dev: &DevCommResource| setup.stream.capture(|| setup.launch(&setup.stream, dev));
        let (graph, of_closed) = (capture(&dev)?, capture(&closed)?);
        // A capture runs nothing.
        setup.stream.synchronize()?;
        closed.close()?;
        let gone = of_closed.launch(&setup.stream).unwrap_err().to_string();
        assert!(gone.contains("`meet` was not launched: the device communicator"), "{gone}");
        let other = rank.stream()?;
        graph.launch(&other)?;
        let handle = dev.abort_handle();
        let watchdog = later(rank, A_WHILE, move || handle.abort());
        assert_aborted(other.synchronize(), is_request, rank.rank());
        watchdog.join();
        assert_refused(graph.launch(&other));
        assert!(!graph.is_valid() && !of_closed.is_valid());
        // A deadline ends a graph's kernels too.
        let late = setup.dev()?;
        let graph = capture(&late)?;
        graph.launch(&other)?;
        let missed = |cause| matches!(cause, AbortCause::Deadline { .. });
        let limit = Duration::from_millis(20);
        assert_aborted(other.synchronize_within(limit), missed, rank.rank());
        Ok(())
    });
}

#[test]
fn an_abort_after_the_end_of_everything_does_nothing() {
    let handles = Mutex::new(Vec::<KernelAbortHandle>::new());
    let keep = |dev: &DevCommResource| handles.lock().push(dev.abort_handle());
    ranks(2, |rank| {
        let setup = Setup::new(rank)?;
        let dev = setup.dev()?;
        keep(&dev);
        setup.launch(&setup.stream, &dev)?;
        dev.abort();
        assert_aborted(setup.stream.synchronize(), is_request, rank.rank());
        Ok(())
    });
    // This world's device communicators are not closed, because a rank is lost.
    let lost = world(2).run(|rank| {
        let dev = Setup::new(rank)?.dev()?;
        keep(&dev);
        rank.barrier()?;
        if rank.rank() == 1 { Err(Error::Driver(DriverError::NoGpu)) } else { rank.barrier() }
    });
    assert!(lost.is_err());
    let handles = handles.into_inner();
    assert_eq!(handles.len(), 4);
    std::thread::spawn(move || handles.iter().for_each(KernelAbortHandle::abort)).join().unwrap();
}

#[test]
fn kernels_that_have_ended_are_not_aborted() {
    ranks(2, |rank| {
        let setup = Setup::new(rank)?;
        let dev = setup.dev()?;
        setup.launch_from(0, &setup.stream, &dev)?;
        setup.stream.synchronize()?;
        dev.abort();
        setup.stream.synchronize()?;
        assert!(dev.stuck().is_empty());
        assert_refused(setup.launch(&setup.stream, &dev));
        drop(dev);
        Ok(())
    });
}

#[test]
fn a_rank_that_fails_while_its_kernels_wait_tells_the_others_before_it_waits_for_its_gpu() {
    let world = world(2);
    let failed = world.run(|rank| {
        let setup = Setup::new(rank)?;
        let (dev, memory) = (setup.dev()?, setup.comm.mem_alloc::<f32>(COUNT)?);
        if rank.is_root() {
            setup.launch(&setup.stream, &dev)?;
            // The destructors of pinned memory, of a stream and of `memory` would wait for the GPU,
            // whose kernel waits for rank 1: they must not, before rank 1 knows that this one
            // fails.
            let _pinned_and_stream = (rank.context().pinned::<f32>(COUNT)?, rank.stream()?);
            return Err(Error::Driver(DriverError::NoGpu));
        }
        let lost = rank.barrier().unwrap_err();
        assert!(lost.to_string().starts_with("rank 0 is lost: "), "{lost}");
        assert!(clock(rank) < Duration::from_secs(1), "{:?}", clock(rank));
        drop(memory);
        Err::<(), _>(lost)
    });
    assert!(matches!(failed, Err(Error::Driver(DriverError::NoGpu))), "{failed:?}");
    assert!(now(&world) < SOON, "{:?}", now(&world));
}

#[test]
fn what_is_dropped_while_the_gpu_uses_it_is_freed_when_the_gpu_has_finished() {
    let ran = ranks(2, |rank| {
        let Setup { comm, window, stream } = Setup::new(rank)?;
        let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(BLOCKS))?;
        // Until rank 1 launches its kernel, that of rank 0 waits, and uses what rank 0 drops.
        if rank.rank() == 1 {
            pause(rank, SOON);
        }
        // SAFETY: the kernel accesses no memory but barriers, at which both ranks meet.
        unsafe { meet::args(&dev, 0).grid(BLOCKS).block(32).launch(&stream) }?;
        let event = rank.context().event()?;
        stream.record(&event)?;
        let start = clock(rank);
        drop((window, dev, stream));
        assert!(clock(rank) - start < SOON / 2);
        let ends = |log: &[String]| {
            ["ncclDevCommDestroy", "ncclCommWindowDeregister", "ncclMemFree", "cuStreamDestroy"]
                .map(|call| count(log, call))
        };
        if rank.is_root() {
            assert_eq!(ends(&log_of(rank)), [0; 4]);
        }
        event.synchronize()?;
        // An allocation first frees what was dropped before, if the GPU has finished with it.
        let later = comm.mem_alloc::<f32>(COUNT)?;
        assert_eq!(ends(&log_of(rank)), [1; 4]);
        drop(later);
        Ok(())
    });
    // The window's memory and that of `later` are freed.
    assert_eq!(count(&log_in(&ran.world, 0), "ncclMemFree"), 2);
}
