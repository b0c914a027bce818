//! Kernels that wait for a rank in vain, and who ends them.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use devcomm_host::{
    AbortCause, Communicator, DevCommRequirements, DevCommResource, Error, KernelAbortHandle,
    Kernels, LaunchConfig, LaunchRefusal, Rank, Result, Stream, StuckWait, WaitFor, WaitKind,
    Window, World,
};

use crate::support::{
    COUNT, KERNELS, assert_clean, contents, fill, is_ended, lines_of, log_of, ranks, tests,
};

tests! {
    kernels_leave_when_another_thread_says_so_and_the_wait_tells_what_they_waited_for
        in ["FAKE_SPIN" = "1"],
    other_device_communicators_of_the_context_go_on in ["FAKE_SPIN" = "1"],
    a_deadline_ends_the_kernels_of_its_stream_and_no_others in ["FAKE_SPIN" = "1"],
    a_deadline_ends_kernels_of_other_streams_that_its_stream_waits_for in ["FAKE_SPIN" = "1"],
    a_rank_that_is_lost_has_the_others_kernels_leave in ["FAKE_SPIN" = "1"],
    the_abort_of_a_communicator_has_its_kernels_leave_first in ["FAKE_SPIN" = "1"],
    an_abort_of_the_communicator_from_another_thread_has_its_kernels_leave in ["FAKE_SPIN" = "1"],
    kernels_leave_when_the_network_fails_and_the_wait_tells_nccls_error
        in ["FAKE_SPIN" = "1", "FAKE_ASYNC_ERROR_SPINNING" = "6"],
    who_waits_for_an_event_behind_them_is_told_too
        in ["FAKE_SPIN" = "1", "FAKE_ASYNC_ERROR_SPINNING" = "6"],
    kernels_in_graphs_leave_and_their_graph_is_refused in ["FAKE_SPIN" = "1"],
    an_abort_after_the_end_of_everything_does_nothing in ["FAKE_SPIN" = "1"],
    kernels_that_have_ended_are_not_aborted,
}

/// How long what should take milliseconds may take.
const SOON: Duration = Duration::from_secs(3);
const BLOCKS: u32 = 8;

/// What one rank launches with.
struct Bench {
    comm: Communicator,
    window: Window<f32>,
    kernels: Kernels,
    stream: Stream,
}

impl Bench {
    fn new(rank: &Rank) -> Result<Self> {
        let comm = rank.communicator()?.clone();
        let window = comm.window::<f32>(COUNT)?;
        Ok(Self { comm, window, kernels: rank.load(&KERNELS)?, stream: rank.stream()? })
    }

    fn dev(&self) -> Result<DevCommResource> {
        self.comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(BLOCKS))
    }

    fn launch(&self, stream: &Stream, dev: &DevCommResource) -> Result<()> {
        fill(&self.kernels, stream, LaunchConfig::new(BLOCKS, 32), (dev, &self.window))
    }
}

/// What the fakes' kernels note.
fn at_their_barriers(peer: usize) -> Vec<StuckWait> {
    let wait = |block| {
        let (kind, peer) = (WaitKind::LsaBarrier, peer as i32);
        let wait = WaitFor { kind, index: block, context: 0, peer, wanted: 1, seen: 0 };
        StuckWait { block, thread: 0, wait }
    };
    (0..BLOCKS).map(wait).collect()
}

