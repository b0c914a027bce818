//! Tests of whole jobs: the order of calls on each GPU, and the resources that are not freed when a
//! rank is lost.

use std::time::Duration;

use devcomm_host::{
    DevCommError, DevCommRequirements, Effect, Error, LaunchConfig, LaunchError, LaunchRefusal,
    Rank, ReduceOp, Result, Simulation, StateError, Stream, World, WorldError,
};

use crate::kernels::{COUNT, NO_PTX, launch_never_end, launch_store_count, store_count};
use crate::support::{
    assert_invalid, contents, count, inject, log_in, pause, ranks, ranks_on, simulation, world,
    world_on,
};

/// Does the work of one rank: uses each kind of resource once.
fn work(rank: &Rank) -> Result<f32> {
    let comm = rank.communicator()?;
    assert_eq!(
        (comm.rank(), comm.n_ranks(), comm.device()),
        (rank.rank(), rank.n_ranks(), rank.rank())
    );
    let nccl_rank = rank.rank() as i32;
    assert_eq!(comm.identity()?, (nccl_rank, rank.n_ranks() as i32, nccl_rank));
    comm.require_single_lsa_team()?;
    let (send, recv) = (comm.window::<f32>(COUNT)?, comm.window::<f32>(COUNT)?);
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(8))?;
    send.copy_from_host(&[1.5; COUNT])?;
    rank.load(&NO_PTX)?;
    let stream = rank.stream()?;
    let (start, stop) = (rank.context().event()?, rank.context().event()?);
    stream.record(&start)?;
    let config = LaunchConfig::new(8, 256).with_dynamic_shared(100 << 10);
    launch_store_count(&stream, config, (&dev, &send))?;
    launch_store_count(&stream, config.without_cooperation(), (&dev, &send))?;
    comm.all_reduce(&send, &recv, ReduceOp::Sum, &stream)?;
    stream.record(&stop)?;
    stream.synchronize()?;
    assert!(stop.elapsed_ms(&start)? >= 0.0);
    comm.async_error()?;
    comm.barrier()?;
    // The kernel received its rank and `count`.
    assert_eq!(contents(&send)[rank.rank()], COUNT as f32);
    Ok(contents(&recv)[COUNT - 1])
}

#[test]
fn a_job_makes_launches_and_closes_everything_in_order_on_its_own_gpu() {
    let ran = ranks(2, work);
    assert_eq!(ran.results, [3.0; 2]);
    for rank in 0..2 {
        let expected = format!(
            "ncclCommInitRankScalable {rank} of 2
ncclMemAlloc 4000
ncclCommWindowRegister 4000 flags 1
ncclMemAlloc 4000
ncclCommWindowRegister 4000 flags 1
cuMemHostAlloc
ncclDevCommCreate 8 barriers
cuFuncSetAttribute 8 102400
cuLaunchKernelEx store_count grid [8, 1, 1] block [256, 1, 1] shared 102400 cooperative true
cuLaunchKernelEx store_count grid [8, 1, 1] block [256, 1, 1] shared 102400 cooperative false
ncclAllReduce 1000 type 7 op 0
cuStreamDestroy
ncclDevCommDestroy
ncclCommWindowDeregister
ncclMemFree
ncclCommWindowDeregister
ncclMemFree
ncclCommFinalize
ncclCommDestroy
cuModuleUnload
cuMemFreeHost
cuDevicePrimaryCtxRelease"
        );
        assert_eq!(log_in(&ran.world, rank).join("\n"), expected, "rank {rank}");
    }
}

