//! What NCCL refuses, what it never returns from, and what fails in the background.

use std::time::{Duration, Instant};

use devcomm_host::{
    CommConfig, Communicator, DevCommRequirements, Error, Rank, ReduceOp, Result, ShrinkMode,
    World, group,
};

use crate::support::{assert_clean, contents, lines_of, log_of, ranks, tests};

tests! {
    a_call_that_nccl_refuses_is_named_with_its_rank_and_the_rest_is_closed_all_the_same
        in ["FAKE_FAIL" = "ncclGetUniqueId"] ["FAKE_FAIL" = "ncclCommInitRankScalable"]
           ["FAKE_FAIL" = "ncclMemAlloc"] ["FAKE_FAIL" = "ncclCommWindowRegister"]
           ["FAKE_FAIL" = "ncclCommRegister"] ["FAKE_FAIL" = "ncclRedOpCreatePreMulSum"]
           ["FAKE_FAIL" = "ncclCommQueryProperties"] ["FAKE_FAIL" = "ncclDevCommCreate"]
           ["FAKE_FAIL" = "ncclCommSplit"] ["FAKE_FAIL" = "ncclCommShrink"]
           ["FAKE_FAIL" = "ncclAllReduce"] ["FAKE_FAIL" = "ncclGroupStart"]
           ["FAKE_FAIL" = "ncclGroupEnd"] ["FAKE_FAIL" = "ncclCommSuspend"]
           ["FAKE_FAIL" = "ncclCommResume"] ["FAKE_FAIL" = "ncclCommRevoke"]
           ["FAKE_FAIL" = "ncclDevCommDestroy"] ["FAKE_FAIL" = "ncclRedOpDestroy"]
           ["FAKE_FAIL" = "ncclCommFinalize"]
           ["FAKE_FAIL" = "ncclCommDestroy"] ["FAKE_FAIL" = "ncclMemFree"],
    memory_whose_registration_does_not_end_is_not_freed
        in ["FAKE_FAIL" = "ncclCommWindowDeregister,ncclCommDeregister"],
    one_rank_that_fails_ends_the_job_with_its_error
        in ["FAKE_FAIL" = "ncclCommInitRankScalable:1"] ["FAKE_FAIL" = "ncclMemAlloc:1"]
           ["FAKE_FAIL" = "ncclCommWindowRegister:1"] ["FAKE_FAIL" = "ncclDevCommCreate:1"],
    a_rank_that_hangs_in_nccl_is_released_when_another_dies
        in ["FAKE_HANG_IN" = "ncclCommInitRankScalable:0", "FAKE_FAIL" = "ncclCommInitRankScalable:1"]
           ["FAKE_HANG_IN" = "ncclCommWindowRegister:0", "FAKE_FAIL" = "ncclCommWindowRegister:1"]
           ["FAKE_HANG_IN" = "ncclCommRegister:0", "FAKE_FAIL" = "ncclCommRegister:1"]
           ["FAKE_HANG_IN" = "ncclDevCommCreate:0", "FAKE_FAIL" = "ncclDevCommCreate:1"]
           ["FAKE_HANG_IN" = "ncclCommSplit:0", "FAKE_FAIL" = "ncclCommSplit:1"]
           ["FAKE_HANG_IN" = "ncclGroupEnd:0", "FAKE_FAIL" = "ncclGroupEnd:1"]
           ["FAKE_HANG_IN" = "ncclAllReduce:0", "FAKE_FAIL" = "ncclAllReduce:1"]
           ["FAKE_HANG_IN" = "ncclCommSuspend:0", "FAKE_FAIL" = "ncclCommSuspend:1"]
           ["FAKE_HANG_IN" = "ncclCommRevoke:0", "FAKE_FAIL" = "ncclCommRevoke:1"]
           ["FAKE_HANG_IN" = "ncclCommFinalize:0", "FAKE_FAIL" = "ncclCommFinalize:1"]
           ["FAKE_HANG_IN" = "ncclCommDestroy:0", "FAKE_FAIL" = "ncclCommDestroy:1"],
    ranks_that_wait_for_each_other_in_nccl_are_released_when_one_never_comes,
    a_rank_that_waits_for_an_operation_is_released_when_another_panics,
    what_fails_in_the_background_is_the_error_of_who_waits in ["FAKE_ASYNC_ERROR" = "6:0"],
    a_missed_deadline_ends_the_waits_on_that_gpu,
}