#[track_caller]
fn is_aborted(result: Result<()>, why: impl Fn(AbortCause) -> bool, by_rank: usize) {
    match result {
        Err(Error::KernelAborted { rank, cause, stuck }) => {
            assert!(why(cause), "{cause:?}");
            assert_eq!((rank, stuck), (by_rank, at_their_barriers(1 - rank)));
        }
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn is_refused(result: Result<()>) {
    match result {
        Err(Error::Launch { kernel: "fill", refusal: LaunchRefusal::Aborted { .. } }) => {}
        other => panic!("{other:?}"),
    }
}

fn asked_for(cause: AbortCause) -> bool {
    cause == AbortCause::Request
}

fn kernels_leave_when_another_thread_says_so_and_the_wait_tells_what_they_waited_for() {
    ranks(2, |rank| {
        let bench = Bench::new(rank)?;
        for _ in 0..20 {
            let dev = bench.dev()?;
            assert!(dev.is_valid() && dev.stuck().is_empty());
            bench.launch(&bench.stream, &dev)?;
            let watchdog = dev.abort_handle();
            let watchdog = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(10));
                watchdog.abort();
                watchdog.clone().abort();
            });
            let start = Instant::now();
            is_aborted(bench.stream.synchronize(), asked_for, rank.rank());
            assert!(start.elapsed() < SOON);
            watchdog.join().unwrap();
            // Once.
            bench.stream.synchronize()?;
            assert!(!dev.is_valid());
            assert_eq!(dev.stuck(), at_their_barriers(1 - rank.rank()));
            let refused = bench.launch(&bench.stream, &dev);
            let text = refused.as_ref().unwrap_err().to_string();
            assert!(text.contains("was aborted (the program asked for it)"), "{text}");
            is_refused(refused);
            dev.close()?;
            assert_eq!(dev.stuck().len(), BLOCKS as usize);
        }
        bench.window.copy_from_host(&[1.0; COUNT])?;
        Ok(())
    });
    for gpu in 0..2 {
        let log = log_of(gpu);
        let count = |line: &str| log.iter().filter(|logged| *logged == line).count();
        assert_eq!((count("a kernel leaves"), count("ncclDevCommDestroy")), (20, 20), "{log:?}");
        // The memory is used again, and freed at the end.
        assert_eq!((count("cuMemHostAlloc 262208"), count("cuMemFreeHost")), (1, 1), "{log:?}");
    }
    assert_clean();
}

fn other_device_communicators_of_the_context_go_on() {
    ranks(2, |rank| {
        let (bench, other) = (Bench::new(rank)?, rank.stream()?);
        let (stuck, going_on) = (bench.dev()?, bench.dev()?);
        bench.launch(&bench.stream, &stuck)?;
        bench.launch(&other, &going_on)?;
        stuck.abort();
        is_aborted(bench.stream.synchronize(), asked_for, rank.rank());
        assert!(going_on.is_valid() && !other.is_idle()?);
        bench.launch(&bench.stream, &going_on)?;
        going_on.abort();
        is_aborted(bench.stream.synchronize(), asked_for, rank.rank());
        is_aborted(other.synchronize(), asked_for, rank.rank());
        stuck.close()
    });
    assert_clean();
}

fn a_deadline_ends_the_kernels_of_its_stream_and_no_others() {
    let limit = Duration::from_millis(30);
    ranks(2, |rank| {
        let (bench, other) = (Bench::new(rank)?, rank.stream()?);
        let (late, going_on) = (bench.dev()?, bench.dev()?);
        bench.launch(&bench.stream, &late)?;
        bench.launch(&other, &going_on)?;
        let missed = |cause| matches!(cause, AbortCause::Deadline { waited } if waited >= limit);
        is_aborted(bench.stream.synchronize_within(limit), missed, rank.rank());
        bench.stream.synchronize_within(limit)?;
        is_refused(bench.launch(&bench.stream, &late));
        assert!(going_on.is_valid() && !other.is_idle()?);
        going_on.abort();
        is_aborted(other.synchronize_within(SOON), asked_for, rank.rank());
        // The GPU is as good as before.
        bench.window.copy_from_host(&[3.0; COUNT])?;
        assert_eq!(contents(&bench.window)[COUNT - 1], 3.0);
        late.close()?;
        let again = bench.dev()?;
        bench.launch(&bench.stream, &again)?;
        is_aborted(bench.stream.synchronize_within(limit), missed, rank.rank());
        Ok(())
    });
    for gpu in 0..2 {
        assert!(log_of(gpu).iter().any(|line| line == "ncclMemFree"));
    }
    assert_clean();
}