#[track_caller]
fn refusal(result: Result<()>) -> LaunchRefusal {
    match result {
        Err(Error::Launch(LaunchError::Refused { kernel: "store_count", refusal })) => refusal,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_launch_that_would_hang_is_refused_before_the_driver_sees_it() {
    let ran = ranks_on(simulation().multimem(false), 2, |rank| {
        let comm = rank.communicator()?;
        let window = comm.window::<f32>(COUNT)?;
        let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(8))?;
        rank.load(&NO_PTX)?;
        let stream = rank.stream()?;
        let launch = |grid, block: (u32, u32)| {
            let config = LaunchConfig::new(grid, block);
            refusal(launch_store_count(&stream, config, (&dev, &window)))
        };
        // 132 multiprocessors with room for 32 blocks of 64 threads, or 8 of 256 threads.
        assert!(matches!(launch(132 * 32 + 1, (64, 1)), LaunchRefusal::NotResident { .. }));
        assert!(matches!(launch(1, (8, 8)), LaunchRefusal::NotOneDimensional { .. }));
        assert!(matches!(launch(0, (8, 1)), LaunchRefusal::Empty { .. }));
        assert_eq!(stream.context().resident_blocks::<store_count>(256, 0)?, 132 * 8);
        let short = comm.mem_alloc::<f32>(COUNT - 1)?;
        assert_invalid(comm.all_reduce(&window, &short, ReduceOp::Sum, &stream));
        assert_invalid(comm.window::<f32>(0));
        assert_invalid(comm.window::<f32>(usize::MAX));
        let multimem = DevCommRequirements::new().lsa_multimem(true);
        let refused = comm.create_dev_comm(multimem).unwrap_err().to_string();
        let refuser = format!("rank {} refuses: ", rank.rank());
        assert!(
            refused.contains(&refuser) && refused.contains("multimemSupport is false"),
            "{refused}"
        );
        Ok(())
    });
    for gpu in 0..2 {
        assert_eq!(count(&log_in(&ran.world, gpu), "cuLaunchKernelEx"), 0);
    }
}

/// Launches a kernel that never ends, and calls `wait` while resources are in use.
fn hang(rank: &Rank, wait: impl Fn(&Stream) -> Result<()>) -> Result<()> {
    let comm = rank.communicator()?;
    let _window = comm.window::<f32>(COUNT)?;
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(8))?;
    rank.load(&NO_PTX)?;
    let stream = rank.stream()?;
    launch_never_end(&stream, &dev)?;
    wait(&stream)
}

#[test]
fn a_lost_rank_releases_the_others_and_nothing_in_use_is_freed() {
    let world = world(2);
    let error = world.run(|rank| {
        hang(rank, |stream| {
            if rank.rank() == 1 {
                pause(rank, Duration::from_millis(200));
                panic!("no more");
            }
            let lost = stream.synchronize().unwrap_err();
            assert_eq!(lost.to_string(), "rank 1 is lost: rank 1 panicked: no more");
            Err(lost)
        })
    });
    assert!(
        matches!(error, Err(Error::World(WorldError::RankPanicked { rank: 1, .. }))),
        "{error:?}"
    );
    let (waiting, lost) = (log_in(&world, 0), log_in(&world, 1));
    for freed in ["ncclMemFree", "ncclCommWindowDeregister", "ncclCommDestroy"] {
        assert_eq!(count(&waiting, freed), 0, "{freed}: {waiting:?}");
    }
    // Finalizing would wait for the other rank.
    for log in [waiting, lost] {
        assert_eq!(count(&log, "ncclCommAbort"), 1, "{log:?}");
        assert_eq!(count(&log, "ncclCommFinalize"), 0, "{log:?}");
    }
}

#[test]
fn a_missed_deadline_is_an_error_and_nothing_in_use_is_freed() {
    let world = world(2);
    let limit = Duration::from_millis(50);
    let error = world.run(|rank| hang(rank, |stream| stream.synchronize_within(limit)));
    assert!(matches!(error, Err(Error::State(StateError::DeadlinePassed { .. }))), "{error:?}");
    for gpu in 0..2 {
        let log = log_in(&world, gpu);
        assert_eq!(count(&log, "cuLaunchKernelEx"), 1, "{log:?}");
        for freed in ["ncclMemFree", "ncclCommWindowDeregister"] {
            assert_eq!(count(&log, freed), 0, "{freed}: {log:?}");
        }
    }
}

#[test]
fn more_ranks_than_gpus_are_refused_with_both_numbers() {
    let text = World::builder().simulate(Simulation::new(2)).threads(3).unwrap_err().to_string();
    assert!(text.contains("3 GPUs were asked for, but only 2 are visible"), "{text}");
}

#[test]
fn ranks_without_symmetric_memory_get_no_window() {
    let world = world(2);
    inject(&world, "ncclCommWindowRegister", None, Effect::Null);
    let window = |rank: &Rank| rank.communicator()?.window::<f32>(COUNT).map(drop);
    let error = world.run(window).unwrap_err();
    assert!(matches!(error, Error::DevComm(DevCommError::NoWindow { bytes: 4000, .. })), "{error}");
}

#[test]
fn ranks_that_cannot_share_memory_are_named_with_their_hosts() {
    let world = world_on(Simulation::new(2).team_size(1), 2);
    let error = world.run(|rank| rank.communicator()?.require_single_lsa_team());
    let text = error.unwrap_err().to_string();
    assert!(text.contains("rank 0 on ") && text.contains("; rank 1 on "), "{text}");
}