/// One call that the fakes refuse; the others that it takes succeed.
fn call(rank: &Rank, function: &str) -> Result<()> {
    let (comm, config) = (|| rank.communicator(), CommConfig::new());
    match function {
        "ncclGetUniqueId" => rank.library().unique_id().map(drop),
        "ncclCommInitRankScalable" => rank.new_communicator(&config).map(drop),
        "ncclMemAlloc" => comm()?.mem_alloc::<f32>(8).map(drop),
        "ncclCommWindowRegister" => comm()?.window::<f32>(8).map(drop),
        "ncclCommRegister" => {
            let comm = comm()?;
            comm.register_buffer(&comm.mem_alloc::<f32>(8)?).map(drop)
        }
        "ncclRedOpCreatePreMulSum" => comm()?.pre_mul_sum(1.0_f32).map(drop),
        "ncclCommQueryProperties" => comm()?.properties().map(drop),
        "ncclDevCommCreate" => comm()?.create_dev_comm(DevCommRequirements::new()).map(drop),
        "ncclCommSplit" => comm()?.split(Some(0), 0, &config).map(drop),
        "ncclCommShrink" => comm()?.shrink(&[1 - rank.rank()], ShrinkMode::Idle, &config).map(drop),
        "ncclAllReduce" => sum(comm()?, rank).map(drop),
        "ncclGroupStart" | "ncclGroupEnd" => {
            let comm = comm()?;
            group(|_| comm.window::<f32>(8).map(drop))
        }
        "ncclCommSuspend" => comm()?.suspend(),
        "ncclCommResume" => comm()?.suspend().and_then(|()| comm()?.resume()),
        "ncclCommRevoke" => comm()?.revoke(),
        "ncclDevCommDestroy" => comm()?.create_dev_comm(DevCommRequirements::new())?.close(),
        "ncclRedOpDestroy" => comm()?.pre_mul_sum(1.0_f32)?.close(),
        "ncclCommFinalize" | "ncclCommDestroy" => comm()?.destroy(),
        // Who drops memory is told in the log only.
        "ncclMemFree" => comm()?.mem_alloc::<f32>(8).map(drop),
        other => panic!("no call of {other}"),
    }
}

fn sum(comm: &Communicator, rank: &Rank) -> Result<f32> {
    let (b, stream) = (comm.mem_alloc::<f32>(1)?, rank.stream()?);
    b.copy_from_host(&[1.0])?;
    comm.all_reduce(&b, &b, ReduceOp::Sum, &stream)?;
    stream.synchronize()?;
    Ok(contents(&b)[0])
}

/// The function that the environment lets fail, and the rank, if it is one only.
fn failing() -> (String, Option<usize>) {
    let list = std::env::var("FAKE_FAIL").unwrap();
    match list.split_once(':') {
        None => (list, None),
        Some((function, rank)) => (function.to_owned(), rank.parse().ok()),
    }
}

fn is_refused(error: &Error, function: &str, on: Option<usize>) {
    let of_no_rank = ["ncclGetUniqueId", "ncclMemAlloc", "ncclGroupStart", "ncclGroupEnd"];
    match error {
        Error::Nccl { operation, rank, code: 2, last_error, .. } => {
            assert_eq!(*operation, function);
            assert_eq!(*rank, on.filter(|_| !of_no_rank.contains(&function)));
            assert_eq!(*last_error, format!("{function}: FAKE_FAIL"));
        }
        other => panic!("{other:?}"),
    }
}

