//! Tests of jobs whose ranks are processes, each with its own GPU.

use std::net::TcpListener;
use std::sync::LazyLock;

use devcomm_host::{
    CommConfig, DriverError, Error, KernelSet, LocalJob, Rank, Result, StateError, Stream, World,
};
use devcomm_types::{Kernel, Unsafe};
use libtest_mimic::Trial;

use crate::support::{lines_of, log_of, run, set, tests};

tests! {
    a_launched_process_is_one_rank_and_works_on_its_own_gpu_alone
        in ["WORLD_SIZE" = "1", "RANK" = "0"],
    a_program_starts_its_own_ranks in ["STUB_GPUS" = "2"],
    more_processes_than_gpus_share_them_where_nccl_allows_it
        in ["STUB_GPUS" = "2", "NCCL_MULTI_RANK_GPU_ENABLE" = "1"],
    a_process_that_dies_ends_the_job_although_another_waits_for_a_kernel
        in ["STUB_HANG" = "1", "STUB_GPUS" = "2"],
    a_process_goes_on_after_another_has_died in ["STUB_GPUS" = "2"],
    a_call_that_does_not_return_is_an_error_after_the_deadline
        in ["WORLD_SIZE" = "1", "RANK" = "0", "STUB_STUCK" = "1",
            "DEVCOMM_OPERATION_TIMEOUT" = "0.2"],
}

enum Count {}

// SAFETY: the stub driver runs no kernel.
unsafe impl Kernel for Count {
    const NAME: &'static str = "count";
    const PACKAGE: &'static str = "tests";
    const FILE: &'static str = "count";
    type Args = (usize,);
    type Safety = Unsafe;
}

const SIDECAR: &str = r#"{"arch":"sm_90","ptx_isa":"8.6","kernels":[
    {"name":"count","params":[{"name":"n","type":"usize","size":8}]}]}"#;
static KERNELS: LazyLock<KernelSet> = LazyLock::new(|| set("count", ".version 8.6", SIDECAR, None));

/// Launches a kernel on a new stream.
fn start(rank: &Rank) -> Result<Stream> {
    rank.load(&KERNELS)?;
    let stream = rank.stream()?;
    // SAFETY: the stub driver runs no kernel.
    unsafe { Count::with_args((7_usize,)).grid(1).block(32).launch(&stream) }?;
    Ok(stream)
}

/// Does the work of one rank.
fn work(rank: &Rank) -> Result<()> {
    let (me, comm) = (rank.rank(), rank.communicator()?);
    assert_eq!((comm.rank(), comm.n_ranks(), comm.device()), (me, rank.n_ranks(), me));
    assert_eq!(comm.identity()?, (me as i32, rank.n_ranks() as i32, me as i32));
    start(rank)?.synchronize()?;
    comm.async_error()?;
    comm.barrier()
}

/// Checks the stub driver's log of one GPU.
#[track_caller]
fn assert_succeeded(log: &[String]) {
    assert_eq!(log, ["cuLaunchKernelEx count grid 1 block 32", "cuDevicePrimaryCtxRelease"]);
}

/// Runs two launched processes as ranks, and checks the logs of both.
pub(crate) fn trial_of_two_processes() -> Trial {
    Trial::test("processes::ranks_that_are_processes_do_the_same", || {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let port = port.to_string();
        let rank = |rank: &'static str| {
            let port = port.clone();
            std::thread::spawn(move || {
                let address = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)];
                let launcher = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2")];
                run(ONE_PROCESS, &[&address[..], &launcher].concat())
            })
        };
        for (gpu, process) in ["0", "1"].map(rank).into_iter().enumerate() {
            let Some(log) = process.join().unwrap() else { return Ok(()) };
            assert!(lines_of(&log, 1 - gpu).is_empty(), "{log}");
            assert_succeeded(&lines_of(&log, gpu));
        }
        Ok(())
    })
}

/// The test that is the body of each process, with a launcher's variables in its environment.
const ONE_PROCESS: &str = "a_launched_process_is_one_rank_and_works_on_its_own_gpu_alone";

fn a_launched_process_is_one_rank_and_works_on_its_own_gpu_alone() {
    assert_eq!(World::from_env().unwrap().run(work).unwrap(), [()]);
}

fn a_program_starts_its_own_ranks() {
    if World::is_launched() {
        assert_eq!(World::from_env().unwrap().run(work).unwrap(), [()]);
        return;
    }
    World::spawn_local(2).unwrap();
    assert_succeeded(&log_of(0));
    assert_succeeded(&log_of(1));
}

fn more_processes_than_gpus_share_them_where_nccl_allows_it() {
    if World::is_launched() {
        let ran = World::from_env().unwrap().run(|rank| {
            assert_eq!(rank.device(), rank.rank() % 2);
            start(rank)?.synchronize()?;
            rank.barrier()
        });
        assert_eq!(ran.unwrap(), [()]);
        assert_eq!(std::env::var("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE").unwrap(), "50");
        return;
    }
    World::spawn_local(3).unwrap();
    // Ranks 0 and 2 have GPU 0. Each rank logs its launch and the release of its context.
    assert_eq!([log_of(0), log_of(1)].map(|log| log.len()), [4, 2]);
}

fn a_call_that_does_not_return_is_an_error_after_the_deadline() {
    let ended = World::from_env().unwrap().run(|rank| {
        let comm = rank.new_communicator(&CommConfig::new())?;
        let error = comm.destroy().unwrap_err();
        let Error::State(StateError::NotReturned { operation, .. }) = error else {
            panic!("{error}")
        };
        assert_eq!(operation, "ncclCommFinalize");
        assert!(!comm.is_valid());
        Ok::<_, Error>(())
    });
    assert!(ended.is_ok(), "{ended:?}");
}

/// Aborts as rank 1, while rank 0 waits for its GPU.
fn die(rank: &Rank) -> Result<()> {
    rank.communicator()?;
    if rank.rank() == 1 {
        std::process::abort();
    }
    start(rank)?.synchronize()
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
    assert!(
        matches!(error, Error::Driver(DriverError::TooFewGpus { asked: 3, visible: 2 })),
        "{error}"
    );
}

/// Aborts as rank `victim`; goes on as the other rank, alone, on the same GPU.
fn go_on(rank: &Rank, victim: usize) -> Result<()> {
    let (comm, stream) = (rank.communicator()?, start(rank)?);
    if rank.rank() == victim {
        // The other rank has come to the barrier, too.
        comm.barrier()?;
        std::process::abort();
    }
    // The victim's connection may close before this rank sees the end of the first barrier.
    let lost = comm.barrier().and_then(|()| comm.barrier()).unwrap_err().to_string();
    assert!(lost.starts_with(&format!("rank {victim} is lost")), "{lost}");
    let alone = rank.shrink()?;
    assert!(!comm.is_valid() && rank.barrier().is_err());
    let identity = alone.communicator()?.identity()?;
    assert_eq!(identity, (0, 1, 1 - victim as i32));
    stream.synchronize()?;
    start(&alone)?.synchronize()?;
    alone.barrier()
}

fn a_process_goes_on_after_another_has_died() {
    const VICTIM: &str = "VICTIM";
    if let Ok(victim) = std::env::var(VICTIM) {
        let victim = victim.parse().unwrap();
        return World::from_env().unwrap().run(|rank| go_on(rank, victim)).map(drop).unwrap();
    }
    for victim in ["0", "1"] {
        let job = || LocalJob::new(2).unwrap().env(VICTIM, victim);
        job().survive().run().unwrap();
        let error = job().run().unwrap_err().to_string();
        assert!(error.contains("(SIGABRT)"), "{error}");
    }
}
