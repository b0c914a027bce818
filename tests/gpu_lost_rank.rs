//! Tests that when a rank dies, every rank that waits for it gets an error that names it, within a
//! deadline.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use devcomm::{
    DevCommRequirements, DevCommResource, Error, GinConnectionType, KERNELS, LocalJob, Rank,
    ReduceOp, SymmetricBuffer, Window, World, kernels, visible_gpus,
};
use devcomm_testing::machines::Gpus;
use rustix::process::{Signal, getpid, kill_process};

/// How long the survivors may take to return an error.
const DEADLINE: Duration = Duration::from_secs(15);
/// How long the start and the end of a job may take in addition.
const OVERHEAD: Duration = Duration::from_secs(30);

/// The folder of a job's reports. Its path also identifies the job's processes.
const REPORTS: &str = "DEVCOMM_TEST_REPORTS";
const VICTIM: &str = "DEVCOMM_TEST_VICTIM";
/// Microseconds after which the victim is killed.
const KILL_AFTER: &str = "DEVCOMM_TEST_KILL_AFTER";

/// One of the ranks that run all-reduces is killed.
#[test]
fn a_rank_killed_among_collectives_is_an_error_on_every_other() {
    let name = "a_rank_killed_among_collectives_is_an_error_on_every_other";
    if World::is_launched() {
        return run_rank(collectives);
    }
    gpus(max_ranks()).with_world(name, |world| {
        let shared_before = shared_memory();
        kill_at_random(name, world.n_ranks(), 11);
        let left: Vec<_> = shared_memory().difference(&shared_before).cloned().collect();
        assert!(left.is_empty(), "left in /dev/shm: {left:?}");
    });
}

/// One rank aborts before it launches a kernel that the others' kernels wait for.
#[test]
fn a_rank_that_a_kernel_waits_for_is_an_error() {
    let name = "a_rank_that_a_kernel_waits_for_is_an_error";
    if World::is_launched() {
        return run_rank(kernel);
    }
    gpus(2).with_world(name, |world| {
        for round in 0..3 {
            let job = Job::new(name, world.n_ranks(), 1);
            let error = job.run(&[]);
            assert!(error.contains("SIGABRT"), "round {round}: {error}");
            job.require_reports(round);
            job.require_no_process_left();
        }
    });
}

/// One of the ranks whose kernels exchange messages over the network is killed.
#[test]
fn a_rank_killed_among_kernels_that_use_the_network_is_an_error_on_every_other() {
    let name = "a_rank_killed_among_kernels_that_use_the_network_is_an_error_on_every_other";
    if World::is_launched() {
        return run_rank(network);
    }
    let gpus = gpus(max_ranks()).with_gin(GinConnectionType::Full);
    gpus.with_world(name, |world| kill_at_random(name, world.n_ranks(), 23));
}

/// Real GPUs, as the ranks must be processes.
fn gpus(n: usize) -> Gpus {
    Gpus::new(n).only_real("ranks that are processes")
}

fn max_ranks() -> usize {
    if visible_gpus().is_ok_and(|n| n >= 4) { 4 } else { 2 }
}

/// Runs twenty jobs of this test, each of which loses a rank at a random time in the first 0.1 s of
/// its loop.
fn kill_at_random(test: &'static str, n_ranks: usize, seed: u64) {
    const TIMES: usize = 20;
    /// The latest kill, in microseconds.
    const LATEST: u64 = 100_000;
    for round in 0..TIMES {
        let job = Job::new(test, n_ranks, round % n_ranks);
        let delay = fastrand::Rng::with_seed(seed + round as u64).u64(..LATEST);
        let error = job.run(&[(KILL_AFTER, &delay.to_string())]);
        assert!(error.contains("SIGKILL"), "round {round}: {error}");
        job.require_reports(round);
        job.require_no_process_left();
    }
}

/// A job whose ranks are processes of this test program.
struct Job {
    test: &'static str,
    n_ranks: usize,
    victim: usize,
    reports: tempfile::TempDir,
}

