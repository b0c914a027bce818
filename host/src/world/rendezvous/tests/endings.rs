//! Tests with generated jobs of five processes in which one is killed or stopped while they join,
//! work or finish, some with a forked child that lives on: all others end or go on within the time
//! that is promised, and no process remains.

use std::mem::MaybeUninit;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, ExitStatus};

use super::processes::{
    as_rank, job, print_to, printed_by, processes_of, require_nothing_left, shared_memory,
};
use super::*;
use crate::error::{Error, WorldError};
use crate::world::local_job::Ranks;

const TEST: &str = "world::rendezvous::tests::endings::\
    when_a_process_is_killed_or_stopped_the_others_end_or_go_on_in_time";
const RANKS: usize = 5;
/// How many jobs run, unless DEVCOMM_ENDINGS says another number: 100 are 50 kills and 50 stops, 20
/// of them of a process with a child.
const JOBS: usize = 10;
const CONCURRENT: usize = 10;
/// How soon all others have ended or gone on.
const PROMISE: Duration = Duration::from_secs(30);
/// The timeout of joining. The deadline of calls is that of programs, 10 minutes.
const JOIN_LIMIT: &str = "8";

const SOCKET: &str = "DEVCOMM_TEST_SOCKET";
/// What the ranks do: "forks", "shrinks", "finishes" or several of these.
const DOES: &str = "DEVCOMM_TEST_DOES";

/// Messages of a rank.
const WORKS: u8 = 1;
const FINISHES: u8 = 2;

/// Exit codes of a rank: it has finished with all others.
const FINISHED: i32 = 0;
/// Ranks were missing, or rank 0 had gone, while the ranks joined.
const NOT_JOINED: i32 = 50;
/// The ranks that are left did not meet.
const NOT_MET: i32 = 51;
/// The exit code of a rank that has gone on with all others but one.
const WENT_ON: i32 = 52;
/// The exit code after a loss, plus the number of the lost rank.
const LOST: i32 = 60;

/// One job, and when and how one of its processes ends.
struct Case {
    /// The rank whose process ends.
    victim: usize,
    /// Whether it is stopped, not killed.
    stops: bool,
    /// Whether the ranks fork children.
    forks: bool,
    /// Whether the other ranks are to go on.
    shrinks: bool,
    moment: Moment,
    delay: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    Joining,
    Working,
    /// The moment after this number of ranks has said that they finish.
    Finishing(usize),
}

impl Case {
    fn new(seed: usize, attempt: usize) -> Self {
        let mut random = fastrand::Rng::with_seed((seed + 1000 * attempt) as u64);
        let moment = match random.usize(..3) {
            0 => Moment::Joining,
            1 => Moment::Working,
            _ => Moment::Finishing(1 + random.usize(..RANKS)),
        };
        let longest = if moment == Moment::Joining { 60_000 } else { 12_000 };
        Self {
            victim: random.usize(..RANKS),
            stops: seed % 2 == 1,
            forks: seed.is_multiple_of(5),
            shrinks: random.bool(),
            moment,
            delay: Duration::from_micros(random.u64(..longest)),
        }
    }

    fn does(&self) -> String {
        let finishes = matches!(self.moment, Moment::Finishing(_));
        let all = [(self.forks, "forks"), (self.shrinks, "shrinks"), (finishes, "finishes")];
        all.into_iter().filter(|(does, _)| *does).map(|(_, what)| what).collect()
    }
}

/// Forks a child that lives as long as the supervisor's socket exists.
fn fork(socket: &Path) {
    // SAFETY: the child calls what the C library and this thread alone can do, and exits.
    if unsafe { libc::fork() } == 0 {
        let start = Instant::now();
        while socket.exists() && start.elapsed() < 3 * AMPLE {
            thread::sleep(Duration::from_millis(20));
        }
        // SAFETY: `_exit` has no requirements.
        unsafe { libc::_exit(0) }
    }
}

