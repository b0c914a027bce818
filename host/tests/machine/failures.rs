//! Tests of NCCL calls that fail, never return, or fail asynchronously.

use std::time::Duration;

use devcomm_host::{
    CommConfig, DevCommRequirements, DevCommResource, DriverError, Effect, Error, Fault, NcclError,
    Rank, ReduceOp, Result, ShrinkMode, StateError, World, WorldError, group,
};
use parking_lot::Mutex;

use crate::kernels::{COUNT, NO_PTX, meet, store_beyond};
use crate::support::{
    contents, count, failed_calls, filled, inject, log_in, log_of, now, pause, unchecked_world,
    world,
};

/// NCCL functions, each with code that calls it.
type Calls = [(&'static str, fn(&Rank) -> Result<()>); 21];
const CALLS: Calls = [
    ("ncclGetUniqueId", |rank| rank.library().unique_id().map(drop)),
    ("ncclCommInitRankScalable", |rank| rank.new_communicator(&CommConfig::new()).map(drop)),
    ("ncclMemAlloc", |rank| rank.communicator()?.mem_alloc::<f32>(8).map(drop)),
    ("ncclCommWindowRegister", |rank| rank.communicator()?.window::<f32>(8).map(drop)),
    ("ncclCommRegister", |rank| {
        let comm = rank.communicator()?;
        comm.register_buffer(&comm.mem_alloc::<f32>(8)?).map(drop)
    }),
    ("ncclRedOpCreatePreMulSum", |rank| rank.communicator()?.pre_mul_sum(1.0_f32).map(drop)),
    ("ncclCommQueryProperties", |rank| rank.communicator()?.properties().map(drop)),
    ("ncclDevCommCreate", |rank| dev_comm(rank).map(drop)),
    ("ncclCommSplit", |rank| rank.communicator()?.split(Some(0), 0, &CommConfig::new()).map(drop)),
    ("ncclCommShrink", |rank| {
        let (others, config) = ([1 - rank.rank()], CommConfig::new());
        rank.communicator()?.shrink(&others, ShrinkMode::Idle, &config).map(drop)
    }),
    ("ncclAllReduce", |rank| sum(rank).map(drop)),
    ("ncclGroupStart", windows_of_a_group),
    ("ncclGroupEnd", windows_of_a_group),
    ("ncclCommSuspend", |rank| rank.communicator()?.suspend()),
    ("ncclCommResume", |rank| {
        let comm = rank.communicator()?;
        comm.suspend().and_then(|()| comm.resume())
    }),
    ("ncclCommRevoke", |rank| rank.communicator()?.revoke()),
    ("ncclDevCommDestroy", |rank| dev_comm(rank)?.close()),
    ("ncclRedOpDestroy", |rank| rank.communicator()?.pre_mul_sum(1.0_f32)?.close()),
    ("ncclCommFinalize", |rank| rank.communicator()?.destroy()),
    ("ncclCommDestroy", |rank| rank.communicator()?.destroy()),
    // A drop returns no error; only the call record shows the failure.
    ("ncclMemFree", |rank| rank.communicator()?.mem_alloc::<f32>(8).map(drop)),
];

/// Runs the code of [`CALLS`] that calls a function.
fn call(rank: &Rank, function: &str) -> Result<()> {
    let (_, call) = CALLS.iter().find(|(name, _)| *name == function).expect("listed in CALLS");
    call(rank)
}

fn dev_comm(rank: &Rank) -> Result<DevCommResource> {
    rank.communicator()?.create_dev_comm(DevCommRequirements::new())
}

fn windows_of_a_group(rank: &Rank) -> Result<()> {
    let comm = rank.communicator()?;
    group(|_| comm.window::<f32>(8).map(drop))
}

fn sum(rank: &Rank) -> Result<f32> {
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let b = filled(comm, &[1.0_f32])?;
    comm.all_reduce(&b, &b, ReduceOp::Sum, &stream)?;
    stream.synchronize()?;
    Ok(contents(&b)[0])
}

/// A failure with the code of `ncclSystemError`.
const REFUSAL: Effect = Effect::Fail(2);
/// The delay before a rank panics.
const A_WHILE: Duration = Duration::from_millis(100);

#[track_caller]
fn assert_refused(error: &Error, function: &str, on: Option<usize>) {
    let of_no_rank = ["ncclGetUniqueId", "ncclMemAlloc", "ncclGroupStart", "ncclGroupEnd"];
    match error {
        Error::Nccl(NcclError::Failed { operation, rank, code: 2, last_error, .. }) => {
            assert_eq!(*operation, function);
            assert_eq!(*rank, on.filter(|_| !of_no_rank.contains(&function)));
            assert_eq!(*last_error, format!("{function}: injected fault"));
        }
        other => panic!("{other:?}"),
    }
}

/// Checks that only calls of `function` failed.
#[track_caller]
fn only_failed(world: &World, function: &str) {
    let refused = failed_calls(world);
    assert!(refused.iter().all(|call| call.function == function), "{refused:#?}");
}

#[test]
fn a_call_that_nccl_refuses_is_named_with_its_rank_and_the_rest_is_closed_all_the_same() {
    for (function, call) in CALLS {
        let world = world(2);
        inject(&world, function, None, REFUSAL);
        let refused = |rank: &Rank| -> Result<()> {
            match call(rank) {
                Ok(()) => assert_eq!(function, "ncclMemFree"),
                Err(error) => assert_refused(&error, function, Some(rank.rank())),
            }
            Ok(())
        };
        world.run(refused).unwrap();
        for gpu in 0..2 {
            let log = log_in(&world, gpu);
            if !matches!(function, "ncclMemAlloc" | "ncclMemFree") {
                let freed = [count(&log, "ncclMemAlloc"), count(&log, "ncclMemFree")];
                assert_eq!(freed[0], freed[1], "{log:?}");
            }
            if !matches!(function, "ncclGetUniqueId" | "ncclCommInitRankScalable") {
                let ended = count(&log, "ncclCommDestroy") + count(&log, "ncclCommAbort");
                assert_eq!(ended, 1, "{log:?}");
            }
            assert_eq!(log.last().unwrap(), "cuDevicePrimaryCtxRelease");
        }
        only_failed(&world, function);
    }
}

#[test]
fn memory_whose_registration_does_not_end_is_not_freed() {
    let world = world(2);
    inject(&world, "ncclCommWindowDeregister", None, REFUSAL);
    inject(&world, "ncclCommDeregister", None, REFUSAL);
    let refused = |rank: &Rank| -> Result<()> {
        let (comm, me) = (rank.communicator()?, Some(rank.rank()));
        let (window, dropped) = (comm.window::<f32>(8)?, comm.window::<f32>(8)?);
        let registered = comm.register_buffer(&comm.mem_alloc::<f32>(8)?)?;
        assert_refused(&window.close().unwrap_err(), "ncclCommWindowDeregister", me);
        assert_refused(&registered.close().unwrap_err(), "ncclCommDeregister", me);
        window.close().and_then(|()| registered.close())?;
        drop((window, dropped, registered));
        assert_eq!(count(&log_of(rank), "ncclMemFree"), 0);
        Ok(())
    };
    world.run(refused).unwrap();
    assert_eq!(count(&log_in(&world, 0), "ncclCommDestroy"), 1);
}

#[test]
fn one_rank_that_fails_ends_the_job_with_its_error() {
    for function in
        ["ncclCommInitRankScalable", "ncclMemAlloc", "ncclCommWindowRegister", "ncclDevCommCreate"]
    {
        let world = world(2);
        inject(&world, function, 1, REFUSAL);
        let error = world.run(|rank| call(rank, function)).unwrap_err();
        assert_refused(&error, function, Some(1));
        assert!(now(&world) < RELEASE_LIMIT, "{:?}", now(&world));
        for gpu in 0..2 {
            // Finalizing would wait for the other rank.
            assert_eq!(count(&log_in(&world, gpu), "ncclCommFinalize"), 0);
        }
    }
}

/// How long a healthy rank may wait for a lost one, by the machine's clock.
const RELEASE_LIMIT: Duration = Duration::from_secs(5);

#[test]
fn a_rank_that_hangs_in_nccl_is_released_when_another_dies() {
    for function in [
        "ncclCommInitRankScalable",
        "ncclCommWindowRegister",
        "ncclCommRegister",
        "ncclDevCommCreate",
        "ncclCommSplit",
        "ncclGroupEnd",
        "ncclAllReduce",
        "ncclCommSuspend",
        "ncclCommRevoke",
        "ncclCommFinalize",
        "ncclCommDestroy",
    ] {
        let world = world(2);
        // The fault hits once, since the call that stops a hanging one may be of the same function.
        let hang = Fault { function, gpu: Some(0), nth: Some(0), effect: Effect::Hang };
        world.simulated_machine().unwrap().inject(hang);
        inject(&world, function, 1, REFUSAL);
        let died = world.run(|rank| {
            // Both ranks create the communicator before the function is called.
            if function != "ncclCommInitRankScalable" {
                rank.communicator()?;
            }
            rank.barrier()?;
            let failed = call(rank, function).unwrap_err();
            if rank.rank() == 1 {
                assert_refused(&failed, function, Some(1));
                pause(rank, A_WHILE);
                panic!("no more");
            }
            let lost = failed.to_string();
            assert_eq!(lost, "rank 1 is lost: rank 1 panicked: no more", "{function}");
            Err::<(), _>(failed)
        });
        assert!(
            matches!(died, Err(Error::World(WorldError::RankPanicked { rank: 1, .. }))),
            "{died:?}"
        );
        assert!(now(&world) < RELEASE_LIMIT, "{function}: {:?}", now(&world));
        let log = log_in(&world, 0);
        assert_eq!(count(&log, "ncclMemFree"), 0, "{log:?}");
    }
}

#[test]
fn ranks_that_wait_for_each_other_in_nccl_are_released_when_one_never_comes() {
    let world = world(3);
    let died = world.run(|rank| {
        let comm = rank.communicator()?;
        if rank.rank() == 2 {
            pause(rank, A_WHILE);
            panic!("no more");
        }
        // This memory is not freed: a kernel of the lost rank may still access it.
        let _idle = comm.mem_alloc::<f32>(8)?;
        comm.window::<f32>(8).map(drop)
    });
    assert!(
        matches!(died, Err(Error::World(WorldError::RankPanicked { rank: 2, .. }))),
        "{died:?}"
    );
    assert!(now(&world) < RELEASE_LIMIT, "{:?}", now(&world));
    for gpu in 0..3 {
        let log = log_in(&world, gpu);
        let ends = [count(&log, "ncclCommAbort"), count(&log, "ncclMemFree")];
        assert_eq!(ends, [1, 0], "{log:?}");
    }
}

#[test]
fn a_rank_that_waits_for_an_operation_is_released_when_another_panics() {
    let world = world(2);
    let died = world.run(|rank| {
        rank.communicator()?;
        rank.barrier()?;
        if rank.rank() == 1 {
            panic!("no more");
        }
        match sum(rank) {
            Err(lost @ Error::World(WorldError::RankLost { rank: 1, .. })) => Err::<(), _>(lost),
            other => panic!("{other:?}"),
        }
    });
    assert!(
        matches!(died, Err(Error::World(WorldError::RankPanicked { rank: 1, .. }))),
        "{died:?}"
    );
    assert!(now(&world) < RELEASE_LIMIT, "{:?}", now(&world));
    let log = log_in(&world, 0);
    assert_eq!((count(&log, "ncclCommAbort"), count(&log, "ncclMemFree")), (1, 0), "{log:?}");
}

#[test]
fn a_failure_in_the_background_is_the_error_of_the_waiting_call() {
    let world = unchecked_world(2);
    // 6 is the code of `ncclRemoteError`.
    inject(&world, "ncclAllReduce", 0, Effect::Later(6));
    let failed = world.run(|rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let b = comm.mem_alloc::<f32>(1)?;
        if rank.rank() == 1 {
            // This rank never calls the all-reduce.
            rank.barrier()?;
            return Ok(());
        }
        comm.all_reduce(&b, &b, ReduceOp::Sum, &stream)?;
        let failed = stream.synchronize().unwrap_err();
        match &failed {
            Error::Nccl(NcclError::Failed { operation, code: 6, rank: Some(0), .. }) => {
                assert_eq!(*operation, "an asynchronous NCCL operation");
            }
            other => panic!("{other:?}"),
        }
        assert!(!comm.is_valid());
        assert_eq!(count(&log_of(rank), "ncclCommAbort"), 1);
        Err(failed)
    });
    assert!(matches!(failed, Err(Error::Nccl(NcclError::Failed { code: 6, .. }))), "{failed:?}");
}

/// The drop of a communicator must not wait for the other ranks when its rank fails: they wait for
/// that rank in another call.
#[test]
fn the_error_of_a_rank_that_drops_a_communicator_is_the_jobs_error() {
    for panics in [false, true] {
        let world = world(2);
        let failed: Result<Vec<()>> = world.run(|rank| {
            let comm = rank.new_communicator(&CommConfig::new())?;
            let _window = comm.window::<f32>(8)?;
            if rank.rank() == 0 {
                assert!(!panics, "the first error");
                return Err(Error::InvalidInput { what: "the first error".to_owned() });
            }
            let waited = rank.barrier().unwrap_err();
            let Error::World(WorldError::RankLost { rank: 0, why }) = &waited else {
                panic!("{waited}")
            };
            assert!(why.contains("the first error"), "{why}");
            Err(waited)
        });
        assert!(failed.unwrap_err().to_string().contains("the first error"));
        // The drop has not waited for the other rank.
        let log = log_in(&world, 0);
        assert_eq!((count(&log, "ncclCommFinalize"), count(&log, "ncclCommAbort")), (0, 1));
    }
}

#[test]
fn communicators_that_are_dropped_end_with_the_ranks_function_in_one_order() {
    let world = world(2);
    let ran: Result<Vec<()>> = world.run(|rank| {
        let mut comms =
            vec![rank.new_communicator(&CommConfig::new())?, rank.communicator()?.clone()];
        comms.push(rank.new_communicator(&CommConfig::new())?);
        comms.rotate_left(rank.rank());
        drop(comms);
        assert_eq!(count(&log_of(rank), "ncclCommFinalize"), 0);
        Ok(())
    });
    ran.unwrap();
    for rank in 0..2 {
        let log = log_in(&world, rank);
        assert_eq!((count(&log, "ncclCommFinalize"), count(&log, "ncclCommAbort")), (3, 0));
    }
}

#[test]
fn a_kernel_that_fails_is_the_worlds_error_even_if_no_call_waits_for_it() {
    // Case 0: the stream and the window are dropped; 1: they are held; 2: another rank waits for
    // its own stream.
    for case in 0..3 {
        let held = Mutex::new(Vec::new());
        let failed: Result<Vec<()>> = world(2).run(|rank| {
            let (comm, stream) = (rank.communicator()?, rank.stream()?);
            rank.load(&NO_PTX)?;
            let window = comm.window::<f32>(COUNT)?;
            if rank.rank() == 1 {
                // SAFETY: GPUs are simulated.
                unsafe { store_beyond::args(&window).grid(1).block(1).launch(&stream)? };
            } else if case == 2 {
                rank.context().stream()?.synchronize()?;
            }
            if case == 1 {
                held.lock().push((stream, window));
            }
            Ok(())
        });
        drop(held);
        let Err(Error::Driver(DriverError::Failed { .. })) = &failed else { panic!("{failed:?}") };
        let text = failed.unwrap_err().to_string();
        assert!(text.contains("store_beyond"), "{text}");
    }
}

#[test]
fn a_kernel_that_waits_for_ever_is_the_worlds_error_even_if_no_call_waits_for_it() {
    let failed: Result<Vec<()>> = world(2).run(|rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        rank.load(&NO_PTX)?;
        let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
        if rank.rank() == 1 {
            // SAFETY: the kernel accesses no memory.
            unsafe { meet::args(&dev, 0).grid(1).block(32).launch(&stream)? };
        }
        Ok(())
    });
    let Err(Error::State(StateError::Deadlock { .. })) = &failed else { panic!("{failed:?}") };
    let text = failed.unwrap_err().to_string();
    assert!(text.contains("`meet`") && text.contains("rank 0 has not arrived"), "{text}");
}

#[test]
fn a_kernel_that_fails_after_a_call_of_the_driver_is_the_worlds_error() {
    let failed: Result<Vec<()>> = world(1).run(|rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        rank.load(&NO_PTX)?;
        let window = comm.window::<f32>(COUNT)?;
        let (function, effect) = ("cuLaunchKernelEx", Effect::Fail(1));
        let fault = Fault { function, gpu: None, nth: Some(0), effect };
        rank.simulated_machine().unwrap().inject(fault);
        // SAFETY: GPUs are simulated.
        let launch = || unsafe { store_beyond::args(&window).grid(1).block(1).launch(&stream) };
        let text = launch().unwrap_err().to_string();
        assert!(text.contains("cuLaunchKernelEx"), "{text}");
        launch()
    });
    let text = failed.unwrap_err().to_string();
    assert!(text.contains("store_beyond"), "{text}");
}