impl Job {
    fn new(test: &'static str, n_ranks: usize, victim: usize) -> Self {
        let reports = tempfile::Builder::new().prefix("devcomm-lost-rank-").tempdir().unwrap();
        Self { test, n_ranks, victim, reports }
    }

    /// Runs the ranks to their end, and returns the job's error, which must name the victim.
    fn run(&self, env: &[(&str, &str)]) -> String {
        let job = LocalJob::new(self.n_ranks).unwrap();
        let mut job = job
            .args([self.test, "--exact", "--nocapture"])
            .env(REPORTS, self.reports.path())
            .env(VICTIM, self.victim.to_string());
        for (name, value) in env {
            job = job.env(name, value);
        }
        let started = Instant::now();
        let error = job.run().expect_err("a rank was lost").to_string();
        let took = started.elapsed();
        assert!(took < DEADLINE + OVERHEAD, "{took:?}");
        let victim = self.victim;
        assert!(error.contains(&format!("rank {victim} ")), "rank {victim} was lost: {error}");
        error
    }

    /// Checks that every survivor's wait ended within the deadline, with an error that names the
    /// victim.
    fn require_reports(&self, round: usize) {
        let victim = self.victim;
        let died = self.report(victim).unwrap_or_else(|| panic!("round {round}: no rank was lost"));
        let died: u64 = died.parse().unwrap();
        for rank in (0..self.n_ranks).filter(|rank| *rank != victim) {
            let report = self.report(rank);
            let report =
                report.unwrap_or_else(|| panic!("round {round}: rank {rank} reported no error"));
            let (at, error) = report.split_once(' ').unwrap();
            let after = Duration::from_millis(at.parse::<u64>().unwrap().saturating_sub(died));
            assert!(after < DEADLINE, "round {round}: rank {rank} returned after {after:?}");
            let named = error.contains(&format!("rank {victim} is lost"));
            assert!(named, "round {round}, rank {rank}: rank {victim} is not named: {error}");
        }
    }

    fn report(&self, rank: usize) -> Option<String> {
        std::fs::read_to_string(report_of(self.reports.path(), rank)).ok()
    }

    /// Checks that no process has this job's folder in its environment.
    fn require_no_process_left(&self) {
        let marker = self.reports.path().as_os_str().as_encoded_bytes();
        let marked =
            |environment: &[u8]| environment.windows(marker.len()).any(|window| window == marker);
        let left: Vec<PathBuf> = std::fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| Some(entry.ok()?.path()))
            // Other entries, and processes of other users, have no readable `environ`.
            .filter(|process| std::fs::read(process.join("environ")).is_ok_and(|e| marked(&e)))
            .collect();
        assert!(left.is_empty(), "still running: {left:?}");
    }
}

fn report_of(reports: &Path, rank: usize) -> PathBuf {
    reports.join(format!("rank-{rank}"))
}

/// The names in /dev/shm.
fn shared_memory() -> BTreeSet<OsString> {
    let entries = std::fs::read_dir("/dev/shm").into_iter().flatten();
    entries.filter_map(|entry| Some(entry.ok()?.file_name())).collect()
}

/// What a rank's environment says about the job.
struct RankEnv {
    reports: PathBuf,
    victim: usize,
}

impl RankEnv {
    /// If this rank is the victim, starts a thread that kills the process after its delay.
    fn schedule_kill(&self, rank: &Rank) {
        if rank.rank() != self.victim {
            return;
        }
        let delay = std::env::var(KILL_AFTER).unwrap().parse().map(Duration::from_micros).unwrap();
        let (me, reports) = (rank.rank(), self.reports.clone());
        std::thread::spawn(move || {
            std::thread::sleep(delay);
            RankEnv { reports, victim: me }.report(me, &now().to_string());
            let _ = kill_process(getpid(), Signal::KILL);
        });
    }