fn count(log: &[String], call: &str) -> usize {
    log.iter().filter(|line| line.split(' ').next() == Some(call)).count()
}

fn a_call_that_nccl_refuses_is_named_with_its_rank_and_the_rest_is_closed_all_the_same() {
    let (function, _) = failing();
    ranks(2, |rank| {
        match call(rank, &function) {
            Ok(()) => assert_eq!(function, "ncclMemFree"),
            Err(error) => is_refused(&error, &function, Some(rank.rank())),
        }
        Ok(())
    });
    for gpu in 0..2 {
        let log = log_of(gpu);
        if !matches!(&*function, "ncclMemAlloc" | "ncclMemFree") {
            assert_eq!(count(&log, "ncclMemAlloc"), count(&log, "ncclMemFree"), "{log:?}");
        }
        if !matches!(&*function, "ncclGetUniqueId" | "ncclCommInitRankScalable") {
            let ended = count(&log, "ncclCommDestroy") + count(&log, "ncclCommAbort");
            assert_eq!(ended, 1, "{log:?}");
        }
        assert_eq!(log.last().unwrap(), "cuDevicePrimaryCtxRelease");
    }
    assert_clean();
}

fn memory_whose_registration_does_not_end_is_not_freed() {
    ranks(2, |rank| {
        let (comm, me) = (rank.communicator()?, Some(rank.rank()));
        let (window, dropped) = (comm.window::<f32>(8)?, comm.window::<f32>(8)?);
        let registered = comm.register_buffer(&comm.mem_alloc::<f32>(8)?)?;
        is_refused(&window.close().unwrap_err(), "ncclCommWindowDeregister", me);
        is_refused(&registered.close().unwrap_err(), "ncclCommDeregister", me);
        window.close().and_then(|()| registered.close())?;
        drop((window, dropped, registered));
        assert_eq!(count(&log_of(rank.device()), "ncclMemFree"), 0);
        Ok(())
    });
    assert_eq!(count(&log_of(0), "ncclCommDestroy"), 1);
    assert_clean();
}

fn one_rank_that_fails_ends_the_job_with_its_error() {
    let ((function, on), start) = (failing(), Instant::now());
    let error = World::threads(2).unwrap().run(|rank| call(rank, &function)).unwrap_err();
    is_refused(&error, &function, on);
    assert!(start.elapsed() < RELEASED, "{:?}", start.elapsed());
    for gpu in 0..2 {
        // Nobody finalizes, which would be waiting for the other.
        assert_eq!(count(&log_of(gpu), "ncclCommFinalize"), 0);
    }
    assert_clean();
}

/// How long a healthy rank may wait for one that is gone.
const RELEASED: Duration = Duration::from_secs(5);

fn a_rank_that_hangs_in_nccl_is_released_when_another_dies() {
    let ((function, _), start) = (failing(), Instant::now());
    let died = World::threads(2).unwrap().run(|rank| {
        // What has to be there already, on both.
        if function != "ncclCommInitRankScalable" {
            rank.communicator()?;
        }
        rank.barrier()?;
        let failed = call(rank, &function).unwrap_err();
        if rank.rank() == 1 {
            is_refused(&failed, &function, Some(1));
            std::thread::sleep(Duration::from_millis(100));
            panic!("no more");
        }
        let lost = failed.to_string();
        assert_eq!(lost, "rank 1 is lost: rank 1 panicked: no more");
        assert!(start.elapsed() < RELEASED, "{:?}", start.elapsed());
        Err::<(), _>(failed)
    });
    assert!(matches!(died, Err(Error::RankPanicked { rank: 1, .. })), "{died:?}");
    assert!(start.elapsed() < RELEASED, "{:?}", start.elapsed());
    assert_eq!(count(&log_of(0), "ncclMemFree"), 0, "{:?}", log_of(0));
}

