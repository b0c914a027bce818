//! A rank that goes, while the others wait for it, is an error that names it, within a deadline, on
//! every one of them.

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

/// How long the survivors may take to notice.
const DEADLINE: Duration = Duration::from_secs(15);
/// How long starting a job, and ending it, may take besides.
const AROUND: Duration = Duration::from_secs(30);

/// The folder of a job's reports. Also what its processes are known by.
const REPORTS: &str = "DEVCOMM_TEST_REPORTS";
const VICTIM: &str = "DEVCOMM_TEST_VICTIM";
/// Microseconds that the victim lives in its loop.
const LIFE: &str = "DEVCOMM_TEST_LIFE";

/// Ranks that run all-reduces, one of which is killed in the midst of them.
#[test]
fn a_rank_killed_among_collectives_is_an_error_on_every_other() {
    let name = "a_rank_killed_among_collectives_is_an_error_on_every_other";
    if World::is_launched() {
        return be_a_rank(collectives);
    }
    gpus(most()).with_world(name, |world| {
        let shared_before = shared_memory();
        kill_at_random(name, world.n_ranks(), 11);
        let left: Vec<_> = shared_memory().difference(&shared_before).cloned().collect();
        assert!(left.is_empty(), "left in /dev/shm: {left:?}");
    });
}

/// Ranks of which one goes before its kernel is launched, for which the others' kernels then wait.
#[test]
fn a_rank_that_a_kernel_waits_for_is_an_error() {
    let name = "a_rank_that_a_kernel_waits_for_is_an_error";
    if World::is_launched() {
        return be_a_rank(kernel);
    }
    gpus(2).with_world(name, |world| {
        for turn in 0..3 {
            let job = Job::new(name, world.n_ranks(), 1);
            let error = job.run(&[]);
            assert!(error.contains("SIGABRT"), "turn {turn}: {error}");
            job.require_reports(turn);
            job.require_no_process_left();
        }
    });
}

/// Ranks whose kernels throw messages to each other over the network, one of which is killed in the
/// midst of them.
#[test]
fn a_rank_killed_among_kernels_that_use_the_network_is_an_error_on_every_other() {
    let name = "a_rank_killed_among_kernels_that_use_the_network_is_an_error_on_every_other";
    if World::is_launched() {
        return be_a_rank(network);
    }
    let gpus = gpus(most()).with_gin(GinConnectionType::Full);
    gpus.with_world(name, |world| kill_at_random(name, world.n_ranks(), 23));
}

/// Ranks that are processes.
fn gpus(n: usize) -> Gpus {
    Gpus::new(n).only_real("ranks in processes of their own")
}

fn most() -> usize {
    if visible_gpus().is_ok_and(|n| n >= 4) { 4 } else { 2 }
}

/// Twenty jobs of this test, each of which loses a rank at another moment of its first tenth of a
/// second in the loop.
fn kill_at_random(test: &'static str, n_ranks: usize, seed: u64) {
    const TIMES: usize = 20;
    /// The longest life, in microseconds.
    const LONGEST: u64 = 100_000;
    for turn in 0..TIMES {
        let job = Job::new(test, n_ranks, turn % n_ranks);
        let life = fastrand::Rng::with_seed(seed + turn as u64).u64(..LONGEST);
        let error = job.run(&[(LIFE, &life.to_string())]);
        assert!(error.contains("SIGKILL"), "turn {turn}: {error}");
        job.require_reports(turn);
        job.require_no_process_left();
    }
}

/// This test program again, as the ranks of a job.
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

    /// Runs the ranks to their end; what the job says then, which must name the victim.
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
        assert!(took < DEADLINE + AROUND, "{took:?}");
        let victim = self.victim;
        assert!(error.contains(&format!("rank {victim} ")), "rank {victim} was lost: {error}");
        error
    }

    /// Every survivor has said that its wait ended soon after, with an error that names the victim.
    fn require_reports(&self, turn: usize) {
        let victim = self.victim;
        let gone = self.report(victim).unwrap_or_else(|| panic!("turn {turn}: no rank was lost"));
        let gone: u64 = gone.parse().unwrap();
        for rank in (0..self.n_ranks).filter(|rank| *rank != victim) {
            let report = self.report(rank);
            let report =
                report.unwrap_or_else(|| panic!("turn {turn}: rank {rank} noticed nothing"));
            let (noticed, error) = report.split_once(' ').unwrap();
            let after = Duration::from_millis(noticed.parse::<u64>().unwrap().saturating_sub(gone));
            assert!(after < DEADLINE, "turn {turn}: rank {rank} noticed after {after:?}");
            let named = error.contains(&format!("rank {victim} is lost"));
            assert!(named, "turn {turn}: to rank {rank}, rank {victim} was lost by: {error}");
        }
    }

    fn report(&self, rank: usize) -> Option<String> {
        std::fs::read_to_string(report_of(self.reports.path(), rank)).ok()
    }

    /// No process has this job's folder in its environment.
    fn require_no_process_left(&self) {
        let marker = self.reports.path().as_os_str().as_encoded_bytes();
        let marked =
            |environment: &[u8]| environment.windows(marker.len()).any(|window| window == marker);
        let left: Vec<PathBuf> = std::fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| Some(entry.ok()?.path()))
            // Not every entry is a process, and those of others cannot be read.
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

