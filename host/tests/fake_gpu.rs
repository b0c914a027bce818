//! The life of a job against a driver and an NCCL that record what is done with them: in what order, on which GPU, and what
//! is left alone when a rank is lost. They are small C libraries, built here; a child process finds them by its environment.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use devcomm_host::{
    DevCommRequirements, Error, KernelSet, LaunchConfig, LaunchRefusal, Rank, ReduceOp, World,
};
use devcomm_types::{DevComm as RawDevComm, Kernel, KernelParam, Window as RawWindow};
use libtest_mimic::{Arguments, Trial};

#[derive(Clone, Copy)]
struct DevComm(#[expect(dead_code, reason = "only its layout matters")] RawDevComm);
// SAFETY: a wrapper of its Abi with the same layout.
unsafe impl KernelParam for DevComm {
    type Abi = RawDevComm;
    const IS_DEV_COMM: bool = true;
}

#[derive(Clone, Copy)]
struct Window(#[expect(dead_code, reason = "only its layout matters")] RawWindow<f32>);
// SAFETY: as above.
unsafe impl KernelParam for Window {
    type Abi = RawWindow<f32>;
}

macro_rules! kernels {
    ($($item:ident = $file:literal $name:literal),*) => { $(
        #[derive(Clone, Copy)]
        struct $item;
        impl Kernel for $item {
            const NAME: &'static str = $name;
            const FILE: &'static str = $file;
            type Args = (DevComm, Window, usize);
        }
    )* };
}
kernels!(Fill = "fill" "fill", Unknown = "fill" "unknown");

const SIDECAR: &str = r#"{"arch":"sm_90","ptx_isa":"8.6","nccl":{"version":"2.32.3"},"kernels":[{"name":"fill","params":[
    {"name":"comm","type":"DevComm","size":248},{"name":"window","type":"Window<f32>","size":8},
    {"name":"count","type":"usize","size":8}]}]}"#;
const KERNELS: KernelSet = KernelSet::new((&[("fill", ".version 8.6", SIDECAR)], None));
const NEWER: KernelSet = KernelSet::new((&[("fill", ".version 99", SIDECAR)], None));
const BROKEN: KernelSet = KernelSet::new((&[("fill", "broken", SIDECAR)], None));

const COUNT: usize = 1000;

/// One rank's work: everything once.
fn work(rank: &Rank) -> Result<f32, Error> {
    let comm = rank.communicator()?;
    assert_eq!((comm.rank(), comm.n_ranks(), comm.device()), (rank.rank(), 2, rank.rank()));
    let of_nccl = rank.rank() as i32;
    assert_eq!(comm.identity()?, (of_nccl, 2, of_nccl));
    comm.require_single_lsa_team()?;
    let (send, recv) = (comm.window::<f32>(COUNT)?, comm.window::<f32>(COUNT)?);
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(8))?;
    send.copy_from_host(&[1.5; COUNT])?;
    let (kernels, stream) = (rank.load(&KERNELS)?, rank.stream()?);
    let (start, stop) = (rank.context().event()?, rank.context().event()?);
    stream.record(&start)?;
    let config = LaunchConfig::new(8, 256).with_dynamic_shared(100 << 10);
    // SAFETY: the fake driver runs no kernel.
    unsafe { kernels.launch(&stream, Fill, config, (&dev, &recv, COUNT))? };
    comm.all_reduce(&send, &recv, COUNT, ReduceOp::Sum, &stream)?;
    stream.record(&stop)?;
    stream.synchronize()?;
    assert_eq!(stop.elapsed_ms(&start)?, 1.5);
    let mut sums = vec![0.0; COUNT];
    recv.copy_to_host(&mut sums)?;
    comm.async_error()?;
    comm.barrier()?;
    Ok(sums[COUNT - 1])
}

fn refusal(result: Result<(), Error>) -> LaunchRefusal {
    match result {
        Err(Error::Launch { kernel: "fill", refusal }) => refusal,
        other => panic!("{other:?}"),
    }
}