    fn report(&self, rank: usize, what: &str) {
        // Renamed when it is complete.
        let (path, draft) = (report_of(&self.reports, rank), self.reports.join(format!("{rank}~")));
        std::fs::write(&draft, what).unwrap();
        std::fs::rename(draft, path).unwrap();
    }
}

/// The system time in milliseconds, comparable between processes of this host.
fn now() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis()
}

/// Runs `body`, which must return an error, and reports it. Exits the process, as kernels on the
/// GPU may never end.
fn run_rank(body: fn(&Rank, &RankEnv) -> Result<(), Error>) {
    let env = RankEnv {
        reports: std::env::var_os(REPORTS).unwrap().into(),
        victim: std::env::var(VICTIM).unwrap().parse().unwrap(),
    };
    let ended = World::from_env().and_then(|world| {
        world.run(|rank| {
            let error = body(rank, &env).expect_err("a rank was lost");
            env.report(rank.rank(), &format!("{} {error}", now()));
            Err::<(), _>(error)
        })
    });
    if let Err(error) = ended {
        // If the world could not be created, the report is missing.
        eprintln!("{error}");
    }
    std::process::exit(1);
}

/// All-reduces until one fails.
fn collectives(rank: &Rank, env: &RankEnv) -> Result<(), Error> {
    const WARM_UP: usize = 5;
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let (send, recv) = (comm.mem_alloc::<f32>(1 << 20)?, comm.mem_alloc::<f32>(1 << 20)?);
    let step = || {
        for _ in 0..4 {
            comm.all_reduce(&send, &recv, ReduceOp::Sum, &stream)?;
        }
        stream.synchronize()
    };
    for _ in 0..WARM_UP {
        step()?;
    }
    rank.barrier()?;
    env.schedule_kill(rank);
    loop {
        step()?;
    }
}

/// The device communicator, window and times of a ping-pong over the network.
fn resources(rank: &Rank) -> Result<(DevCommResource, Window<u8>, SymmetricBuffer<u64>), Error> {
    let comm = rank.communicator()?;
    let requirements = DevCommRequirements::new().gin_connection(GinConnectionType::Full);
    let dev_comm = comm.create_dev_comm(requirements.gin_signals(BLOCKS))?;
    let slots = (BLOCKS * ROUNDS) as usize;
    Ok((dev_comm, comm.window(slots * BYTES)?, comm.mem_alloc(slots)?))
}

/// Blocks and rounds of a launch, and bytes per message.
const BLOCKS: u32 = 4;
const ROUNDS: u32 = 50;
const BYTES: usize = 1 << 12;

/// Kernels that wait for each other's signals, until one fails.
fn network(rank: &Rank, env: &RankEnv) -> Result<(), Error> {
    let (dev_comm, window, nanos) = resources(rank)?;
    rank.load(&KERNELS)?;
    let stream = rank.stream()?;
    let step = || {
        let put = kernels::gin_put_signal::args(&dev_comm, &window, &window, BYTES, ROUNDS, &nanos);
        // SAFETY: window and times have room for every round of every block; nothing reads what
        // arrives.
        unsafe { put.grid(BLOCKS).block(32).launch(&stream)? };
        stream.synchronize()
    };
    step()?;
    rank.barrier()?;
    env.schedule_kill(rank);
    loop {
        step()?;
    }
}

/// The victim aborts where the others launch a kernel that waits for it.
fn kernel(rank: &Rank, env: &RankEnv) -> Result<(), Error> {
    let comm = rank.communicator()?;
    let (send, recv) = (comm.window::<f32>(1024)?, comm.window::<f32>(1024)?);
    let dev_comm = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
    rank.load(&KERNELS)?;
    let stream = rank.stream()?;
    if rank.rank() == env.victim {
        env.report(rank.rank(), &now().to_string());
        // As when killed, no destructor runs.
        std::process::abort();
    }
    // The victim launches no kernel, so this one never ends.
    let sum = kernels::lsa_allreduce::args(&dev_comm, &send, &recv, 1024);
    sum.grid(1).block(128).launch(&stream)?;
    stream.synchronize()
}