/// Works as a rank; returns its exit code.
fn work(config: &RendezvousConfig, socket: &Path, does: &str) -> i32 {
    let (own, mut random) = (config.rank, fastrand::Rng::with_seed(config.rank as u64));
    let supervisor = UnixDatagram::unbound().unwrap();
    let say = |what| supervisor.send_to(&[what], socket).unwrap();
    let world = match config.join() {
        Ok(world) => world,
        Err(Error::World(WorldError::RanksMissing { .. } | WorldError::Rendezvous { .. })) => {
            return NOT_JOINED;
        }
        Err(error) => panic!("rank {own}: {error}"),
    };
    let mut exchange = || world.all_gather(&vec![1; random.usize(..3) * random.usize(..30_000)]);
    let mut exchanges = || {
        exchange()?;
        say(WORKS);
        for _ in 0..20 {
            exchange()?;
        }
        while !does.contains("finishes") {
            exchange()?;
        }
        // The ranks do not finish at the same time.
        thread::sleep(Duration::from_millis(3 * own as u64));
        say(FINISHES);
        world.finish()
    };
    let lost = match exchanges() {
        Ok(()) => return FINISHED,
        Err(Error::World(WorldError::RankLost { rank, .. })) => rank,
        Err(error) => panic!("rank {own}: {error}"),
    };
    if lost == own || !does.contains("shrinks") {
        return LOST + lost as i32;
    }
    let left = world.survivors().and_then(|left| {
        left.barrier()?;
        left.finish()?;
        Ok(left.n_ranks())
    });
    match left {
        Ok(left) if left == RANKS - 1 => WENT_ON,
        // Some ranks had finished, or had not joined.
        Ok(_) | Err(Error::World(_)) => NOT_MET,
        Err(error) => panic!("rank {own}: {error}"),
    }
}

fn run_as_rank(config: &RendezvousConfig) -> ! {
    let socket = std::path::PathBuf::from(std::env::var_os(SOCKET).unwrap());
    print_to(&printed_by(config.rank, &socket));
    let does = std::env::var(DOES).unwrap();
    if does.contains("forks") {
        let delay = fastrand::Rng::with_seed(config.rank as u64).u64(..20_000);
        let socket = socket.clone();
        thread::spawn(move || {
            thread::sleep(Duration::from_micros(delay));
            fork(&socket);
        });
    }
    std::process::exit(work(config, &socket, &does))
}

/// Waits until the process has stopped or ended; leaves it to be waited for. Returns whether it has
/// ended.
fn has_ended(process: &Child) -> bool {
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    let flags = libc::WSTOPPED | libc::WEXITED | libc::WNOWAIT;
    // SAFETY: a child that was not waited for; `info` is live.
    let waited = unsafe { libc::waitid(libc::P_PID, process.id(), info.as_mut_ptr(), flags) };
    assert_eq!(waited, 0);
    // SAFETY: zeros are a value of it, and `waitid` has written it.
    unsafe { info.assume_init() }.si_code != libc::CLD_STOPPED
}

fn signal(process: &Child, signal: i32) {
    // SAFETY: a child that was not waited for, so that its number is its own.
    assert_eq!(unsafe { libc::kill(process.id() as i32, signal) }, 0);
}

