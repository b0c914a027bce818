//! Tests that when a rank dies, or its process is stopped, every rank that waits for it gets an
//! error that names it, within a deadline.
//!
//! On GPUs the ranks are processes, which get signals at random moments; DEVCOMM_KILLS and
//! DEVCOMM_STOPS say how many. On simulated GPUs they are threads: a call of one of them fails or
//! does not return.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use devcomm::{
    AllGatherGemm, AllGatherGemmPlan, DevCommRequirements, Effect, Error, Fault, GinConnectionType,
    KERNELS, LocalJob, Rank, ReduceOp, Simulation, World, kernels, visible_gpus,
};
use devcomm_testing::machines::Gpus;
use rustix::process::{Signal, getpid, kill_process};

/// How long after the loss the survivors may take to return an error.
const DEADLINE: Duration = Duration::from_secs(15);
/// How long after [`DEADLINE`] the job may take to end.
const END: Duration = Duration::from_secs(30);
/// How long a process may be silent, and a call of the set-up may take, in seconds. NCCL's set-up
/// takes more than 3 where jobs start concurrently.
const SILENCE: u64 = 8;
/// How long a simulated rank may be silent.
const SIMULATED_SILENCE: Duration = Duration::from_secs(3);

/// The folder of a job's reports. Its path also identifies the job's processes.
const REPORTS: &str = "DEVCOMM_TEST_REPORTS";
const VICTIM: &str = "DEVCOMM_TEST_VICTIM";
/// Microseconds after which the victim is lost, if not at once.
const LOSS_AFTER: &str = "DEVCOMM_TEST_LOSS_AFTER";
/// The name of a [`Loss`].
const LOSS: &str = "DEVCOMM_TEST_LOSS";

/// How a rank is lost.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Loss {
    /// The rank is killed by SIGKILL.
    Killed,
    /// The rank is stopped by SIGSTOP: it is alive but absent.
    Stopped,
    /// The rank ends itself before it takes part.
    Aborted,
}

impl Loss {
    /// Returns how often a rank is lost.
    fn times(self) -> usize {
        let times = |variable, usual| {
            std::env::var(variable).map_or(usual, |times: String| times.parse().unwrap())
        };
        match self {
            Self::Killed => times("DEVCOMM_KILLS", 20),
            Self::Stopped => times("DEVCOMM_STOPS", 5),
            Self::Aborted => 3,
        }
    }
}

/// The work of the ranks until one is lost. It calls its second argument once all ranks work.
type Work = fn(&Rank, &dyn Fn()) -> Result<(), Error>;

#[test]
fn a_rank_killed_among_collectives_is_an_error_on_every_other() {
    let name = "a_rank_killed_among_collectives_is_an_error_on_every_other";
    lose_a_rank(name, Gpus::new(max_ranks()), Loss::Killed, collectives, Some("ncclAllReduce"));
}

#[test]
fn a_rank_stopped_among_collectives_is_an_error_on_every_other() {
    let name = "a_rank_stopped_among_collectives_is_an_error_on_every_other";
    lose_a_rank(name, Gpus::new(max_ranks()), Loss::Stopped, collectives, Some("ncclAllReduce"));
}

#[test]
fn a_rank_that_a_kernel_waits_for_is_an_error() {
    let name = "a_rank_that_a_kernel_waits_for_is_an_error";
    lose_a_rank(name, Gpus::new(2), Loss::Aborted, in_kernels, Some("cuLaunchKernelEx"));
}

#[test]
fn a_rank_stopped_among_kernels_is_an_error_on_every_other() {
    let name = "a_rank_stopped_among_kernels_is_an_error_on_every_other";
    lose_a_rank(name, Gpus::new(2), Loss::Stopped, in_kernels, Some("cuLaunchKernelEx"));
}

#[test]
fn a_rank_stopped_among_gathered_products_is_an_error_on_every_other() {
    let name = "a_rank_stopped_among_gathered_products_is_an_error_on_every_other";
    lose_a_rank(name, Gpus::new(2), Loss::Stopped, gathered_products, Some("cuLaunchKernelEx"));
}

#[test]
fn a_rank_stopped_among_exchanges_is_an_error_on_every_other() {
    let name = "a_rank_stopped_among_exchanges_is_an_error_on_every_other";
    lose_a_rank(name, Gpus::new(max_ranks()), Loss::Stopped, exchanges, Some("cuStreamCreate"));
}

#[test]
fn a_rank_killed_among_kernels_that_use_the_network_is_an_error_on_every_other() {
    let name = "a_rank_killed_among_kernels_that_use_the_network_is_an_error_on_every_other";
    let gpus = Gpus::new(max_ranks()).with_gin(GinConnectionType::Full);
    lose_a_rank(name, gpus.only_real("ranks that are processes"), Loss::Killed, network, None);
}