/// What a rank is told by its job.
struct Part {
    reports: PathBuf,
    victim: usize,
}

impl Part {
    /// If this rank is the victim, has it killed when its time has come.
    fn die_in_time(&self, rank: &Rank) {
        if rank.rank() != self.victim {
            return;
        }
        let life = std::env::var(LIFE).unwrap().parse().map(Duration::from_micros).unwrap();
        let (own, reports) = (rank.rank(), self.reports.clone());
        std::thread::spawn(move || {
            std::thread::sleep(life);
            Part { reports, victim: own }.report(own, &now().to_string());
            let _ = kill_process(getpid(), Signal::KILL);
        });
    }

    fn report(&self, rank: usize, what: &str) {
        // Under its final name it is complete.
        let (path, draft) = (report_of(&self.reports, rank), self.reports.join(format!("{rank}~")));
        std::fs::write(&draft, what).unwrap();
        std::fs::rename(draft, path).unwrap();
    }
}

/// This process's time, the same for all of this machine, in milliseconds.
fn now() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis()
}

/// Runs `body`, which returns only by an error, and reports that. Returns never: what runs on the
/// GPU may not end before the process does.
fn be_a_rank(body: fn(&Rank, &Part) -> Result<(), Error>) {
    let part = Part {
        reports: std::env::var_os(REPORTS).unwrap().into(),
        victim: std::env::var(VICTIM).unwrap().parse().unwrap(),
    };
    let ended = World::from_env().and_then(|world| {
        world.run(|rank| {
            let error = body(rank, &part).expect_err("a rank was lost");
            part.report(rank.rank(), &format!("{} {error}", now()));
            Err::<(), _>(error)
        })
    });
    if let Err(error) = ended {
        // Also when the world could not be made; the reports are then missing.
        eprintln!("{error}");
    }
    std::process::exit(1);
}

/// All-reduces until one fails.
fn collectives(rank: &Rank, part: &Part) -> Result<(), Error> {
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
    part.die_in_time(rank);
    loop {
        step()?;
    }
}

/// What ping-pong over the network takes.
fn court(rank: &Rank) -> Result<(DevCommResource, Window<u8>, SymmetricBuffer<u64>), Error> {
    let comm = rank.communicator()?;
    let requirements = DevCommRequirements::new().gin_connection(GinConnectionType::Full);
    let dev_comm = comm.create_dev_comm(requirements.gin_signals(BLOCKS))?;
    let throws = (BLOCKS * ROUNDS) as usize;
    Ok((dev_comm, comm.window(throws * THROWN)?, comm.mem_alloc(throws)?))
}

/// Blocks and rounds of a launch, and bytes that are thrown in each.
const BLOCKS: u32 = 4;
const ROUNDS: u32 = 50;
const THROWN: usize = 1 << 12;

/// Kernels that wait for each other's signals, until one fails.
fn network(rank: &Rank, part: &Part) -> Result<(), Error> {
    let (dev_comm, balls, nanos) = court(rank)?;
    rank.load(&KERNELS)?;
    let stream = rank.stream()?;
    let step = || {
        let play = kernels::gin_put_signal::args(&dev_comm, &balls, &balls, THROWN, ROUNDS, &nanos);
        // SAFETY: window and times have room for every round of every block; nobody looks at what
        // arrives.
        unsafe { play.grid(BLOCKS).block(32).launch(&stream)? };
        stream.synchronize()
    };
    step()?;
    rank.barrier()?;
    part.die_in_time(rank);
    loop {
        step()?;
    }
}

/// The victim goes where the others launch a kernel that waits for it.
fn kernel(rank: &Rank, part: &Part) -> Result<(), Error> {
    let comm = rank.communicator()?;
    let (send, recv) = (comm.window::<f32>(1024)?, comm.window::<f32>(1024)?);
    let dev_comm = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
    rank.load(&KERNELS)?;
    let stream = rank.stream()?;
    if rank.rank() == part.victim {
        part.report(rank.rank(), &now().to_string());
        // As if killed: no destructor, no goodbye.
        std::process::abort();
    }
    // The victim never comes, so this kernel never ends.
    let sum = kernels::lsa_allreduce::args(&dev_comm, &send, &recv, 1024);
    sum.grid(1).block(128).launch(&stream)?;
    stream.synchronize()
}
