//! The life of a job: what is done in what order on which GPU, and what is left alone when a rank
//! is lost.

use std::net::TcpListener;
use std::time::Duration;

use devcomm_host::{
    DevCommRequirements, Error, LaunchConfig, LaunchRefusal, Rank, ReduceOp, Result, World,
};
use libtest_mimic::Trial;

use crate::support::{
    BROKEN, COUNT, Fill, KERNELS, NEWER, Unknown, contents, fill, lines_of, log_of, ranks, run,
    tests,
};

tests! {
    a_job_makes_launches_and_closes_everything_in_order_on_its_own_gpu,
    a_process_that_dies_ends_the_job_although_another_waits_for_a_kernel
        in ["FAKE_HANG" = "1", "FAKE_GPUS" = "2"],
    a_program_starts_its_own_ranks in ["FAKE_GPUS" = "2"],
    a_launched_process_is_one_rank_and_works_on_its_own_gpu_alone in ["WORLD_SIZE" = "1", "RANK" = "0"],
    what_would_hang_or_is_not_there_is_refused_before_the_driver_sees_it,
    a_lost_rank_releases_the_others_and_nothing_in_use_is_freed in ["FAKE_HANG" = "1"],
    a_missed_deadline_is_an_error_and_nothing_in_use_is_freed in ["FAKE_HANG" = "1"],
    more_ranks_than_gpus_are_refused_with_both_numbers in ["FAKE_GPUS" = "2"],
    a_machine_without_a_gpu_is_named in ["FAKE_NO_GPU" = "1"],
    a_driver_that_is_too_old_is_named in ["FAKE_OLD_DRIVER" = "1"],
    an_nccl_of_a_later_cuda_than_the_drivers_makes_no_communicator in ["FAKE_CUDA_12" = "1"],
    ranks_without_symmetric_memory_get_no_window in ["FAKE_NO_WINDOW" = "1"],
    ranks_that_cannot_share_memory_are_named_with_their_hosts in ["FAKE_TWO_TEAMS" = "1"],
}

/// One rank's work: everything once.
fn work(rank: &Rank) -> Result<f32> {
    let comm = rank.communicator()?;
    assert_eq!(
        (comm.rank(), comm.n_ranks(), comm.device()),
        (rank.rank(), rank.n_ranks(), rank.rank())
    );
    let of_nccl = rank.rank() as i32;
    assert_eq!(comm.identity()?, (of_nccl, rank.n_ranks() as i32, of_nccl));
    comm.require_single_lsa_team()?;
    let (send, recv) = (comm.window::<f32>(COUNT)?, comm.window::<f32>(COUNT)?);
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(8))?;
    send.copy_from_host(&[1.5; COUNT])?;
    let (kernels, stream) = (rank.load(&KERNELS)?, rank.stream()?);
    let (start, stop) = (rank.context().event()?, rank.context().event()?);
    stream.record(&start)?;
    let config = LaunchConfig::new(8, 256).with_dynamic_shared(100 << 10);
    fill(&kernels, &stream, config, (&dev, &recv))?;
    comm.all_reduce(&send, &recv, ReduceOp::Sum, &stream)?;
    stream.record(&stop)?;
    stream.synchronize()?;
    assert_eq!(stop.elapsed_ms(&start)?, 1.5);
    comm.async_error()?;
    comm.barrier()?;
    Ok(contents(&recv)[COUNT - 1])
}

fn refusal(result: Result<()>) -> LaunchRefusal {
    match result {
        Err(Error::Launch { kernel: "fill", refusal }) => refusal,
        other => panic!("{other:?}"),
    }
}

fn refusals(rank: &Rank) -> Result<()> {
    let comm = rank.communicator()?;
    let window = comm.window::<f32>(COUNT)?;
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1000))?;
    let few = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(4))?;
    let (kernels, stream) = (rank.load(&KERNELS)?, rank.stream()?);
    let launch = |dev, grid, block: (u32, u32)| {
        let config = LaunchConfig::new(grid, block);
        fill(&kernels, &stream, config, (dev, &window))
    };
    assert!(matches!(refusal(launch(&dev, 265, (64, 1))), LaunchRefusal::NotResident { .. }));
    assert!(matches!(refusal(launch(&few, 5, (64, 1))), LaunchRefusal::TooFewBarriers { .. }));
    let two_dimensional = refusal(launch(&dev, 1, (8, 8)));
    assert!(matches!(two_dimensional, LaunchRefusal::BlockNotOneDimensional { .. }));
    assert!(matches!(refusal(launch(&dev, 0, (8, 1))), LaunchRefusal::Empty { .. }));
    assert_eq!(kernels.resident_blocks(Fill, 256, 0)?, 264);
    match kernels.info(Unknown) {
        Err(Error::KernelNotFound { name, available }) => {
            assert_eq!((name.as_str(), available), ("unknown", vec!["fill".to_owned()]));
        }
        other => panic!("{other:?}"),
    }
    let text = rank.load(&NEWER).unwrap_err().to_string();
    assert!(text.contains("is PTX 8.6, which is newer than the driver (CUDA 13.0)"), "{text}");
    let text = rank.load(&BROKEN).unwrap_err().to_string();
    assert!(text.contains("CUDA_ERROR_INVALID_PTX") && text.contains("line 1: broken"), "{text}");
    let short = comm.mem_alloc::<f32>(COUNT - 1)?;
    let too_many = comm.all_reduce(&window, &short, ReduceOp::Sum, &stream);
    assert!(matches!(too_many, Err(Error::InvalidInput { .. })));
    assert!(matches!(comm.window::<f32>(0), Err(Error::InvalidInput { .. })));
    assert!(matches!(comm.window::<f32>(usize::MAX), Err(Error::InvalidInput { .. })));
    let multimem = DevCommRequirements::new().lsa_multimem(true);
    let refused = comm.create_dev_comm(multimem).unwrap_err().to_string();
    assert!(
        refused.contains("rank 0") && refused.contains("multimemSupport is false"),
        "{refused}"
    );
    Ok(())
}