fn max_ranks() -> usize {
    if visible_gpus().is_ok_and(|n| n >= 4) { 4 } else { 2 }
}

/// Loses a rank at random moments of its work: on GPUs in the first 0.1 s, on simulated ones in one
/// of its first calls of `simulated`, if that is a function.
fn lose_a_rank(
    test: &'static str,
    gpus: Gpus,
    loss: Loss,
    work: Work,
    simulated: Option<&'static str>,
) {
    /// The latest loss, in microseconds.
    const LATEST: u64 = 100_000;
    /// Jobs that share the GPUs.
    const AT_ONCE: usize = 4;
    if World::is_launched() {
        return run_rank(work);
    }
    if let (Some(function), false) = (simulated, Gpus::are_real()) {
        return (0..loss.times()).for_each(|round| lose_simulated(round, loss, work, function));
    }
    gpus.with_jobs(test, |n_ranks| {
        let shared_before = shared_memory();
        let mut random = fastrand::Rng::with_seed(11);
        let rounds = (0..loss.times()).map(|round| (round, random.u64(..LATEST)));
        let rounds = Mutex::new(rounds.collect::<Vec<_>>().into_iter());
        let next = || rounds.lock().unwrap().next();
        let (begun, waits) = (Instant::now(), Mutex::new(Vec::new()));
        std::thread::scope(|scope| {
            for _ in 0..AT_ONCE {
                scope.spawn(|| {
                    while let Some((round, after)) = next() {
                        let wait = lose_once(test, n_ranks, loss, round, after);
                        waits.lock().unwrap().push(wait);
                    }
                });
            }
        });
        let mut waits = waits.into_inner().unwrap();
        waits.sort();
        let (n, took) = (waits.len(), begun.elapsed());
        let [median, last] = [waits[n / 2], waits[n - 1]]
            .map(|[known, ended]| format!("{known:.1?}, the job ended after {ended:.1?}"));
        println!(
            "{n} ranks {loss:?} in {took:.0?}: the others knew after {median}; at most {last}"
        );
        let left: Vec<_> = shared_memory().difference(&shared_before).cloned().collect();
        assert!(left.is_empty(), "left in /dev/shm: {left:?}");
    });
}

/// Runs a job of processes, of which one is lost. Returns how long after the loss the last
/// survivor knew, and the job had ended.
fn lose_once(
    test: &'static str,
    n_ranks: usize,
    loss: Loss,
    round: usize,
    loss_after: u64,
) -> [Duration; 2] {
    let job = Job::new(test, n_ranks, round % n_ranks, loss);
    let (error, ended) = job.run(loss_after);
    let signal = match loss {
        Loss::Killed => Some("SIGKILL"),
        Loss::Aborted => Some("SIGABRT"),
        // The job's error is that of the first process that ended.
        Loss::Stopped => None,
    };
    let named = |signal| error.contains(&format!("rank {} ", job.victim)) && error.contains(signal);
    assert!(signal.is_none_or(named), "round {round}: {error}");
    let lost = job.lost(round, &error);
    let known = job.require_reports(round, lost, &error);
    let ended = after(lost, ended);
    assert!(ended < DEADLINE + END, "round {round}: the job ended after {ended:?}");
    job.require_no_process_left();
    [known, ended]
}

/// Returns the time from one moment to another.
fn after(begin: u64, end: u64) -> Duration {
    Duration::from_millis(end.saturating_sub(begin))
}

/// Makes one of 2 to 4 simulated ranks fail in a call, or not return from it. If the others wait
/// for a stream then, the simulator finds the deadlock, and reports where each rank is.
fn lose_simulated(round: usize, loss: Loss, work: Work, function: &'static str) {
    let mut random = fastrand::Rng::with_seed(round as u64);
    let n = random.usize(2..=4);
    let victim = random.usize(..n);
    let world = World::builder()
        .deadline(Some(SIMULATED_SILENCE))
        .simulate(Simulation::new(n).seed(round as u64))
        .threads(n)
        .unwrap();
    let effect = if loss == Loss::Stopped { Effect::Hang } else { Effect::Fail(1) };
    let (gpu, nth) = (Some(victim), Some(random.usize(..30)));
    world.simulated_machine().unwrap().inject(Fault { function, gpu, nth, effect });
    let errors = Mutex::new(Vec::new());
    let failed = world.run(|rank| {
        let error = work(rank, &|| ()).expect_err("a rank was lost");
        errors.lock().unwrap().push((rank.rank(), error.to_string()));
        Err::<(), _>(error)
    });
    failed.unwrap_err();
    let errors = errors.into_inner().unwrap();
    assert_eq!(errors.len(), n, "round {round}: {errors:?}");
    for (rank, error) in errors.iter().filter(|(rank, _)| *rank != victim) {
        let named = error.contains(&format!("rank {victim} is lost"))
            || loss == Loss::Stopped && error.contains(&format!("rank {victim} is in {function}"));
        assert!(named, "round {round}: rank {rank} of {n}, rank {victim} is not named: {error}");
    }
}