fn a_deadline_ends_kernels_of_other_streams_that_its_stream_waits_for() {
    ranks(2, |rank| {
        let (bench, behind, event) = (Bench::new(rank)?, rank.stream()?, rank.context().event()?);
        let dev = bench.dev()?;
        bench.launch(&bench.stream, &dev)?;
        bench.stream.record(&event)?;
        behind.wait_event(&event)?;
        let limit = Duration::from_millis(30);
        let missed = |cause| matches!(cause, AbortCause::Deadline { .. });
        is_aborted(behind.synchronize_within(limit), missed, rank.rank());
        is_aborted(bench.stream.synchronize(), missed, rank.rank());
        Ok(())
    });
    assert_clean();
}

fn a_rank_that_is_lost_has_the_others_kernels_leave() {
    let start = Instant::now();
    let error = World::threads(2).unwrap().run(|rank| {
        let bench = Bench::new(rank)?;
        let dev = bench.dev()?;
        if rank.rank() == 1 {
            std::thread::sleep(Duration::from_millis(50));
            panic!("no more");
        }
        bench.launch(&bench.stream, &dev)?;
        let lost = bench.stream.synchronize().unwrap_err();
        assert_eq!(lost.to_string(), "rank 1 is lost: rank 1 panicked: no more");
        // It knows more, and the GPU is free.
        assert_eq!(dev.stuck(), at_their_barriers(1));
        assert!(bench.stream.is_idle()? && !dev.is_valid());
        Err::<(), _>(lost)
    });
    assert!(matches!(error, Err(Error::RankPanicked { rank: 1, .. })), "{error:?}");
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    let log = log_of(0);
    let at = |line: &str| log.iter().position(|logged| logged == line);
    assert!(at("a kernel leaves") < at("ncclCommAbort"), "{log:?}");
    assert_eq!((at("ncclMemFree"), at("cuMemFreeHost")), (None, None), "{log:?}");
}

fn by_its_end(cause: AbortCause) -> bool {
    cause == AbortCause::CommunicatorAborted
}

fn the_abort_of_a_communicator_has_its_kernels_leave_first() {
    ranks(2, |rank| {
        let bench = Bench::new(rank)?;
        let dev = bench.dev()?;
        bench.launch(&bench.stream, &dev)?;
        let start = Instant::now();
        bench.comm.abort()?;
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
        is_aborted(bench.stream.synchronize(), by_its_end, rank.rank());
        assert_eq!(dev.stuck().len(), BLOCKS as usize);
        is_ended(bench.dev(), "aborted");
        Ok(())
    });
    for gpu in 0..2 {
        let log = log_of(gpu);
        let freed = log.iter().filter(|line| ["ncclMemFree", "cuMemFreeHost"].contains(&&***line));
        assert_eq!(freed.count(), 2, "{log:?}");
    }
    assert_clean();
}

fn an_abort_of_the_communicator_from_another_thread_has_its_kernels_leave() {
    ranks(2, |rank| {
        let bench = Bench::new(rank)?;
        let dev = bench.dev()?;
        bench.launch(&bench.stream, &dev)?;
        let watchdog = bench.comm.abort_handle();
        let watchdog = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            watchdog.abort()
        });
        is_aborted(bench.stream.synchronize(), by_its_end, rank.rank());
        watchdog.join().unwrap()?;
        assert!(!dev.is_valid());
        bench.comm.destroy()
    });
    assert_clean();
}

fn kernels_leave_when_the_network_fails_and_the_wait_tells_nccls_error() {
    the_network_fails(|bench| bench.stream.synchronize());
}

fn who_waits_for_an_event_behind_them_is_told_too() {
    the_network_fails(|bench| {
        let event = bench.comm.context().event()?;
        bench.stream.record(&event)?;
        event.synchronize()
    });
}