/// Rank 1 fails while rank 0 waits for a kernel that never ends.
fn hang(rank: &Rank) -> Result<()> {
    let comm = rank.communicator()?;
    let window = comm.window::<f32>(COUNT)?;
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(8))?;
    let (kernels, stream) = (rank.load(&KERNELS)?, rank.stream()?);
    if rank.rank() == 1 {
        std::thread::sleep(Duration::from_millis(200));
        panic!("no more");
    }
    fill(&kernels, &stream, LaunchConfig::new(8, 32), (&dev, &window))?;
    let lost = stream.synchronize().unwrap_err();
    assert_eq!(lost.to_string(), "rank 1 is lost: rank 1 panicked: no more");
    Err(lost)
}

/// A kernel that never ends, and a deadline for it.
fn deadline(rank: &Rank) -> Result<()> {
    let comm = rank.communicator()?;
    let window = comm.window::<f32>(COUNT)?;
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(8))?;
    let (kernels, stream) = (rank.load(&KERNELS)?, rank.stream()?);
    fill(&kernels, &stream, LaunchConfig::new(8, 32), (&dev, &window))?;
    stream.synchronize_within(Duration::from_millis(50))
}

/// Rank 1 dies without a word while rank 0 waits for its GPU.
fn die(rank: &Rank) -> Result<()> {
    let comm = rank.communicator()?;
    let window = comm.window::<f32>(COUNT)?;
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(8))?;
    let (kernels, stream) = (rank.load(&KERNELS)?, rank.stream()?);
    if rank.rank() == 1 {
        std::process::abort();
    }
    fill(&kernels, &stream, LaunchConfig::new(8, 32), (&dev, &window))?;
    stream.synchronize()
}

fn a_job_makes_launches_and_closes_everything_in_order_on_its_own_gpu() {
    assert_eq!(ranks(2, work), [3.0; 2]);
    for rank in 0..2 {
        let expected = format!(
            "ncclCommInitRankScalable {rank} of 2
ncclMemAlloc 4000
ncclCommWindowRegister 4000 flags 1
ncclMemAlloc 4000
ncclCommWindowRegister 4000 flags 1
cuMemHostAlloc 262208
ncclDevCommCreate 8 barriers
cuModuleLoadDataEx
cuFuncLoad
cuFuncSetAttribute 8 102400
cuLaunchKernelEx fill grid 8 block 256 shared 102400 cooperative 1 DevComm of rank {rank}, count 1000
ncclAllReduce 1000 type 7 op 0
cuStreamDestroy
cuModuleUnload
ncclDevCommDestroy
ncclCommWindowDeregister
ncclMemFree
ncclCommWindowDeregister
ncclMemFree
ncclCommFinalize
ncclCommDestroy
cuMemFreeHost
cuDevicePrimaryCtxRelease"
        );
        assert_eq!(log_of(rank).join("\n"), expected, "rank {rank}");
    }
}

/// What the parent sees of ranks that are processes.
pub(crate) fn trial_of_processes() -> Trial {
    Trial::test("ranks_that_are_processes_do_the_same", || {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let port = port.to_string();
        let rank = |rank: &'static str| {
            let port = port.clone();
            std::thread::spawn(move || {
                let address = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)];
                let launcher = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2")];
                run(JOB_OF_A_PROCESS, &[&address[..], &launcher].concat())
            })
        };
        for (gpu, process) in ["0", "1"].map(rank).into_iter().enumerate() {
            let Some((_, log)) = process.join().unwrap() else { return Ok(()) };
            assert!(lines_of(&log, 1 - gpu).is_empty(), "{log}");
            assert_eq!(lines_of(&log, gpu).last().unwrap(), "cuDevicePrimaryCtxRelease");
        }
        Ok(())
    })
}

/// The part of one process; the launcher is in its environment.
const JOB_OF_A_PROCESS: &str = "a_launched_process_is_one_rank_and_works_on_its_own_gpu_alone";