/// Waits until the processes have ended, at most for `limit`.
fn wait_for(processes: &mut [(usize, Child)], limit: Duration) -> Vec<(usize, Option<ExitStatus>)> {
    let start = Instant::now();
    loop {
        let status = |(rank, child): &mut (usize, Child)| (*rank, child.try_wait().unwrap());
        let all: Vec<_> = processes.iter_mut().map(status).collect();
        if all.iter().all(|(_, status)| status.is_some()) || start.elapsed() > limit {
            return all;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Runs a job. Returns how long the other ranks took, or `None` if the process had ended by itself
/// before.
fn run(seed: usize, case: &Case, path: &Path) -> Option<Duration> {
    let Case { victim, stops, forks, shrinks, moment, delay } = *case;
    let heard = UnixDatagram::bind(path).unwrap();
    heard.set_read_timeout(Some(AMPLE)).unwrap();
    let job = job(TEST, RANKS).env(SOCKET, path).env(DOES, case.does());
    let mut ranks = Ranks::start(&job.env("DEVCOMM_TIMEOUT", JOIN_LIMIT)).unwrap();
    let (what, mut awaited) = match moment {
        Moment::Joining => (WORKS, 0),
        Moment::Working => (WORKS, RANKS),
        Moment::Finishing(ranks) => (FINISHES, ranks),
    };
    while awaited > 0 {
        let mut message = [0];
        assert_eq!(heard.recv(&mut message).unwrap(), 1, "job {seed}");
        awaited -= usize::from(message[0] == what);
    }
    thread::sleep(delay);
    let mut ended = ranks.running[victim].take().unwrap();
    signal(&ended, if stops { libc::SIGSTOP } else { libc::SIGKILL });
    let start = Instant::now();
    let is_late = has_ended(&ended) && (stops || ended.wait().unwrap().code().is_some());
    let others = (0..RANKS).filter_map(|rank| Some((rank, ranks.running[rank].take()?)));
    let mut others: Vec<_> = others.collect();
    let statuses = wait_for(&mut others, if is_late { AMPLE } else { PROMISE });
    let took = start.elapsed();
    let printed = |rank| std::fs::read_to_string(printed_by(rank, path)).unwrap_or_default();
    let place = format!(
        "job {seed}: rank {victim} {} (forks: {forks}, shrinks: {shrinks}) {moment:?}, {delay:?} \
         later; too late: {is_late}; after {took:?}: {statuses:?}",
        if stops { "stopped" } else { "killed" },
    );
    for (rank, status) in &statuses {
        let code = status.and_then(|status| status.code());
        let expected = match code {
            Some(NOT_JOINED) => moment == Moment::Joining,
            Some(FINISHED) => matches!(moment, Moment::Finishing(_)),
            Some(WENT_ON) => shrinks,
            Some(NOT_MET) => shrinks && moment != Moment::Working,
            code => code == Some(LOST + victim as i32) && !shrinks,
        };
        assert!(expected, "{place}\nrank {rank}: {}", printed(*rank));
    }
    // When it is continued, it ends too, as do the children without the socket.
    signal_and_wait(victim, ended, stops, &place);
    std::fs::remove_file(path).unwrap();
    (!is_late).then_some(took)
}

fn signal_and_wait(rank: usize, process: Child, stopped: bool, place: &str) {
    if stopped {
        signal(&process, libc::SIGCONT);
        let mut process = [(rank, process)];
        let status = wait_for(&mut process, AMPLE)[0].1;
        let code = status.and_then(|status| status.code());
        assert!(code.is_some_and(|code| code != 101), "{place}: {status:?}");
    }
}

#[test]
fn when_a_process_is_killed_or_stopped_the_others_end_or_go_on_in_time() {
    if let Some(config) = as_rank(TEST) {
        run_as_rank(&config);
    }
    let (folder, shared_before) = (tempfile::tempdir().unwrap(), shared_memory());
    let jobs = number_of("DEVCOMM_ENDINGS", JOBS);
    let start = Instant::now();
    let took = run_each(jobs, CONCURRENT, |seed| {
        let attempt = |attempt| {
            let path = folder.path().join(format!("{seed}-{attempt}"));
            run(seed, &Case::new(seed, attempt), &path)
        };
        (Case::new(seed, 0).stops, (0..20).find_map(attempt).unwrap())
    });
    assert_eq!(took.len(), jobs);
    // Children look every few milliseconds whether they may live.
    let waiting = Instant::now();
    while !processes_of(folder.path()).is_empty() && waiting.elapsed() < AMPLE {
        thread::sleep(Duration::from_millis(20));
    }
    require_nothing_left(folder.path(), &shared_before);
    for stops in [false, true] {
        let longest = took.iter().filter(|one| one.0 == stops).map(|one| one.1).max();
        println!("stops: {stops}, the others took at most {longest:.1?}");
    }
    println!("{jobs} jobs in {:.1?}", start.elapsed());
}