fn ranks_that_wait_for_each_other_in_nccl_are_released_when_one_never_comes() {
    let start = Instant::now();
    let died = World::threads(3).unwrap().run(|rank| {
        let comm = rank.communicator()?;
        if rank.rank() == 2 {
            std::thread::sleep(Duration::from_millis(100));
            panic!("no more");
        }
        // Nothing on this GPU uses it, but a kernel of the lost rank may.
        let _idle = comm.mem_alloc::<f32>(8)?;
        comm.window::<f32>(8).map(drop)
    });
    assert!(matches!(died, Err(Error::RankPanicked { rank: 2, .. })), "{died:?}");
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    let log = std::fs::read_to_string(std::env::var("FAKE_LOG").unwrap()).unwrap();
    for gpu in 0..3 {
        assert_eq!(count(&lines_of(&log, gpu), "ncclCommAbort"), 1, "{log}");
        assert_eq!(count(&lines_of(&log, gpu), "ncclMemFree"), 0, "{log}");
    }
    assert_clean();
}

fn a_rank_that_waits_for_an_operation_is_released_when_another_panics() {
    let start = Instant::now();
    let died = World::threads(2).unwrap().run(|rank| {
        let comm = rank.communicator()?;
        if rank.rank() == 1 {
            panic!("no more");
        }
        match sum(comm, rank) {
            Err(lost @ Error::RankLost { rank: 1, .. }) => Err::<(), _>(lost),
            other => panic!("{other:?}"),
        }
    });
    assert!(matches!(died, Err(Error::RankPanicked { rank: 1, .. })), "{died:?}");
    assert!(start.elapsed() < RELEASED, "{:?}", start.elapsed());
    let log = log_of(0);
    assert_eq!((count(&log, "ncclCommAbort"), count(&log, "ncclMemFree")), (1, 0), "{log:?}");
}

fn what_fails_in_the_background_is_the_error_of_who_waits() {
    let failed = World::threads(2).unwrap().run(|rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let b = comm.mem_alloc::<f32>(1)?;
        if rank.rank() == 1 {
            // The one operation of the two that never comes.
            rank.barrier()?;
            return Ok(());
        }
        comm.all_reduce(&b, &b, ReduceOp::Sum, &stream)?;
        let failed = stream.synchronize().unwrap_err();
        match &failed {
            Error::Nccl { operation, code: 6, rank: Some(0), .. } => {
                assert_eq!(*operation, "an asynchronous NCCL operation");
            }
            other => panic!("{other:?}"),
        }
        assert!(!comm.is_valid());
        assert_eq!(count(&log_of(0), "ncclCommAbort"), 1);
        Err(failed)
    });
    assert!(matches!(failed, Err(Error::Nccl { code: 6, .. })), "{failed:?}");
    assert_clean();
}

fn a_missed_deadline_ends_the_waits_on_that_gpu() {
    let missed = World::threads(2).unwrap().run(|rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let b = comm.mem_alloc::<f32>(1)?;
        comm.recv(&b, 1 - rank.rank(), &stream)?;
        let limit = Duration::from_millis(30);
        let missed = stream.synchronize_within(limit).unwrap_err();
        assert!(matches!(missed, Error::DeadlinePassed { waited } if waited >= limit));
        // From now on nobody waits for this GPU, and nothing that it may use is freed.
        let start = Instant::now();
        for again in [stream.synchronize(), b.copy_from_host(&[0.0]), comm.destroy()] {
            assert!(matches!(again, Err(Error::DeadlinePassed { .. })), "{again:?}");
        }
        drop(b);
        assert!(start.elapsed() < Duration::from_millis(500));
        assert_eq!(count(&log_of(rank.device()), "ncclMemFree"), 0);
        Err::<(), _>(missed)
    });
    assert!(matches!(missed, Err(Error::DeadlinePassed { .. })), "{missed:?}");
}