fn a_launched_process_is_one_rank_and_works_on_its_own_gpu_alone() {
    let world = World::from_env().unwrap();
    let sum = 1.5 * world.n_ranks() as f32;
    assert_eq!(world.run(work).unwrap(), [sum]);
}

fn a_program_starts_its_own_ranks() {
    if World::is_launched() {
        assert_eq!(World::from_env().unwrap().run(work).unwrap(), [3.0]);
        return;
    }
    World::spawn_local(2).unwrap();
    for gpu in 0..2 {
        assert_eq!(log_of(gpu).last().unwrap(), "cuDevicePrimaryCtxRelease");
    }
}

fn a_process_that_dies_ends_the_job_although_another_waits_for_a_kernel() {
    if World::is_launched() {
        let error = World::from_env().unwrap().run(die).unwrap_err().to_string();
        assert!(error.starts_with("rank 1 is lost: its connection closed"), "{error}");
        return;
    }
    let error = World::spawn_local(2).unwrap_err().to_string();
    assert_eq!(error, "rank 1 failed: its process ended with signal 6 (SIGABRT)");
    let error = World::spawn_local(3).unwrap_err();
    assert!(matches!(error, Error::TooFewGpus { asked: 3, visible: 2 }), "{error}");
}

fn what_would_hang_or_is_not_there_is_refused_before_the_driver_sees_it() {
    ranks(2, refusals);
    for gpu in 0..2 {
        let log = log_of(gpu);
        assert!(!log.iter().any(|line| line.starts_with("cuLaunchKernelEx")), "{log:?}");
    }
}

fn a_lost_rank_releases_the_others_and_nothing_in_use_is_freed() {
    let error = World::threads(2).unwrap().run(hang).unwrap_err();
    assert!(matches!(error, Error::RankPanicked { rank: 1, .. }), "{error}");
    let (waiting, lost) = (log_of(0), log_of(1));
    for freed in ["ncclMemFree", "ncclCommWindowDeregister", "cuModuleUnload", "ncclCommDestroy"] {
        assert!(!waiting.iter().any(|line| line == freed), "{freed}: {waiting:?}");
    }
    // Finalizing would wait for the other rank.
    for log in [waiting, lost] {
        assert!(log.iter().any(|line| line == "ncclCommAbort"), "{log:?}");
        assert!(!log.iter().any(|line| line == "ncclCommFinalize"), "{log:?}");
    }
}

fn a_missed_deadline_is_an_error_and_nothing_in_use_is_freed() {
    let error = World::threads(2).unwrap().run(deadline).unwrap_err();
    assert!(matches!(error, Error::DeadlinePassed { .. }), "{error}");
    for gpu in 0..2 {
        let log = log_of(gpu);
        assert!(log.iter().any(|line| line.starts_with("cuLaunchKernelEx")), "{log:?}");
        for freed in ["ncclMemFree", "ncclCommWindowDeregister", "cuModuleUnload"] {
            assert!(!log.iter().any(|line| line == freed), "{freed}: {log:?}");
        }
    }
}

fn more_ranks_than_gpus_are_refused_with_both_numbers() {
    let text = World::threads(3).unwrap_err().to_string();
    assert!(text.contains("3 GPUs were asked for, but only 2 are visible"), "{text}");
}

fn a_machine_without_a_gpu_is_named() {
    assert!(matches!(World::from_env(), Err(Error::NoGpu)));
}

fn a_driver_that_is_too_old_is_named() {
    let text = World::from_env().unwrap_err().to_string();
    assert!(text.contains("CUDA 12.2, needed is 12.8"), "{text}");
}

fn an_nccl_of_a_later_cuda_than_the_drivers_makes_no_communicator() {
    let world = World::threads(2).unwrap();
    // The library is good for all that needs no GPU of this driver.
    let text = world.run(|rank| rank.communicator().map(drop)).unwrap_err().to_string();
    let library = "lib/libnccl.so.2 is not a usable NCCL library";
    for part in [library, "built for CUDA 13.4", "supports CUDA 12.8"] {
        assert!(text.contains(part), "{text}");
    }
    assert!(!(0..2).any(|gpu| log_of(gpu).iter().any(|line| line.starts_with("ncclCommInit"))));
}

fn ranks_without_symmetric_memory_get_no_window() {
    let window = |rank: &Rank| rank.communicator()?.window::<f32>(COUNT).map(drop);
    let error = World::threads(2).unwrap().run(window).unwrap_err();
    assert!(matches!(error, Error::NoWindow { bytes: 4000, .. }), "{error}");
}

fn ranks_that_cannot_share_memory_are_named_with_their_hosts() {
    let world = World::threads(2).unwrap();
    let error = world.run(|rank| rank.communicator()?.require_single_lsa_team());
    let text = error.unwrap_err().to_string();
    assert!(text.contains("rank 0 on ") && text.contains("; rank 1 on "), "{text}");
}