fn refusals(rank: &Rank) -> Result<(), Error> {
    let comm = rank.communicator()?;
    let window = comm.window::<f32>(COUNT)?;
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1000))?;
    let few = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(4))?;
    let (kernels, stream) = (rank.load(&KERNELS)?, rank.stream()?);
    let launch = |dev, grid, block: (u32, u32)| {
        let config = LaunchConfig::new(grid, block);
        // SAFETY: as in `work`.
        unsafe { kernels.launch(&stream, Fill, config, (dev, &window, COUNT)) }
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
    let too_many = comm.all_reduce(&window, &short, COUNT, ReduceOp::Sum, &stream);
    assert!(matches!(too_many, Err(Error::InvalidInput { .. })));
    assert!(matches!(comm.window::<f32>(0), Err(Error::InvalidInput { .. })));
    assert!(matches!(comm.window::<f32>(usize::MAX), Err(Error::InvalidInput { .. })));
    let multimem = DevCommRequirements::new().lsa_multimem(true);
    assert!(matches!(comm.create_dev_comm(multimem), Err(Error::NoMultimem { .. })));
    Ok(())
}

/// Rank 1 fails while rank 0 waits for a kernel that never ends.
fn hang(rank: &Rank) -> Result<(), Error> {
    let comm = rank.communicator()?;
    let window = comm.window::<f32>(COUNT)?;
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(8))?;
    let (kernels, stream) = (rank.load(&KERNELS)?, rank.stream()?);
    if rank.rank() == 1 {
        std::thread::sleep(Duration::from_millis(200));
        panic!("no more");
    }
    // SAFETY: as in `work`.
    unsafe { kernels.launch(&stream, Fill, LaunchConfig::new(8, 32), (&dev, &window, COUNT))? };
    let lost = stream.synchronize().unwrap_err();
    assert_eq!(lost.to_string(), "rank 1 is lost: rank 1 panicked: no more");
    Err(lost)
}

/// A kernel that never ends, and a deadline for it.
fn deadline(rank: &Rank) -> Result<(), Error> {
    let comm = rank.communicator()?;
    let window = comm.window::<f32>(COUNT)?;
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(8))?;
    let (kernels, stream) = (rank.load(&KERNELS)?, rank.stream()?);
    // SAFETY: as in `work`.
    unsafe { kernels.launch(&stream, Fill, LaunchConfig::new(8, 32), (&dev, &window, COUNT))? };
    stream.synchronize_within(Duration::from_millis(50))
}

/// Rank 1 dies without a word while rank 0 waits for its GPU.
fn die(rank: &Rank) -> Result<(), Error> {
    let comm = rank.communicator()?;
    let window = comm.window::<f32>(COUNT)?;
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(8))?;
    let (kernels, stream) = (rank.load(&KERNELS)?, rank.stream()?);
    if rank.rank() == 1 {
        std::process::abort();
    }
    // SAFETY: as in `work`.
    unsafe { kernels.launch(&stream, Fill, LaunchConfig::new(8, 32), (&dev, &window, COUNT))? };
    stream.synchronize()
}