fn the_network_fails(wait: fn(&Bench) -> Result<()>) {
    let failed = World::threads(2).unwrap().run(|rank| {
        let bench = Bench::new(rank)?;
        let dev = bench.dev()?;
        if rank.rank() == 1 {
            rank.barrier()?;
            return Ok(());
        }
        bench.launch(&bench.stream, &dev)?;
        let start = Instant::now();
        let failed = wait(&bench).unwrap_err();
        assert!(start.elapsed() < SOON);
        assert!(matches!(&failed, Error::Nccl { code: 6, rank: Some(0), .. }), "{failed}");
        assert!(!dev.is_valid() && !bench.comm.is_valid());
        assert_eq!(dev.stuck(), at_their_barriers(1));
        let log = log_of(0);
        let has = |line: &str| log.iter().any(|logged| logged == line);
        assert!(has("a kernel leaves") && has("ncclCommAbort"), "{log:?}");
        Err(failed)
    });
    assert!(matches!(failed, Err(Error::Nccl { code: 6, .. })), "{failed:?}");
    assert_clean();
}

fn kernels_in_graphs_leave_and_their_graph_is_refused() {
    ranks(2, |rank| {
        let bench = Bench::new(rank)?;
        let (dev, closed) = (bench.dev()?, bench.dev()?);
        let capture =
            |dev: &DevCommResource| bench.stream.capture(|| bench.launch(&bench.stream, dev));
        let (graph, of_closed) = (capture(&dev)?, capture(&closed)?);
        // A capture runs nothing.
        bench.stream.synchronize()?;
        closed.close()?;
        let gone = of_closed.launch(&bench.stream).unwrap_err().to_string();
        assert!(gone.contains("`fill` was not launched: the device communicator"), "{gone}");
        let other = rank.stream()?;
        graph.launch(&other)?;
        let watchdog = dev.abort_handle();
        let watchdog = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(10));
            watchdog.abort();
        });
        is_aborted(other.synchronize(), asked_for, rank.rank());
        watchdog.join().unwrap();
        is_refused(graph.launch(&other));
        assert!(!graph.is_valid() && !of_closed.is_valid());
        // By a deadline just as well.
        let late = bench.dev()?;
        let graph = capture(&late)?;
        graph.launch(&other)?;
        let missed = |cause| matches!(cause, AbortCause::Deadline { .. });
        let limit = Duration::from_millis(20);
        is_aborted(other.synchronize_within(limit), missed, rank.rank());
        Ok(())
    });
    assert_clean();
}

fn an_abort_after_the_end_of_everything_does_nothing() {
    let handles = Mutex::new(Vec::<KernelAbortHandle>::new());
    let keep = |dev: &DevCommResource| handles.lock().unwrap().push(dev.abort_handle());
    ranks(2, |rank| {
        let bench = Bench::new(rank)?;
        let dev = bench.dev()?;
        keep(&dev);
        bench.launch(&bench.stream, &dev)?;
        dev.abort();
        is_aborted(bench.stream.synchronize(), asked_for, rank.rank());
        Ok(())
    });
    // One that nobody closed, since a rank was lost.
    let lost = World::threads(2).unwrap().run(|rank| {
        let dev = Bench::new(rank)?.dev()?;
        keep(&dev);
        rank.barrier()?;
        if rank.rank() == 1 { Err(Error::NoGpu) } else { rank.barrier() }
    });
    assert!(lost.is_err());
    let handles = handles.into_inner().unwrap();
    assert_eq!(handles.len(), 4);
    std::thread::spawn(move || handles.iter().for_each(KernelAbortHandle::abort)).join().unwrap();
}

fn kernels_that_have_ended_are_not_aborted() {
    ranks(2, |rank| {
        let bench = Bench::new(rank)?;
        let dev = bench.dev()?;
        bench.launch(&bench.stream, &dev)?;
        bench.stream.synchronize()?;
        dev.abort();
        bench.stream.synchronize()?;
        assert!(dev.stuck().is_empty());
        is_refused(bench.launch(&bench.stream, &dev));
        drop(dev);
        Ok(())
    });
    let log = std::fs::read_to_string(std::env::var("FAKE_LOG").unwrap()).unwrap();
    assert!(!lines_of(&log, 0).iter().any(|line| line == "a kernel leaves"));
    assert_clean();
}