/// A job whose ranks are processes of this test program.
struct Job {
    test: &'static str,
    n_ranks: usize,
    victim: usize,
    loss: Loss,
    reports: tempfile::TempDir,
}

impl Job {
    fn new(test: &'static str, n_ranks: usize, victim: usize, loss: Loss) -> Self {
        let reports = tempfile::Builder::new().prefix("devcomm-lost-rank-").tempdir().unwrap();
        Self { test, n_ranks, victim, loss, reports }
    }

    /// Runs the ranks to their end, and returns the job's error, and when it ended. The victim is
    /// lost after `loss_after` microseconds.
    fn run(&self, loss_after: u64) -> (String, u64) {
        let mut job = LocalJob::new(self.n_ranks)
            .unwrap()
            .args([self.test, "--exact", "--nocapture"])
            .env(REPORTS, self.reports.path())
            .env(VICTIM, self.victim.to_string())
            .env(LOSS, format!("{:?}", self.loss))
            .env(LOSS_AFTER, loss_after.to_string());
        if self.loss == Loss::Stopped {
            job = job.env("DEVCOMM_OPERATION_TIMEOUT", SILENCE.to_string());
        }
        let error = job.run().expect_err("a rank was lost").to_string();
        (error, now())
    }

    /// Returns when the victim was lost.
    fn lost(&self, round: usize, job: &str) -> u64 {
        let lost = self.report(self.victim);
        lost.unwrap_or_else(|| panic!("round {round}: no rank was lost: {job}")).parse().unwrap()
    }