/// The child's part: a job by name.
fn job(name: &str) {
    let world = || World::threads(2).unwrap();
    match name {
        "work" => assert_eq!(world().run(work).unwrap(), [3.0; 2]),
        "refusals" => assert_eq!(world().run(refusals).unwrap(), [(); 2]),
        "hang" => {
            let error = world().run(hang).unwrap_err();
            assert!(matches!(error, Error::RankPanicked { rank: 1, .. }), "{error}");
        }
        "deadline" => {
            let error = world().run(deadline).unwrap_err();
            assert!(matches!(error, Error::DeadlinePassed { .. }), "{error}");
        }
        "too many" => {
            let text = World::threads(3).unwrap_err().to_string();
            assert!(text.contains("3 GPUs were asked for, but only 2 are visible"), "{text}");
        }
        "from env" => assert_eq!(World::from_env().unwrap().run(work).unwrap(), [3.0]),
        "spawn" if World::is_launched() => {
            assert_eq!(World::from_env().unwrap().run(work).unwrap(), [3.0]);
        }
        "spawn" => World::spawn_local(2).unwrap(),
        "die" if World::is_launched() => {
            let error = World::from_env().unwrap().run(die).unwrap_err().to_string();
            assert!(error.starts_with("rank 1 is lost: its connection closed"), "{error}");
        }
        "die" => {
            let error = World::spawn_local(2).unwrap_err().to_string();
            assert_eq!(error, "rank 1 failed: its process ended with signal 6 (SIGABRT)");
            let error = World::spawn_local(3).unwrap_err();
            assert!(matches!(error, Error::TooFewGpus { asked: 3, visible: 2 }), "{error}");
        }
        "no window" => {
            let window = |rank: &Rank| rank.communicator()?.window::<f32>(COUNT).map(drop);
            let error = world().run(window).unwrap_err();
            assert!(matches!(error, Error::NoWindow { bytes: 4000, .. }), "{error}");
        }
        "two teams" => {
            let error = world().run(|rank| rank.communicator()?.require_single_lsa_team());
            let text = error.unwrap_err().to_string();
            assert!(text.contains("rank 0 on ") && text.contains("; rank 1 on "), "{text}");
        }
        "no gpu" => assert!(matches!(World::from_env(), Err(Error::NoGpu))),
        "old driver" => {
            let text = World::from_env().unwrap_err().to_string();
            assert!(text.contains("CUDA 12.2, needed is 12.8"), "{text}");
        }
        other => panic!("no job {other}"),
    }
}

fn compile(source: &str, library: &Path, with: &[&Path]) -> bool {
    std::fs::create_dir_all(library.parent().unwrap()).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_gpu").join(source);
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(library).arg(source).args(with);
    match compiler.status() {
        Ok(status) => {
            assert!(status.success(), "cc: {status}");
            true
        }
        Err(error) => {
            eprintln!("SKIPPED: no C compiler: {error}");
            false
        }
    }
}

/// Runs a job in a process that finds the fakes. Returns the log's lines of each GPU; `None` without a C compiler.
fn run(name: &str, env: &[(&str, &str)]) -> Option<[Vec<String>; 2]> {
    let folder = tempfile::tempdir().unwrap();
    let (cuda, nccl) = (folder.path().join("libcuda.so"), folder.path().join("lib/libnccl.so.2"));
    if !(compile("cuda.c", &cuda, &[]) && compile("nccl.c", &nccl, &[&cuda])) {
        return None;
    }
    let log = folder.path().join("log");
    std::fs::write(&log, "").unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    for launcher in ["RANK", "WORLD_SIZE", "NCCL_NVLS_ENABLE"] {
        child.env_remove(launcher);
    }
    child.env("FAKE_JOB", name).env("FAKE_LOG", &log).envs(env.iter().copied());
    child.env("LD_LIBRARY_PATH", folder.path()).env("DEVCOMM_NCCL_HOME", folder.path());
    let start = Instant::now();
    let output = child.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    let log = std::fs::read_to_string(log).unwrap();
    let of_gpu = |gpu| {
        let lines = log.lines().filter_map(|line| line.strip_prefix(gpu));
        lines.map(str::to_owned).collect()
    };
    Some([of_gpu("gpu0 "), of_gpu("gpu1 ")])
}

fn a_job_makes_launches_and_closes_everything_in_order_on_its_own_gpu() {
    let Some(logs) = run("work", &[]) else { return };
    for (rank, log) in logs.iter().enumerate() {
        let expected = format!(
            "ncclCommInitRank {rank} of 2
ncclMemAlloc 4000
ncclCommWindowRegister 4000 flags 1
ncclMemAlloc 4000
ncclCommWindowRegister 4000 flags 1
ncclDevCommCreate 8 barriers
cuModuleLoadDataEx
cuFuncLoad
cuFuncSetAttribute 8 102400
cuLaunchKernelEx grid 8 block 256 shared 102400 cooperative 1 DevComm of rank {rank}, count 1000
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
cuDevicePrimaryCtxRelease"
        );
        assert_eq!(log.join("\n"), expected, "rank {rank}");
    }
}

fn ranks_that_are_processes_do_the_same() {
    use std::net::TcpListener;
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let rank = |rank: &'static str| {
        let port = port.clone();
        std::thread::spawn(move || {
            run(
                "from env",
                &[
                    ("RANK", rank),
                    ("LOCAL_RANK", rank),
                    ("WORLD_SIZE", "2"),
                    ("MASTER_ADDR", "127.0.0.1"),
                    ("MASTER_PORT", &port),
                ],
            )
        })
    };
    for (gpu, process) in ["0", "1"].map(rank).into_iter().enumerate() {
        let Some(logs) = process.join().unwrap() else { return };
        assert!(logs[1 - gpu].is_empty(), "{logs:?}");
        assert_eq!(logs[gpu].last().unwrap(), "cuDevicePrimaryCtxRelease");
    }
}

fn a_program_starts_its_own_ranks() {
    let Some(logs) = run("spawn", &[]) else { return };
    for log in logs {
        assert_eq!(log.last().map(String::as_str), Some("cuDevicePrimaryCtxRelease"));
    }
}

fn a_process_that_dies_ends_the_job_although_another_waits_for_a_kernel() {
    run("die", &[("FAKE_HANG", "1")]);
}

fn what_would_hang_or_is_not_there_is_refused_before_the_driver_sees_it() {
    let Some(logs) = run("refusals", &[]) else { return };
    for log in logs {
        assert!(!log.iter().any(|line| line.starts_with("cuLaunchKernelEx")), "{log:?}");
    }
}

fn a_lost_rank_releases_the_others_and_nothing_in_use_is_freed() {
    let Some([waiting, lost]) = run("hang", &[("FAKE_HANG", "1")]) else { return };
    for freed in ["ncclMemFree", "ncclCommWindowDeregister", "cuModuleUnload", "ncclCommDestroy"] {
        assert!(!waiting.iter().any(|line| line == freed), "{freed}: {waiting:?}");
    }
    // Its own GPU is idle, but finalizing would wait for the other rank.
    assert!(lost.iter().any(|line| line == "ncclCommAbort"), "{lost:?}");
    assert!(!lost.iter().any(|line| line == "ncclCommFinalize"), "{lost:?}");
}

fn a_missed_deadline_is_an_error_and_nothing_in_use_is_freed() {
    let Some(logs) = run("deadline", &[("FAKE_HANG", "1")]) else { return };
    for log in logs {
        assert!(log.iter().any(|line| line.starts_with("cuLaunchKernelEx")), "{log:?}");
        for freed in ["ncclMemFree", "ncclCommWindowDeregister", "cuModuleUnload", "ncclComm"] {
            let closed = |line: &String| line.starts_with(freed) && !line.contains("Init");
            assert!(!log.iter().any(|line| closed(line) && !line.contains("Register ")), "{log:?}");
        }
    }
}

fn what_the_machine_lacks_is_named() {
    run("too many", &[]);
    run("no gpu", &[("FAKE_NO_GPU", "1")]);
    run("old driver", &[("FAKE_OLD_DRIVER", "1")]);
    run("no window", &[("FAKE_NO_WINDOW", "1")]);
    run("two teams", &[("FAKE_TWO_TEAMS", "1")]);
}

macro_rules! trials {
    ($($test:ident),* $(,)?) => {
        vec![$(Trial::test(stringify!($test), || { $test(); Ok(()) })),*]
    };
}

/// The tests start this program again, as the process of a job.
fn main() {
    if let Ok(name) = std::env::var("FAKE_JOB") {
        return job(&name);
    }
    let trials = trials![
        a_job_makes_launches_and_closes_everything_in_order_on_its_own_gpu,
        ranks_that_are_processes_do_the_same,
        a_program_starts_its_own_ranks,
        a_process_that_dies_ends_the_job_although_another_waits_for_a_kernel,
        what_would_hang_or_is_not_there_is_refused_before_the_driver_sees_it,
        a_lost_rank_releases_the_others_and_nothing_in_use_is_freed,
        a_missed_deadline_is_an_error_and_nothing_in_use_is_freed,
        what_the_machine_lacks_is_named,
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