    /// Checks that every survivor's wait ended within the deadline, with an error that names the
    /// victim. Returns the longest of these waits.
    fn require_reports(&self, round: usize, lost: u64, job: &str) -> Duration {
        let victim = self.victim;
        let mut longest = Duration::ZERO;
        for rank in (0..self.n_ranks).filter(|rank| *rank != victim) {
            let report = self.report(rank);
            let report = report
                .unwrap_or_else(|| panic!("round {round}: rank {rank} reported no error: {job}"));
            let (at, error) = report.split_once(' ').unwrap();
            let after = after(lost, at.parse().unwrap());
            assert!(after < DEADLINE, "round {round}: rank {rank} returned after {after:?}");
            let named = error.contains(&format!("rank {victim} is lost"));
            assert!(named, "round {round}, rank {rank}: rank {victim} is not named: {error}");
            longest = longest.max(after);
        }
        longest
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

/// Returns the names in /dev/shm.
fn shared_memory() -> BTreeSet<OsString> {
    let entries = std::fs::read_dir("/dev/shm").into_iter().flatten();
    entries.filter_map(|entry| Some(entry.ok()?.file_name())).collect()
}

/// What a rank's environment says about the job.
#[derive(Clone)]
struct RankEnv {
    reports: PathBuf,
    victim: usize,
    loss: Loss,
    loss_after: Duration,
}

impl RankEnv {
    fn new() -> Self {
        let variable = |name| std::env::var(name).unwrap();
        let losses = [Loss::Killed, Loss::Stopped, Loss::Aborted];
        let loss = losses.into_iter().find(|loss| format!("{loss:?}") == variable(LOSS));
        Self {
            reports: variable(REPORTS).into(),
            victim: variable(VICTIM).parse().unwrap(),
            loss: loss.unwrap(),
            loss_after: Duration::from_micros(variable(LOSS_AFTER).parse().unwrap()),
        }
    }

    /// Loses this rank if it is the victim: at once, or by a thread after the delay.
    fn begin(&self, rank: &Rank) {
        if rank.rank() != self.victim {
            return;
        }
        let signal = match self.loss {
            Loss::Killed => Signal::KILL,
            Loss::Stopped => Signal::STOP,
            Loss::Aborted => {
                self.report(self.victim, &now().to_string());
                // As in a killed process, no destructor runs.
                std::process::abort();
            }
        };
        let this = self.clone();
        std::thread::spawn(move || {
            std::thread::sleep(this.loss_after);
            this.report(this.victim, &now().to_string());
            let _ = kill_process(getpid(), signal);
        });
    }

    fn report(&self, rank: usize, what: &str) {
        // The file gets its name when it is complete.
        let (path, draft) = (report_of(&self.reports, rank), self.reports.join(format!("{rank}~")));
        std::fs::write(&draft, what).unwrap();
        std::fs::rename(draft, path).unwrap();
    }
}

/// Returns the system time in milliseconds, comparable between processes of this host.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

/// Works until there is an error, and reports it. Exits the process, as kernels on the GPU may
/// never end.
fn run_rank(work: Work) {
    let env = RankEnv::new();
    let ended = World::from_env().and_then(|world| {
        world.run(|rank| {
            let error = work(rank, &|| env.begin(rank)).expect_err("a rank was lost");
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

/// Makes some steps, and then steps without end.
fn repeat(
    rank: &Rank,
    begin: &dyn Fn(),
    step: impl Fn() -> Result<(), Error>,
) -> Result<(), Error> {
    for _ in 0..5 {
        step()?;
    }
    rank.barrier()?;
    begin();
    loop {
        step()?;
    }
}

/// Runs all-reduces, and waits for the stream.
fn collectives(rank: &Rank, begin: &dyn Fn()) -> Result<(), Error> {
    let count = if rank.is_simulated() { 8 } else { 1 << 20 };
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let (send, recv) = (comm.mem_alloc::<f32>(count)?, comm.mem_alloc::<f32>(count)?);
    repeat(rank, begin, || {
        for _ in 0..4 {
            comm.all_reduce(&send, &recv, ReduceOp::Sum, &stream)?;
        }
        stream.synchronize()
    })
}

/// Runs kernels that wait for each other.
fn in_kernels(rank: &Rank, begin: &dyn Fn()) -> Result<(), Error> {
    let comm = rank.communicator()?;
    let (send, recv) = (comm.window::<f32>(1024)?, comm.window::<f32>(1024)?);
    let dev_comm = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
    rank.load(&KERNELS)?;
    let stream = rank.stream()?;
    repeat(rank, begin, || {
        let sum = kernels::lsa_allreduce::args(&dev_comm, &send, &recv, 1024);
        sum.grid(1).block(128).launch(&stream)?;
        stream.synchronize()
    })
}

/// Runs products whose loading threads wait for the rows of other ranks.
fn gathered_products(rank: &Rank, begin: &dyn Fn()) -> Result<(), Error> {
    let (comm, stream, n_ranks) = (rank.communicator()?, rank.stream()?, rank.n_ranks());
    let shape @ [m, n, k] = if rank.is_simulated() { [12, 8, 8] } else { [4096, 1024, 1024] };
    let (a, b) = (comm.mem_alloc(m / n_ranks * k)?, comm.mem_alloc(n * k)?);
    let c = comm.mem_alloc(m * n)?;
    let product = AllGatherGemm::new(comm, &stream, m, k)?;
    product.set_plan(Some(AllGatherGemmPlan::Fused))?;
    repeat(rank, begin, || {
        product.launch(&a, &b, &c, shape)?;
        stream.synchronize()
    })
}

/// Runs exchanges on the host.
fn exchanges(rank: &Rank, begin: &dyn Fn()) -> Result<(), Error> {
    rank.communicator()?;
    repeat(rank, begin, || {
        rank.stream()?;
        rank.barrier()
    })
}

/// Runs kernels that wait for each other's signals over the network.
fn network(rank: &Rank, begin: &dyn Fn()) -> Result<(), Error> {
    const BLOCKS: u32 = 4;
    /// Bytes per message.
    const BYTES: usize = 1 << 12;
    const ROUNDS: u32 = 50;
    let comm = rank.communicator()?;
    let requirements = DevCommRequirements::new().gin_connection(GinConnectionType::Full);
    let dev_comm = comm.create_dev_comm(requirements.gin_signals(BLOCKS))?;
    let slots = (BLOCKS * ROUNDS) as usize;
    let (window, nanos) = (comm.window::<u8>(slots * BYTES)?, comm.mem_alloc::<u64>(slots)?);
    rank.load(&KERNELS)?;
    let stream = rank.stream()?;
    repeat(rank, begin, || {
        let put = kernels::gin_put_signal::args(&dev_comm, &window, &window, BYTES, ROUNDS, &nanos);
        // SAFETY: the window and `nanos` have room for every round of every block; nothing reads
        // what arrives.
        unsafe { put.grid(BLOCKS).block(32).launch(&stream)? };
        stream.synchronize()
    })
}
